"""The memory and the arithmetic of a compiled function, on each device.

XLA counts the body of a loop once, however often it runs. So its count is multiplied by
the ratio of two counts of the matrix products in the jaxpr: with loops by their length,
and once each.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params


@dataclasses.dataclass(frozen=True)
class Size:
    """What one call of a compiled function takes on each device.

    Attributes:
        temporary: bytes that it needs while it runs.
        output: bytes of its results.
        flops: floating-point operations.
    """

    temporary: int
    output: int
    flops: float


def size_of(function: Any, *args: Any) -> Size:
    """The size of a jitted function for arguments like these; compiles it if need be.

    Args:
        function: made by `jax.jit`.
        *args: arrays, or shapes with shardings.
    """
    return size_of_traced(function.trace(*args))


def size_of_traced(traced: jax.stages.Traced) -> Size:
    """The size of a traced function; compiles it if it is not compiled yet."""
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    once, whole = _products(traced.jaxpr.jaxpr)
    loops = whole / once if once else 1.0
    return Size(
        temporary=int(getattr(memory, "temp_size_in_bytes", 0)),
        output=int(getattr(memory, "output_size_in_bytes", 0)),
        flops=float(cost.get("flops", 0.0)) * loops,
    )


def _products(jaxpr) -> tuple[float, float]:
    """The operations of all matrix products, loops counted once and by their length."""
    once = whole = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            count = 2.0 * math.prod(eqn.outvars[0].aval.shape)
            count *= math.prod(shape[axis] for axis in contracted)
            once, whole = once + count, whole + count
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(eqn.params):
            inner_once, inner_whole = _products(inner)
            once, whole = once + inner_once, whole + times * inner_whole
    return once, whole


def device_memory(gib: float | None) -> int | None:
    """The memory of a device in bytes: as given in GiB, or as the first device says."""
    if gib is not None:
        return int(gib * 2**30)
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def device_bytes(tree: Any) -> int:
    """Bytes of arrays, or of what shapes with shardings describe, on each device."""
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def largest_leaf_bytes(tree: Any) -> int:
    """Bytes of the largest array of a tree on each device."""
    return max(map(_leaf_bytes, jax.tree.leaves(tree)), default=0)


def _leaf_bytes(leaf) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
