"""Arrays whose types hold their layout on a mesh: `jax.shard_map` and Explicit axes.

There the types of all intermediate arrays matter: over which axes a value varies, how a
result is sharded, where a transpose has to sum over devices. JAX's own operations keep
track of this: they are correct or raise an error. The primitives of this package
(`token_map`, `linear_pair`) do not, and give way to plain JAX: they save memory on
CPUs, where such meshes are for tests.
"""

from typing import Any

import jax
from jax.sharding import AxisType


def have_axis_types(*arrays: Any) -> bool:
    """Whether one of the arrays is on a mesh with axes that are not Auto."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays]
    return any(not mesh.empty and not mesh.are_all_axes_auto for mesh in meshes)


def vary_alike(*arrays: Any) -> list[Any]:
    """The arrays, all varying over the manual axes that any of them varies over.

    Done once in front of a loop or a rule: its carry then keeps its type, a rule's
    cotangents have their primals' types, and where an array did not vary, the transpose
    sums over devices once, after the loop.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = frozenset().union(*varying)
    return [
        jax.lax.pcast(array, tuple(sorted(axes - own)), to="varying")
        if axes - own
        else array
        for array, own in zip(arrays, varying, strict=True)
    ]


def laid_out_like(array: Any, like: Any) -> Any:
    """The array, sharded over its mesh's Explicit axes like another of its shape.

    JAX's selections and rules require it: a mask made from the labels alone would be
    replicated on every device where the vocabulary is sharded.
    """
    sharding = jax.typeof(like).sharding
    is_explicit = (
        not sharding.mesh.empty and AxisType.Explicit in sharding.mesh.axis_types
    )
    if not is_explicit or jax.typeof(array).sharding == sharding:
        return array
    return jax.reshard(array, sharding)
