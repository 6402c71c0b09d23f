"""Compiled functions of an objective: one per derivative, reused over batches.

A function is compiled for the shardings of the first parameters it gets, and returns
vectors in those shardings. The counter of traces is for tests: a derivative that is
traced more than once is a bug.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax


class Programs:
    """The compiled functions of one objective at one matmul precision."""

    def __init__(self, precision: str):
        """Compiles nothing yet; `precision` holds for all functions."""
        self.num_traces: dict[str, int] = collections.defaultdict(int)
        self._precision = precision
        self._compiled: dict[Any, Any] = {}

    def compiled(self, name: str, function: Callable[..., Any], layout: Any):
        """The function, compiled at its first use.

        Args:
            name: name of its result; the same name must mean the same function.
            function: the function.
            layout: the shardings of its results, or one for all.
        """
        return self._precise(self._jitted(name, function, layout))

    def traced(
        self, name: str, function: Callable[..., Any], layout: Any, *args: Any
    ) -> jax.stages.Traced:
        """The trace of the function, which a later call with like arguments compiles.

        Args:
            name: name of its result, as for `compiled`.
            function: the function.
            layout: the shardings of its results, or one for all.
            *args: arguments.
        """
        jitted = self._jitted(name, function, layout)
        return self._precise(jitted.trace)(*args)

    def _jitted(self, name, function, layout):
        key = (name, tuple(jax.tree.leaves(layout)))
        if key not in self._compiled:
            counted = self._counted(name, function)
            self._compiled[key] = jax.jit(counted, out_shardings=layout)
        return self._compiled[key]

    def _counted(self, name, function):
        def counted(*args):
            self.num_traces[name] += 1
            return function(*args)

        return counted

    def _precise(self, function):
        # Precision is part of jit's cache key: it is set around every call alike.
        def call(*args):
            with jax.default_matmul_precision(self._precision):
                return function(*args)

        return call
