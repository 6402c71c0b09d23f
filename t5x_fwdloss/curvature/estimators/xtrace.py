r"""XTrace: the trace of a symmetric map; each probe serves the subspace and the rest.

For probes $\omega_1 \dots \omega_k$ let $Q_{(i)}$ be an orthonormal basis of the products
with all probes but number $i$. Each

$$ t_i = \operatorname{tr} Q_{(i)}^T A Q_{(i)} + \alpha_i \, \omega_i^T P_{(i)} A P_{(i)}
   \omega_i, \qquad P_{(i)} = I - Q_{(i)} Q_{(i)}^T $$

is a Hutch++ estimate with one probe; XTrace is their mean, from $2 k$ products. The
probes are Gaussian and $\alpha_i = (n - r_i) / \|P_{(i)} \omega_i\|^2$ removes the
randomness of their length (the $r_i$ are ranks). All of it is computed from small
matrices: $R = Q^T A \Omega$, $H = Q^T A Q$ and $W = Q^T \Omega$.

The $t_i$ share most of their subspace, and their spread underestimates the error of
their mean (intervals of 90 % covered 82 % of the time). The error reported is the
jackknife's, from the same small matrices: it is never too small on average (Efron and
Stein), and up to four times too large where the spectrum decays fast.

Where the products are linearly dependent (low rank, or more probes than parameters),
they span the range of $A$ whichever is left out, and every $t_i$ is the trace.

References:
  Epperly, Tropp, Webber 2024, XTrace, sections 2 and 4.1 (the resphering).
  Efron, Stein 1981, The jackknife estimate of variance.
"""

import collections.abc
import dataclasses
import functools
import math

import numpy as np
import scipy.stats
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature.estimators import hutchinson, sketches
from t5x_fwdloss.curvature.krylov import basis
from t5x_fwdloss.curvature.vectors import probes, trees


def draw_probe(params: PyTree, key: probes.Key, number: int) -> PyTree:
    """Probe `number`, Gaussian."""
    return probes.random_like(probes.probe_key(key, number), params, "normal")


_no_matrix = functools.partial(np.zeros, (0, 0))
_no_numbers = functools.partial(np.zeros, 0)


@dataclasses.dataclass
class XtraceState:
    """The state of a run: vectors and small matrices, grown probe by probe.

    The probes are not part of it: `draw_again` draws them from the key.

    Attributes:
      space: The basis Q.
      r: Q^T A Omega.
      w: Q^T Omega.
      h: Q^T A Q.
      quadratic: The quadratic form at each probe.
      squares: The squared norm of each probe.
    """

    space: basis.Basis
    r: Float[np.ndarray, "rank probes"] = dataclasses.field(default_factory=_no_matrix)
    w: Float[np.ndarray, "rank probes"] = dataclasses.field(default_factory=_no_matrix)
    h: Float[np.ndarray, "known known"] = dataclasses.field(default_factory=_no_matrix)
    quadratic: Float[np.ndarray, " probes"] = dataclasses.field(
        default_factory=_no_numbers
    )
    squares: Float[np.ndarray, " probes"] = dataclasses.field(
        default_factory=_no_numbers
    )

    def __post_init__(self):
        """No probe is drawn yet."""
        self.epsilon = trees.epsilon(self.space.like)
        self.omega = basis.Basis(self.space.like, self.space.on_host)

    @property
    def num_products(self) -> int:
        """Products so far."""
        return len(self.quadratic) + len(self.h)

    def draw_again(self, params: PyTree, key: probes.Key) -> None:
        """Draws the probes of a saved state again."""
        for number in range(self.omega.size, len(self.quadratic)):
            self.omega.append(draw_probe(params, key, number), 1.0)

    def add_probe(self, probe, product, name):
        """Adds one probe and its product; returns the new q, or None."""
        number = self.omega.size
        self.omega.append(probe, 1.0)
        inner = float(trees.inner(probe, product))
        self.quadratic = np.append(self.quadratic, inner)
        self.squares = np.append(self.squares, float(trees.inner(probe, probe)))
        coefficients, grew = sketches.extend(self.space, product, name)
        size = self.space.size
        self.r = _grown(self.r, size, number + 1)
        self.w = _grown(self.w, size, number + 1)
        self.r[:, number] = coefficients
        self.w[:, number] = self.space.coefficients(probe)
        if not grew:
            return None
        q = self.space.row(size - 1)
        self.w[size - 1] = self.omega.coefficients(q)
        return q

    def add_row(self, q_product):
        """Adds the product with the oldest q that has none yet."""
        column = self.space.coefficients(q_product)
        known = len(self.h)
        self.h = _grown(self.h, known + 1, known + 1)
        # A is symmetric, so the new row is known, too.
        self.h[: known + 1, known] = column[: known + 1]
        self.h[known, : known + 1] = column[: known + 1]

    def estimates(self, dimension) -> tuple[np.ndarray, float]:
        """The leave-one-out estimates, and the jackknife standard error of their mean."""
        count = self.omega.size
        if self.space.size < count:  # the range is exhausted, whichever is left out
            return np.full(count, np.trace(self.h)), 0.0
        # Column i is orthogonal to all columns of R but number i: what Q loses with it.
        lost = np.linalg.inv(self.r).T
        lost /= np.linalg.norm(lost, axis=0)
        samples = np.array(
            [self._left_out(i, lost[:, [i]], dimension) for i in range(count)]
        )
        if count < 3:
            return samples, float(samples.std(ddof=1) / math.sqrt(count))
        means = np.array([self._mean_without(j, lost, dimension) for j in range(count)])
        spread = ((means - means.mean()) ** 2).sum()
        return samples, math.sqrt((count - 1) / count * spread)

    def _mean_without(self, j, lost, dimension):
        """XTrace's estimate from all probes but number j."""
        values = []
        for i in range(self.omega.size):
            if i == j:
                continue
            first = lost[:, i]
            second = lost[:, j] - first * (first @ lost[:, j])
            second /= np.linalg.norm(second)
            pair = np.stack([first, second], axis=1)
            values.append(self._left_out(i, pair, dimension))
        return np.mean(values)

    def _left_out(self, i, lost, dimension):
        """The estimate with probe i outside of Q without the directions `lost`."""
        kept = self.space.size - lost.shape[1]
        x = self.w[:, i] - lost @ (lost.T @ self.w[:, i])
        inside = np.trace(self.h) - np.einsum("ij,ik,kj->", lost, self.h, lost)
        rest = self.quadratic[i] - 2 * x @ self.r[:, i] + x @ self.h @ x
        square = self.squares[i] - x @ x
        if square <= self.epsilon * self.squares[i]:
            return inside
        return inside + (dimension - kept) / square * rest

    def rounding(self) -> float:
        """The size of rounding errors in the estimate, a floor for its error."""
        return self.epsilon * float(np.abs(np.diag(self.h)).sum())


def _grown(matrix, rows, columns):
    grown = np.zeros((rows, columns))
    grown[: matrix.shape[0], : matrix.shape[1]] = matrix
    return grown


def xtrace(
    matvec: trees.Matvec,
    params: PyTree,
    key: probes.Key,
    *,
    num_probes: int = 16,
    relative_error: float | None = None,
    confidence: float = 0.95,
    block_size: int = 1,
    basis_on_host: bool = False,
    on_step: collections.abc.Callable[[XtraceState], None] | None = None,
    state: XtraceState | None = None,
) -> hutchinson.TraceEstimate:
    """The trace of a symmetric map by XTrace, at two products for each probe.

    A product that holds NaN or Inf raises `NonFiniteError`.

    Args:
      matvec: The product; with `block_size` above one, of stacked vectors. Must be
        symmetric.
      params: The parameters (or any vector), for shapes, paths and shardings.
      key: A seed or key.
      num_probes: The maximal number of probes, itself at most the dimension plus one.
      relative_error: Stop when half the confidence interval is at most this fraction of
        the estimate, from eight probes on.
      confidence: The level of the interval (Student's t).
      block_size: Vectors in one call of `matvec`.
      basis_on_host: Whether the vectors are kept in pinned host memory.
      on_step: Called with the state after each block of probes.
      state: The state of an earlier run with the same key, to resume from.

    Returns:
      The estimate; `samples` are the leave-one-out estimates, `rank` is set where the
      range of the map was exhausted: then only rounding errors remain.

    Raises:
      ValueError: A count is below two, or the confidence is not between 0 and 1.
    """
    hutchinson.check_counts(num_probes, block_size, confidence)
    if num_probes < 2:
        raise ValueError(f"num_probes must be at least 2 for XTrace: got {num_probes}.")
    total = trees.dimension(params)
    num_probes = min(num_probes, total + 1)
    if state is None:
        state = XtraceState(basis.Basis(trees.zeros_like(params), basis_on_host))
    sketch = state
    sketch.draw_again(params, key)

    def summary():
        return _summary(sketch, total, confidence, relative_error)

    estimate = None
    if relative_error is not None and sketch.omega.size >= 2:
        estimate = summary()
    while (first := sketch.omega.size) < num_probes:
        if sketch.space.size < first - 1:
            break  # the range is exhausted: more probes add nothing
        if first >= hutchinson.LEAST_PROBES and estimate and estimate.converged:
            break
        count = min(block_size, num_probes - first)
        name = f"XTrace probe {first}"
        omegas = [draw_probe(params, key, first + i) for i in range(count)]
        results = sketches.apply_all(matvec, omegas, block_size)
        added = [
            sketch.add_probe(probe, product, name)
            for probe, product in zip(omegas, results, strict=True)
        ]
        new = [q for q in added if q is not None]
        for product in sketches.apply_all(matvec, new, block_size):
            trees.finite_norm(product, name)
            sketch.add_row(product)
        if on_step is not None:
            on_step(sketch)
        if sketch.omega.size >= 2 and relative_error is not None:
            estimate = summary()
    if estimate is None or estimate.num_probes < sketch.omega.size:
        estimate = summary()
    return estimate


def _summary(sketch, dimension, confidence, relative_error):
    samples, error = sketch.estimates(dimension)
    count = len(samples)
    exhausted = sketch.space.size < count or sketch.space.size >= dimension
    mean = float(samples.mean())
    quantile = float(scipy.stats.t.ppf(0.5 + confidence / 2, count - 1))
    half = quantile * error + hutchinson.ROUNDING * sketch.rounding()
    met = None if relative_error is None else half <= relative_error * abs(mean)
    return hutchinson.TraceEstimate(
        mean=mean,
        standard_error=error,
        num_probes=count,
        samples=samples,
        num_products=sketch.num_products,
        interval=(mean - half, mean + half),
        confidence=confidence,
        converged=met,
        rank=sketch.space.size if exhausted else None,
    )
