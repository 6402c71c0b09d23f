r"""Jensen-Shannon distances between spectral densities.

With two densities $p, q$ and $m = (p + q) / 2$,

$$ d(p, q) = \sqrt{\tfrac12 \operatorname{KL}(p \,\|\, m) +
                   \tfrac12 \operatorname{KL}(q \,\|\, m)}, $$

logarithms to base 2: a metric between 0 (equal) and 1 (apart). Spectra span many orders
of magnitude and have both signs, so the densities are taken on the axis

$$ x = \operatorname{arsinh}(\lambda / 2 \ell) / \ln 10, $$

which counts decades above $\ell$ on both sides and is linear within: $\ell$ is the
magnitude of eigenvalues that are zero by rounding. The distance depends on the width of
the smoothing and on $\ell$, and noise makes it too large, most where few probes are
compared: distances are comparable at the same settings.

References:
  Endres, Schindelin 2003, A new metric for probability distributions.
  Zhang et al. 2024, arXiv 2402.16788: spectra of blocks of parameters and their
    distances.
"""

import collections.abc
import dataclasses
import math

import numpy as np
from jaxtyping import Float

from t5x_fwdloss.curvature.estimators import smoothing
from t5x_fwdloss.curvature.estimators.slq import SpectralSamples

POINTS_PER_WIDTH = 10


@dataclasses.dataclass(frozen=True)
class DensityDistances:
    """The distances of several densities from each other.

    Attributes:
      grid: The points of evaluation, in signed decades.
      densities: The densities there, a row for each.
      distances: The distance of each from each.
      of_each: The mean distance of each from the others.
      mean: The mean over all pairs.
      of_each_error: Errors by the jackknife over probes; NaN for a single one.
      mean_error: That of the mean.
    """

    grid: Float[np.ndarray, " points"]
    densities: Float[np.ndarray, "groups points"]
    distances: Float[np.ndarray, "groups groups"]
    of_each: Float[np.ndarray, " groups"]
    mean: float
    of_each_error: Float[np.ndarray, " groups"]
    mean_error: float


def density_distances(
    samples: collections.abc.Sequence[SpectralSamples], level: float, width: float
) -> DensityDistances:
    """The distances between the smoothed densities of two or more matrices.

    Args:
      samples: The quadratures of each matrix, all with as many probes.
      level: The magnitude that counts as zero, above zero.
      width: Standard deviation of the smoothing Gaussian, in decades.
    """
    scaled = [signed_decades(x, level) for x in samples]
    ends = np.concatenate([nodes for x in scaled for nodes in x.nodes])
    low, high = ends.min() - 5 * width, ends.max() + 5 * width
    num_points = 1 + math.ceil((high - low) / width * POINTS_PER_WIDTH)
    grid = np.linspace(low, high, num_points)
    # [groups, probes, points]
    curves = np.stack([_curves(x, grid, width) for x in scaled])
    densities, count = curves.mean(axis=1), curves.shape[1]
    distances = _distances(densities, grid)
    of_each, mean = _means(distances)
    each_error, mean_error = np.full(len(of_each), np.nan), math.nan
    if count > 1:
        without = [
            _means(_distances(np.delete(curves, i, axis=1).mean(axis=1), grid))
            for i in range(count)
        ]
        each, means = (np.array(x) for x in zip(*without, strict=True))
        # The jackknife's standard error.
        error = lambda x: np.sqrt((count - 1) * x.var(axis=0))
        each_error, mean_error = error(each), float(error(means))
    return DensityDistances(
        grid, densities, distances, of_each, mean, each_error, mean_error
    )


def signed_decades(samples: SpectralSamples, level: float) -> SpectralSamples:
    """The samples on the axis of signed decades above `level`."""
    scale = lambda x: np.arcsinh(x / (2 * level)) / math.log(10)
    return dataclasses.replace(samples, nodes=[scale(x) for x in samples.nodes])


def _curves(samples, grid, width):
    one = lambda i: dataclasses.replace(
        samples, nodes=[samples.nodes[i]], weights=[samples.weights[i]]
    )
    return np.stack(
        [
            smoothing.density(one(i), grid, width=width).mean
            for i in range(samples.num_probes)
        ]
    )


def _distances(densities, grid) -> np.ndarray:
    parts = densities * np.gradient(grid)
    parts = parts / parts.sum(axis=1, keepdims=True)
    one, other = parts[:, None], parts[None]
    middle = (one + other) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(one > 0, one * np.log2(one / middle), 0.0).sum(axis=-1)
    return np.sqrt(np.maximum((gain + gain.T) / 2, 0.0))


def _means(distances) -> tuple[np.ndarray, float]:
    others = len(distances) - 1
    of_each = distances.sum(axis=1) / others
    return of_each, float(of_each.mean())
