r"""Hutch++: the trace of a symmetric map, exact on a subspace and sampled outside of it.

With $Q$ an orthonormal basis of $A S$ for a Gaussian matrix $S$ and $P = I - Q Q^T$,

$$ \operatorname{tr} A = \operatorname{tr} Q^T A Q + \operatorname{tr} P A P, $$

and the second term is Hutchinson's estimate with fresh probes $z_i$, independent and
unbiased given $Q$. Their variance is at most $2 \|P A P\|_F^2$, which $\|P A P z_i\|^2$
estimates without further products and more reliably than few samples estimate their own
variance: the standard error is the larger of the two.
"""

import collections.abc
import dataclasses
import math

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature.estimators import hutchinson, sketches
from t5x_fwdloss.curvature.krylov import basis
from t5x_fwdloss.curvature.vectors import probes, trees


@dataclasses.dataclass
class HutchppState:
    """The state of a run, passed to `on_step` and accepted as `state`.

    Attributes:
      space: The basis of the subspace.
      num_sketched: Products with sketch vectors.
      exact: The quadratic form at each vector of the basis.
      samples: The quadratic form at each probe, outside of the subspace.
      squares: The squared norm of each probe's product outside of it.
    """

    space: basis.Basis
    num_sketched: int = 0
    exact: list[float] = dataclasses.field(default_factory=list)
    samples: list[float] = dataclasses.field(default_factory=list)
    squares: list[float] = dataclasses.field(default_factory=list)

    @property
    def num_products(self) -> int:
        """Products so far."""
        return self.num_sketched + len(self.exact) + len(self.samples)


def hutchpp_trace(
    matvec: trees.Matvec,
    params: PyTree,
    key: probes.Key,
    *,
    sketch_size: int = 10,
    num_probes: int = 10,
    relative_error: float | None = None,
    confidence: float = 0.95,
    block_size: int = 1,
    basis_on_host: bool = False,
    on_step: collections.abc.Callable[[HutchppState], None] | None = None,
    state: HutchppState | None = None,
) -> hutchinson.TraceEstimate:
    """The trace of a symmetric map by Hutch++.

    It takes two products for each vector of the sketch and one for each probe. Where
    the sketch holds the whole range of the map (`rank` below `sketch_size`), the
    samples are zero up to rounding, and so is the error: the trace is exact. A product
    that holds NaN or Inf raises `NonFiniteError`.

    Args:
      matvec: The product; with `block_size` above one, of stacked vectors.
      params: The parameters (or any vector), for shapes, paths and shardings.
      key: A seed or key.
      sketch_size: Random vectors that span the subspace.
      num_probes: The maximal number of probes outside of it.
      relative_error: Stop when half the confidence interval is at most this fraction of
        the estimate, from eight probes on.
      confidence: The level of the interval.
      block_size: Vectors in one call of `matvec`.
      basis_on_host: Whether the subspace is kept in pinned host memory.
      on_step: Called with the state after each call of `matvec` is processed.
      state: The state of an earlier run with the same key, to resume from.

    Returns:
      The estimate; each of its `samples` is the exact part plus one probe's part.

    Raises:
      ValueError: A count is below one, or the confidence is not between 0 and 1.
    """
    hutchinson.check_counts(num_probes, block_size, confidence)
    if sketch_size < 1:
        raise ValueError(f"sketch_size must be at least 1: got {sketch_size}.")
    sketch_size = min(sketch_size, trees.dimension(params))
    if state is None:
        state = HutchppState(basis.Basis(trees.zeros_like(params), basis_on_host))
    space = state.space

    def multiply(vectors, name):
        results = sketches.apply_all(matvec, vectors, block_size)
        for result in results:
            trees.finite_norm(result, name)
        return results

    def done():
        if on_step is not None:
            on_step(state)

    while (first := state.num_sketched) < sketch_size:
        count = min(block_size, sketch_size - first)
        vectors = [_probe(key, first + i, params, "sketch") for i in range(count)]
        name = f"Hutch++ sketch {first}"
        for product in multiply(vectors, name):
            sketches.extend(space, product, name)
        state.num_sketched += count
        done()
    while (first := len(state.exact)) < space.size:
        rows = [space.row(i) for i in range(first, min(first + block_size, space.size))]
        for q, product in zip(rows, multiply(rows, "Hutch++ subspace"), strict=True):
            state.exact.append(float(trees.inner(q, product)))
        done()

    def summary():
        return hutchinson.summarize(
            sum(state.exact) + np.array(state.samples),
            num_products=state.num_products,
            confidence=confidence,
            relative_error=relative_error,
            rank=space.size if space.size < sketch_size else None,
            least_error=math.sqrt(2 * np.mean(state.squares) / len(state.squares)),
        )

    while (first := len(state.samples)) < num_probes:
        if first >= hutchinson.LEAST_PROBES and summary().converged:
            break
        count = min(block_size, num_probes - first)
        outside = [
            _project(space, _probe(key, first + i, params, "probe"))
            for i in range(count)
        ]
        name = f"Hutch++ probe {first}"
        for z, product in zip(outside, multiply(outside, name), strict=True):
            state.samples.append(float(trees.inner(z, product)))
            state.squares.append(float(trees.norm(_project(space, product))) ** 2)
        done()
    return summary()


def _probe(key, index, params, purpose):
    """Sketch and probes must be independent: they have different keys."""
    # Gaussian vectors are independent however small the dimension; signs may not be.
    number, kind = {"sketch": (0, "normal"), "probe": (1, "rademacher")}[purpose]
    base = probes.probe_key(key, number)
    return probes.random_like(probes.probe_key(base, index), params, kind)


def _project(space, vector):
    vector = trees.scale(1.0, vector)  # a copy, whose memory is reused
    for _ in range(2 if space.size else 0):
        vector = space.subtract(vector, space.coefficients(vector))
    return vector
