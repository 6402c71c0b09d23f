r"""Traces, Frobenius norm and diagonal from one set of probes.

With probes $z_i$ of independent entries, mean zero and variance one:

- $z^T A z$ has the mean $\operatorname{tr} A$, and its part over the entries of a group
  has as its mean the trace of the group's diagonal block;
- $\|A z\|^2$ has the mean $\|A\|_F^2$;
- $z \odot A z$ has the mean $\operatorname{diag} A$ (random signs only, here, because
  Gaussian entries give every element more variance).

References:
  Hutchinson 1990; Bekas, Kokiopoulou, Saad 2007, An estimator for the diagonal of a
  matrix.
"""

import collections.abc
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature.estimators import hutchinson
from t5x_fwdloss.curvature.vectors import errors, probes, trees

LEAST_PROBES = hutchinson.LEAST_PROBES


@dataclasses.dataclass
class ProbeState:
    """Sums over the probes so far, passed to `on_step` and accepted as `state`.

    Attributes:
      leaf_samples: For each probe the part of $z^T A z$ in each leaf.
      square_norms: For each probe $|A z|^2$.
      mean: Running mean of $z * A z$, None if no diagonal is requested.
      spread: Running sum of its squared deviations.
    """

    leaf_samples: list[list[float]]
    square_norms: list[float]
    mean: PyTree | None = None
    spread: PyTree | None = None

    @property
    def num_products(self) -> int:
        """Products so far."""
        return len(self.square_norms)


@dataclasses.dataclass(frozen=True)
class ProbeEstimates:
    """Estimates from one set of probes.

    Attributes:
      trace: The trace.
      groups: The trace of each group's diagonal block.
      square_norm: The squared Frobenius norm.
      frobenius_norm: Its square root.
      frobenius_error: Standard error of the root, to first order.
      diagonal: The diagonal, a vector, if requested.
      diagonal_error: Standard error of each entry.
    """

    trace: hutchinson.TraceEstimate
    groups: dict[str, hutchinson.TraceEstimate]
    square_norm: hutchinson.TraceEstimate
    frobenius_norm: float
    frobenius_error: float
    diagonal: PyTree
    diagonal_error: PyTree


@jax.jit
def _measure(probe, product):
    return trees.leaf_inners(probe, product), trees.inner(product, product)


@functools.partial(jax.jit, donate_argnames=("mean", "spread"))
def _update(mean, spread, probe, product, count):
    """Welford's running mean and sum of squared deviations."""

    def one(mean, spread, z, az):
        sample = z * az
        step = sample - mean
        mean = mean + step / count.astype(mean.dtype)
        return mean, spread + step * (sample - mean)

    pairs = jax.tree.map(one, mean, spread, probe, product)
    is_pair = lambda node: isinstance(node, tuple)
    return tuple(
        jax.tree.map(lambda pair, i=i: pair[i], pairs, is_leaf=is_pair) for i in (0, 1)
    )


@jax.jit
def _standard_error(spread, count):
    def one(leaf):
        n = count.astype(leaf.dtype)
        return jnp.sqrt(leaf / (n * (n - 1)))

    return jax.tree.map(one, spread)


def probe_estimates(
    matvec: trees.Matvec,
    params: PyTree,
    key: probes.Key,
    *,
    num_probes: int = 32,
    groups: collections.abc.Mapping[str, PyTree] | None = None,
    diagonal: bool = False,
    relative_error: float | None = None,
    confidence: float = 0.95,
    block_size: int = 1,
    on_step: collections.abc.Callable[[ProbeState], None] | None = None,
    state: ProbeState | None = None,
) -> ProbeEstimates:
    """Trace, traces of groups, Frobenius norm and diagonal, from the same random signs.

    The samples of the trace are those of `hutchinson.hutchinson_trace` with the same
    key. A product that holds NaN or Inf raises `NonFiniteError`, a count below one or a
    confidence outside of (0, 1) `ValueError`.

    Args:
      matvec: The product; with `block_size` above one, of stacked vectors.
      params: The parameters (or any vector), for shapes, paths and shardings.
      key: A seed or key; probe `i` is drawn from `fold_in(key, i)`.
      num_probes: The maximal number of probes.
      groups: Masks by name (`groups.group_masks`).
      diagonal: Whether to keep the running diagonal, two more vectors.
      relative_error: Stop when half the trace's interval is at most this part of it,
        from eight probes on.
      confidence: The level of the intervals.
      block_size: Probes in one call of `matvec`.
      on_step: Called with the state after each call of `matvec`.
      state: A state to resume from.

    Returns:
      The estimates.
    """
    hutchinson.check_counts(num_probes, block_size, confidence)
    if state is None:
        state = ProbeState([], [])
        if diagonal:
            state.mean = trees.zeros_like(params)
            state.spread = trees.zeros_like(params)

    def summary(samples, relative_error=None):
        return hutchinson.summarize(
            samples,
            num_products=len(samples),
            confidence=confidence,
            relative_error=relative_error,
        )

    while (taken := len(state.square_norms)) < num_probes:
        totals = np.array(state.leaf_samples).sum(axis=-1) if taken else np.zeros(0)
        if taken >= LEAST_PROBES and summary(totals, relative_error).converged:
            break
        count = min(block_size, num_probes - taken)
        pairs = hutchinson.probe_products(
            matvec, params, key, "rademacher", taken, count, block_size
        )
        for number, (probe, product) in enumerate(pairs):
            _add(state, probe, product, f"Hutchinson probe {taken + number}")
            del probe, product
        del pairs  # or they would be there beside the next ones
        if on_step is not None:
            on_step(state)
    leaf_samples = np.array(state.leaf_samples)
    return _estimates(state, leaf_samples, groups or {}, summary, relative_error)


def _add(state, probe, product, name):
    parts, square = jax.device_get(_measure(probe, product))
    if not math.isfinite(float(square)):
        trees.check_finite(product, name)
        raise errors.NonFiniteError(name, ())
    state.leaf_samples.append(np.asarray(parts, np.float64).tolist())
    state.square_norms.append(float(square))
    if state.mean is not None:
        count = np.float32(len(state.square_norms))
        state.mean, state.spread = _update(
            state.mean, state.spread, probe, product, count
        )


def _estimates(state, leaf_samples, masks, summary, relative_error):
    groups = {}
    for name, mask in masks.items():
        flags = np.array(jax.tree.leaves(mask), bool)
        groups[name] = summary(leaf_samples[:, flags].sum(axis=-1))
    square = summary(np.array(state.square_norms))
    norm = math.sqrt(square.mean)
    error = square.standard_error / (2 * norm) if norm else 0.0
    with_diagonal = state.mean is not None
    count = np.float32(len(state.square_norms))
    return ProbeEstimates(
        trace=summary(leaf_samples.sum(axis=-1), relative_error),
        groups=groups,
        square_norm=square,
        frobenius_norm=norm,
        frobenius_error=error,
        diagonal=state.mean,
        diagonal_error=_standard_error(state.spread, count) if with_diagonal else None,
    )
