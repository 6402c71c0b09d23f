r"""Smooth spectral densities, from kept nodes and weights, without further products.

Each probe's density is $\sum_j w_j \, \phi_\sigma(x - \theta_j)$ with a Gaussian
$\phi_\sigma$; the density is their mean, the band its standard error over probes. The
integral is one: multiplied by the dimension, it counts eigenvalues.
"""

import dataclasses
import math

import numpy as np
import scipy.special
import scipy.stats
from jaxtyping import Float

from t5x_fwdloss.curvature.estimators.slq import SpectralSamples
from t5x_fwdloss.curvature.krylov.space import rounding_level


@dataclasses.dataclass(frozen=True)
class Density:
    """A density on a grid.

    Attributes:
      grid: The points of evaluation.
      mean: The density, with integral one.
      standard_error: Standard error over probes; NaN for a single one.
      low: Lower end of the band at the requested confidence, at least zero.
      high: Upper end.
      log_mean: Logarithm of the mean, exact far out in the tails where the mean itself
        underflows.
      width: Standard deviation of the smoothing Gaussian.
      confidence: The level of the band, point by point.
    """

    grid: Float[np.ndarray, " points"]
    mean: Float[np.ndarray, " points"]
    standard_error: Float[np.ndarray, " points"]
    low: Float[np.ndarray, " points"]
    high: Float[np.ndarray, " points"]
    log_mean: Float[np.ndarray, " points"]
    width: float
    confidence: float


def default_width(samples: SpectralSamples, fraction: float = 0.01) -> float:
    """A smoothing width: a fraction of the range of the nodes, never zero."""
    low, high = _range(samples)
    return fraction * (high - low) or fraction * max(abs(high), 1e-12)


def default_grid(
    samples: SpectralSamples, width: float, num_points: int = 1000
) -> Float[np.ndarray, " points"]:
    """Equally spaced points over the range of the nodes and five widths beyond."""
    low, high = _range(samples)
    return np.linspace(low - 5 * width, high + 5 * width, num_points)


def _range(samples):
    nodes = np.concatenate(samples.nodes)
    return float(nodes.min()), float(nodes.max())


def density(
    samples: SpectralSamples,
    grid: np.ndarray | None = None,
    *,
    width: float | None = None,
    confidence: float = 0.95,
) -> Density:
    """The smoothed density with its band over probes.

    Args:
      samples: The quadratures.
      grid: The points of evaluation; None: `default_grid`.
      width: Standard deviation of the Gaussian; None: `default_width`.
      confidence: The level of the band.

    Returns:
      The density.

    Raises:
      ValueError: The width is not positive, or there are no probes.
    """
    if not samples.num_probes:
        raise ValueError("A density must have at least one probe: got none.")
    width = default_width(samples) if width is None else float(width)
    if not (width > 0 and math.isfinite(width)):
        raise ValueError(f"width must be positive: got {width}.")
    grid = default_grid(samples, width) if grid is None else np.asarray(grid, float)
    logs = np.stack(
        [
            _log_density(nodes, weights, grid, width)
            for nodes, weights in zip(samples.nodes, samples.weights, strict=True)
        ]
    )
    count = samples.num_probes
    values = np.exp(logs)
    mean = values.mean(axis=0)
    if count > 1:
        error = values.std(axis=0, ddof=1) / math.sqrt(count)
        half = float(scipy.stats.t.ppf(0.5 + confidence / 2, count - 1)) * error
    else:
        error, half = np.full_like(mean, np.nan), np.full_like(mean, np.inf)
    return Density(
        grid=grid,
        mean=mean,
        standard_error=error,
        low=np.maximum(mean - half, 0.0),
        high=mean + half,
        log_mean=_log_sum_exp(logs, axis=0) - math.log(count),
        width=width,
        confidence=confidence,
    )


def _log_sum_exp(exponents, axis):
    return np.asarray(scipy.special.logsumexp(exponents, axis=axis))


def _log_density(nodes, weights, grid, width):
    # A weight may underflow to zero: its logarithm is -inf, and it adds nothing.
    with np.errstate(divide="ignore"):
        log_weights = np.log(weights)
    exponents = -0.5 * ((grid[:, None] - nodes[None, :]) / width) ** 2
    norm = math.log(width * math.sqrt(2 * math.pi))
    return _log_sum_exp(exponents + log_weights[None, :], axis=1) - norm


def log_magnitudes(samples: SpectralSamples, epsilon: float = 1e-10) -> SpectralSamples:
    r"""The samples on the axis $\log_{10}(|\lambda| + \epsilon)$.

    A network's spectrum spans many orders of magnitude; on this axis bulk and outliers
    are both visible. Signs are lost: see `mass` for the weight below zero.

    Args:
      samples: The quadratures.
      epsilon: The offset that keeps the logarithm of zero finite.

    Returns:
      Samples to smooth with `density`.

    Raises:
      ValueError: `epsilon` is not positive.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive: got {epsilon}.")
    nodes, weights = [], []
    for x, w in zip(samples.nodes, samples.weights, strict=True):
        logs = np.log10(np.abs(x) + epsilon)
        order = np.argsort(logs)
        nodes.append(logs[order])
        weights.append(w[order])
    return dataclasses.replace(samples, nodes=nodes, weights=weights)


def mass(
    samples: SpectralSamples, low: float = -np.inf, high: float = np.inf
) -> tuple[float, float]:
    """The fraction of the spectrum in `[low, high]`, unsmoothed, with standard error."""
    parts = np.array(
        [
            weights[(nodes >= low) & (nodes <= high)].sum()
            for nodes, weights in zip(samples.nodes, samples.weights, strict=True)
        ]
    )
    count = len(parts)
    error = float(parts.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return float(parts.mean()), error


def zero_level(
    samples: SpectralSamples, epsilon: float, rounding: float = 0.0
) -> float:
    r"""The magnitude up to which an eigenvalue counts as zero, by rounding.

    It is `rounding_level` of the steps of the longest probe, times the largest
    magnitude of a node: about $10\, \epsilon \sqrt k \, \|A\|$.

    Args:
      samples: The quadratures.
      epsilon: The unit of rounding of the products (`trees.epsilon` of a vector).
      rounding: A measured relative error of the products, if it is larger.

    Returns:
      The level, in the unit of the eigenvalues; zero for a zero matrix.
    """
    scale = max(float(np.abs(nodes).max()) for nodes in samples.nodes)
    num_steps = max(len(nodes) for nodes in samples.nodes)
    return rounding_level(epsilon, num_steps, rounding) * scale


def signs(
    samples: SpectralSamples, level: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The negative and the zero fraction of the spectrum, each with its standard error.

    Rounding gives the null space of a matrix nodes of either sign, so that their sign
    means nothing: nodes below `-level` count as negative, those within `level` as zero.

    Args:
      samples: The quadratures.
      level: The magnitude that counts as zero, as `zero_level` gives it.

    Returns:
      The fraction of eigenvalues below `-level` and its standard error over probes, and
      the same for those in `[-level, level]`.
    """
    below = float(np.nextafter(-level, -np.inf))
    return mass(samples, high=below), mass(samples, -level, level)
