r"""Effective dimension and log-determinant from kept nodes and weights, with bounds.

With a damping $a > 0$ and the eigenvalues $\lambda_j \ge 0$,

$$ d(a) = \sum_j \frac{\lambda_j}{\lambda_j + a}, \qquad
   \log \det (A + a I) = \sum_j \log (\lambda_j + a). $$

For both functions all even derivatives are negative and all odd ones positive. A probe's
$k$-point Gauss quadrature is therefore never below $z^T f(A) z$, and the $k$-point
Gauss-Radau quadrature with a node at a lower bound of the spectrum never above it (Golub
and Meurant 2010, section 6.2). The estimate is the mean of both; half their distance
bounds what too few steps may have done.

References:
  MacKay 1992, Bayesian interpolation: the number of well-determined parameters.
  Golub, Meurant 2010, Matrices, moments and quadrature with applications.
"""

import dataclasses
import math

import numpy as np

from t5x_fwdloss.curvature.estimators.slq import SpectralSamples
from t5x_fwdloss.curvature.krylov.lanczos import eigh_tridiagonal


@dataclasses.dataclass(frozen=True)
class DampedSum:
    """A sum over all eigenvalues.

    Attributes:
      value: The mean over probes, halfway between both quadratures.
      standard_error: Its standard error over probes.
      half_gap: Half the mean distance of the quadratures.
    """

    value: float
    standard_error: float
    half_gap: float


def effective_dimension(
    samples: SpectralSamples, damping: float, *, level: float = 0.0, low: float = 0.0
) -> DampedSum:
    r"""The effective dimension $\operatorname{tr} A (A + a I)^{-1}$.

    Args:
      samples: The quadratures of a positive semidefinite matrix.
      damping: $a$, above `level`.
      level: The magnitude up to which an eigenvalue is zero by rounding.
      low: A lower bound of the exact spectrum, at least 0.

    A damping that is not above the magnitude of negative nodes raises `ValueError`.

    Returns:
      The sum with its errors; between 0 and the dimension.
    """
    fraction = lambda x: x / (x + damping)
    return _damped_sum(samples, fraction, damping, level, low)


def log_determinant(
    samples: SpectralSamples, damping: float, *, level: float = 0.0, low: float = 0.0
) -> DampedSum:
    r"""The log-determinant $\log \det (A + a I)$; arguments as above."""
    logarithm = lambda x: np.log(x + damping)
    return _damped_sum(samples, logarithm, damping, level, low)


def _damped_sum(samples, function, damping, level, low) -> DampedSum:
    ends = [float(nodes[0]) for nodes in samples.nodes]
    # Rounding puts nodes of the null space on either side of zero.
    bounds = [min(low - level, end) for end in ends]
    if not damping > -min(bounds):
        raise ValueError(
            "The damping must be above the magnitude that eigenvalues of zero have by "
            f"rounding, {-min(bounds):.4g}: got {damping:.4g}."
        )
    longest = max(map(len, samples.nodes))
    sums = []
    for nodes, weights, bound in zip(
        samples.nodes, samples.weights, bounds, strict=True
    ):
        above = below = float(weights @ function(nodes))
        # In an invariant space the quadrature is exact.
        if samples.num_exhausted < samples.num_probes and len(nodes) == longest:
            nodes, weights = radau(nodes, weights, bound)
            below = float(weights @ function(nodes))
        sums.append((below, above))
    low_sums, high_sums = samples.dimension * np.array(sums).T
    middle, count = (low_sums + high_sums) / 2, len(sums)
    scatter = float(middle.std(ddof=1)) if count > 1 else math.nan
    return DampedSum(
        float(middle.mean()),
        scatter / math.sqrt(count),
        float((high_sums - low_sums).mean()) / 2,
    )


def radau(
    nodes: np.ndarray, weights: np.ndarray, bound: float
) -> tuple[np.ndarray, np.ndarray]:
    """The Gauss-Radau quadrature with as many nodes, one of them at a lower bound.

    It is exact for polynomials of one degree less than the Gauss quadrature.

    Args:
      nodes: The nodes of a Gauss quadrature, ascending.
      weights: Its weights, with sum one.
      bound: The node that is wanted, not above the others.

    Returns:
      Nodes and weights.
    """
    alphas, betas = jacobi(nodes, weights)
    if len(alphas) == 1 or not betas.all():
        return np.array([bound]), np.array([1.0])
    # The last entry of the diagonal for which `bound` is an eigenvalue (Golub 1973).
    inner = (
        np.diag(alphas[:-1] - bound) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
    )
    unit = np.zeros(len(betas))
    unit[-1] = betas[-1] ** 2
    last = bound + np.linalg.solve(inner, unit)[-1]
    found, vectors = eigh_tridiagonal(np.append(alphas[:-1], last), betas)
    return found, vectors[0] ** 2


def jacobi(nodes: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tridiagonal matrix of a Gauss quadrature: diagonal and off-diagonal.

    The nodes are put in one by one, by rotations that lose nothing to rounding (Gragg
    and Harwood 1984, The numerically stable reconstruction of Jacobi matrices).

    Args:
      nodes: The nodes, all different.
      weights: Their weights, with sum one.
    """
    alphas, squares = np.array(nodes, float), np.zeros(len(nodes))
    squares[0] = weights[0]
    for n in range(1, len(nodes)):
        node, left, shift, sine = float(nodes[n]), float(weights[n]), 0.0, 0.0
        cosine = 1.0
        for k in range(n + 1):
            total = squares[k] + left
            new, before = cosine * total, sine
            cosine, sine = (
                (squares[k] / total, left / total) if total > 0 else (1.0, 0.0)
            )
            moved = sine * (alphas[k] - node) - cosine * shift
            alphas[k] -= moved - shift
            shift = moved
            left = shift**2 / sine if sine > 0 else before * squares[k]
            squares[k] = new
    return alphas, np.sqrt(squares[1:])
