"""Shardings of the leaves of vectors, which every operation keeps, stacked or not."""

import functools

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import PyTree

Sharding = jax.sharding.Sharding


def sharding_of(leaf) -> Sharding | None:
    """The sharding of a concrete array or a description of one, else None."""
    described = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    if isinstance(leaf, jax.core.Tracer) or not described:
        return None
    return leaf.sharding


def described(tree: PyTree) -> PyTree:
    """The shapes, types and shardings of a tree, without its memory."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x)), tree
    )


def stacked_sharding(sharding: Sharding | None) -> Sharding | None:
    """The sharding of vectors stacked along a new, unsharded first axis.

    Args:
      sharding: The sharding of one vector's leaf.

    Returns:
      The same with one more axis in front; None stays None.

    Raises:
      TypeError: The sharding is neither named nor of a single device.
    """
    if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise TypeError(
            "The parameters must have a NamedSharding or lie on one device: got "
            f"{type(sharding).__name__}."
        )
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    return sharding.update(spec=spec)


def kept(leaf, sharding: Sharding | None):
    """The leaf in its sharding, inside of a traced function."""
    if sharding is None:
        return leaf
    types = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    if jax.sharding.AxisType.Explicit in types:
        # There a sharding is part of the leaf's type, not a choice of the compiler.
        return jax.reshard(leaf, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def constrain(tree: PyTree, shardings: tuple) -> PyTree:
    """The tree with each leaf kept in its sharding, inside of a traced function."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, list(map(kept, leaves, shardings)))


def replicate(numbers, shardings: tuple):
    """A small array replicated on every device, so that every process can read it."""
    named = [s for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
    if not named:
        return numbers
    whole = named[0].update(spec=jax.sharding.PartitionSpec())
    return kept(numbers, whole)


@functools.cache  # or every call would be compiled again
def _zeros_maker(structure, avals, shardings):
    out = None
    if all(sharding is not None for sharding in shardings):
        out = jax.tree.unflatten(structure, shardings)

    def make():
        leaves = [jnp.zeros(shape, dtype) for shape, dtype in avals]
        return jax.tree.unflatten(structure, leaves)

    return jax.jit(make, out_shardings=out)


def zeros(structure, avals: tuple, shardings: tuple) -> PyTree:
    """A tree of zeros, created in its shardings.

    Args:
      structure: The tree's structure.
      avals: Shape and type of each leaf.
      shardings: Sharding of each leaf, or None.

    Returns:
      The tree.
    """
    return _zeros_maker(structure, avals, shardings)()
