"""Compiled programs of an objective: one per derivative, reused over batches.

A program is compiled for the shardings of the parameters it first sees, and its vectors
leave it in those shardings. The counter of traces is there to be tested: a derivative
that is traced more than once is a bug.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.curvature.vectors import probes, trees


class Programs:
    """The programs of one objective at one matmul precision."""

    def __init__(self, precision: str):
        """No program yet; `precision` holds for all that will be compiled."""
        self.num_traces: dict[str, int] = collections.defaultdict(int)
        self._precision = precision
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def scalars(self, name: str, function: Callable[..., Any], params: Any):
        """The program `(params, *directions, batch, key)` to one or more numbers.

        Args:
            name: what it computes; the same name must mean the same function.
            function: the function to compile at its first use.
            params: parameters, whose mesh the numbers are replicated over.
        """
        layout = parameters.replicated(params)
        key = (name, layout)
        if key not in self._compiled:
            counted = self._counted(name, function)
            self._compiled[key] = self._precise(jax.jit(counted, out_shardings=layout))
        return self._compiled[key]

    def sums(
        self,
        name: str,
        function: Callable[..., Any],
        params: Any,
        *,
        stack: int | None = None,
    ) -> Callable[..., Any]:
        """The program `(total, params, *directions, batch, key)` to a larger total.

        Args:
            name: what it computes; the same name must mean the same function.
            function: `(params, *directions, batch, key)` to a vector.
            params: parameters, whose shardings the vectors take.
            stack: the number of vectors stacked in front, if there are several.
        """
        layout = _layout(params, stack)
        key = (name, stack, _hashable(layout))
        if key not in self._compiled:
            counted = self._counted(name, function)

            def added(total, *args):
                part = counted(*args)
                return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, part)

            # The running sum is given away: memory stays flat over the batches.
            compiled = jax.jit(added, out_shardings=layout, donate_argnums=0)
            self._compiled[key] = self._precise(compiled)
        return self._compiled[key]

    def zeros(self, params: Any, *, stack: int | None = None) -> Any:
        """A vector of zeros, or several, laid out like the parameters."""
        layout = _layout(params, stack)
        front = () if stack is None else (stack,)
        floats = trees.float_part(params)
        leaves, structure = jax.tree.flatten(floats)
        shapes = tuple(x.shape for x in leaves)
        key = ("zeros", stack, _hashable(layout), structure, shapes)
        if key not in self._compiled:
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(front + x.shape, trees.vector_dtype(x)),
                floats,
            )
            self._compiled[key] = jax.jit(
                lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like),
                out_shardings=layout,
            )
        return self._compiled[key]()

    def _counted(self, name, function):
        def counted(*args):
            self.num_traces[name] += 1
            return function(*args)

        return counted

    def _precise(self, compiled):
        # Precision is part of jit's cache key: it is set around every call alike.
        def call(*args):
            with jax.default_matmul_precision(self._precision):
                return compiled(*args)

        return call


def largest_magnitudes(vector: Any) -> dict[str, float]:
    """The largest magnitude in each leaf by name; NaN or inf where a leaf has one."""
    largest = jax.device_get(_largest_magnitudes(vector))
    return dict(zip(trees.leaf_paths(vector), map(float, largest), strict=True))


def all_finite(vector: Any) -> bool:
    """Whether no entry of the vector is NaN or infinite."""
    return bool(np.isfinite(list(largest_magnitudes(vector).values())).all())


@jax.jit
def _largest_magnitudes(vector):
    return [jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(vector)]


def _layout(params, stack):
    layout = parameters.shardings(params)
    if layout is None or stack is None:
        return layout
    return jax.tree.map(probes.stacked_sharding, layout)


def _hashable(layout):
    return tuple(jax.tree.leaves(layout))
