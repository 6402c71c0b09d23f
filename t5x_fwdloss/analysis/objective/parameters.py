"""Parameters as a point, and the layout of the vectors that belong to it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import trees

NUM_NAMED = 3  # leaves that an error message names


def widened(params: PyTree) -> PyTree:
    """The parameters with floating-point leaves in float32, or wider where they are.

    Shapes alone stay shapes. Integer and boolean leaves are kept: no derivative is taken with respect to them.
    """
    return jax.tree.map(_widened, params)


def placed(params: PyTree) -> PyTree:
    """The parameters, bound to the devices that they are on; nothing is copied.

    JAX compiles a function of them and of vectors, which are bound, only once then.
    """
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), params)


def on_one_device(shapes: PyTree) -> PyTree:
    """Shapes of parameters as `placed` has them where there is no mesh."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves by name, as T5X writes it: `decoder/logits_dense/kernel`."""
    return dict(zip(trees.leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def shardings(params: PyTree) -> PyTree | None:
    """The shardings of a vector: the parameters' own, or None without a mesh."""
    floats = trees.float_part(params)
    leaves = jax.tree.leaves(floats)
    on_mesh = [isinstance(getattr(x, "sharding", None), NamedSharding) for x in leaves]
    if not leaves or not all(on_mesh):
        return None
    return jax.tree.map(lambda x: x.sharding, floats)


def replicated(params: PyTree) -> NamedSharding | None:
    """The sharding of a number: a copy on every device of the parameters' mesh."""
    layout = shardings(params)
    if layout is None:
        return None
    return NamedSharding(jax.tree.leaves(layout)[0].mesh, PartitionSpec())


def _widened(x):
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    return x.astype(dtype)


def shape_and_kind(leaf: Any) -> Any:
    """The shape of a stored or described array, with its type unless it is floating.

    A checkpoint may have another floating type than the model, but no integer type.
    """
    shape, dtype = tuple(leaf.shape), getattr(leaf, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jnp.inexact):
        return shape
    return f"{shape} of {dtype}"


def check_same(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    path: str,
    what: str = "parameters",
    macro: str = "MODEL",
) -> None:
    """Pass if a checkpoint has the arrays that are wanted, and no others.

    Args:
        found: those of the checkpoint, by name, as `shape_and_kind` gives them.
        wanted: those of the model or the optimizer.
        path: the checkpoint.
        what: the arrays, in words.
        macro: the gin macro that they belong to.

    Raises:
        ValueError: it names the first few that differ, with both sides.
    """
    names = [n for n in {**wanted, **found} if found.get(n) != wanted.get(n)]
    if not names:
        return
    sides = [
        f"{name}: checkpoint {found.get(name, 'has none')}, "
        f"{macro.lower()} {wanted.get(name, 'has none')}"
        for name in names[:NUM_NAMED]
    ]
    more = f"; and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    raise ValueError(
        f"The {what} of {path} must be those of {macro}: {len(names)} differ: "
        f"{'; '.join(sides)}{more}."
    )
