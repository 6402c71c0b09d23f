"""The estimators of the package on a dense matrix, from their definitions, in float64."""

import dataclasses
import math

import numpy as np
import scipy.stats


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a trace estimator reports.

    Attributes:
        samples: one estimate a probe.
        error: the standard error of their mean.
        interval: the confidence interval.
    """

    samples: np.ndarray
    error: float
    interval: tuple[float, float]

    @property
    def value(self) -> float:
        return float(np.mean(self.samples))


def hutchinson(samples, confidence=0.95, least_error=0.0) -> Estimate:
    """The mean of independent samples; Student's interval, skewed and widened."""
    n, mean = len(samples), float(np.mean(samples))
    error = max(float(np.std(samples, ddof=1)) / math.sqrt(n), least_error)
    skewness = float(scipy.stats.skew(samples, bias=False))
    plain = _quantile(confidence, n - 1)
    # The first term of the Edgeworth expansion, on the side of the long tail.
    longer = plain + abs(skewness) * (1 + 2 * plain**2) / (6 * math.sqrt(n))
    below, above = (plain, longer) if skewness > 0 else (longer, plain)
    reach = (1 + 3 / n) * error
    return Estimate(
        np.asarray(samples), error, (mean - reach * below, mean + reach * above)
    )


def hutchpp(matrix, sketch, probes, confidence=0.95) -> Estimate:
    """Exact on the range of the sketch, sampled outside of it."""
    q, _ = np.linalg.qr(matrix @ sketch)
    outside = np.eye(len(matrix)) - q @ q.T
    rest = outside @ matrix @ outside
    samples = np.trace(q.T @ matrix @ q) + _quadratic(rest, probes)
    squares = np.square(rest @ probes).sum(axis=0)
    least = math.sqrt(2 * squares.mean() / len(squares))
    return hutchinson(samples, confidence, least)


def xtrace(matrix, probes, confidence=0.95) -> Estimate:
    """Each probe outside of the range of the others' products; jackknife error."""
    count = probes.shape[1]
    samples = [_left_out(matrix, probes, i, [i]) for i in range(count)]
    without = [
        np.mean([_left_out(matrix, probes, i, [i, j]) for i in range(count) if i != j])
        for j in range(count)
    ]
    error = math.sqrt((count - 1) / count * np.square(without - np.mean(without)).sum())
    mean, half = np.mean(samples), _quantile(confidence, count - 1) * error
    return Estimate(np.asarray(samples), error, (mean - half, mean + half))


def _left_out(matrix, probes, i, others):
    q, _ = np.linalg.qr(matrix @ np.delete(probes, others, axis=1))
    z = probes[:, i] - q @ (q.T @ probes[:, i])
    # Resphering: the part outside has this many dimensions.
    scale = (len(matrix) - q.shape[1]) / (z @ z)
    return np.trace(q.T @ matrix @ q) + scale * (z @ matrix @ z)


def _quadratic(matrix, columns):
    return np.einsum("ij,ij->j", columns, matrix @ columns)


def _quantile(confidence, freedom):
    return float(scipy.stats.t.ppf(0.5 + confidence / 2, freedom))


def quadrature(matrix, start, num_steps) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Lanczos, orthogonalized twice against all of the basis."""
    basis = [start / np.linalg.norm(start)]
    for _ in range(num_steps - 1):
        w = matrix @ basis[-1]
        for _ in range(2):
            w = w - np.array(basis).T @ (np.array(basis) @ w)
        basis.append(w / np.linalg.norm(w))
    rows = np.array(basis)
    nodes, vectors = np.linalg.eigh(rows @ matrix @ rows.T)
    return nodes, vectors[0] ** 2
