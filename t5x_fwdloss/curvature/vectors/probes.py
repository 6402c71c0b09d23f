"""Random probe vectors whose numbers depend on seed and parameter path only."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from t5x_fwdloss.curvature.vectors import in_flight, trees
from t5x_fwdloss.curvature.vectors.layout import sharding_of as sharding_of
from t5x_fwdloss.curvature.vectors.layout import stacked_sharding as stacked_sharding

KINDS = {"rademacher": jax.random.rademacher, "normal": jax.random.normal}
Key = int | np.integer | Array | np.ndarray


def as_key(key: Key) -> Array:
    """A threefry key, from a seed, a typed key or the raw words of a threefry key.

    Other generators (T5X may choose `unsafe_rbg`) draw numbers that depend on the
    device and the sharding, so the same run on another mesh would differ.

    Args:
      key: The seed or the key.

    Returns:
      A typed threefry key.

    Raises:
      ValueError: The key is of another generator, or the seed out of range.
    """
    if isinstance(key, int | np.integer):
        if not 0 <= key < 2**63:
            raise ValueError(
                f"A seed (SEED, DROPOUT_SEED) must be at least 0 and below 2**63: got {key}."
            )
        # Both words: without 64-bit types, `jax.random.key` drops the upper one.
        key = np.array(divmod(int(key), 2**32), np.uint32)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        name = str(jax.random.key_impl(key))
        if "threefry2x32" not in name and "fry" not in name:
            raise ValueError(f"The key must be a threefry2x32 key: got {name}.")
        return jnp.asarray(key)
    if key.shape != (2,) or key.dtype != np.uint32:
        raise ValueError(
            "A raw key must be a threefry2x32 key, uint32 of shape (2,): got "
            f"{key.dtype} of shape {key.shape}."
        )
    return jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")


def path_hash(path: str) -> np.uint32:
    """A number for a parameter path, the same in every process: CRC-32 of UTF-8."""
    return np.uint32(zlib.crc32(path.encode("utf-8")))


# One for all leaves of a shape: a tree of many layers has few shapes, and a compiled
# function that drew all its leaves would take seconds to compile.
@functools.cache
def _sampler(shape, dtype, sharding, kind, stacked):
    def sample(key, number):
        return KINDS[kind](jax.random.fold_in(key, number), shape, dtype)

    if stacked:
        sample = jax.vmap(sample, (0, None))
    return jax.jit(sample, out_shardings=sharding)


def _sample(key, params, kind, stacked):
    if kind not in tuple(KINDS):
        raise ValueError(f"kind must be one of {tuple(KINDS)}: got {kind!r}.")
    floats = trees.float_part(params)
    leaves, structure = jax.tree.flatten(floats)
    drawn = []
    # Without partitionable threefry the draw of a sharded leaf needs communication.
    with jax.threefry_partitionable(True):
        for path, leaf in zip(trees.leaf_paths(floats), leaves, strict=True):
            sharding = sharding_of(leaf)
            if stacked:
                sharding = stacked_sharding(sharding)
            dtype = trees.vector_dtype(leaf)
            sampler = _sampler(leaf.shape, dtype, sharding, kind, stacked)
            leaf = sampler(key, path_hash(path))
            drawn.append(in_flight.limited(len(drawn), leaf))
    return jax.tree.unflatten(structure, drawn)


def random_like(key: Key, params: PyTree, kind: str = "rademacher") -> PyTree:
    """A random vector with independent entries of mean zero and variance one.

    The key of a leaf is `fold_in(key, crc32(path))`, so the numbers do not depend on
    the mesh, on the order of the leaves, nor on which other leaves there are. Integer
    and other non-float leaves have `None` (`trees.left_out` names them). A key of
    another generator raises `ValueError`.

    Args:
      key: A seed or a threefry key.
      params: The parameters; their leaves give paths, shapes, types and shardings.
      kind: `"rademacher"` for signs, `"normal"` for Gaussian entries.

    Returns:
      The vector, in float32 or wider, each leaf sharded like the parameter.
    """
    return _sample(as_key(key), params, kind, stacked=False)


def random_stack(
    key: Key, indices: list[int], params: PyTree, kind: str = "rademacher"
) -> PyTree:
    """The vectors `random_like(fold_in(key, i), params, kind)` for all indices, stacked.

    Args:
      key: A seed or a threefry key.
      indices: The numbers of the probes.
      params: The parameters.
      kind: As in `random_like`.

    Returns:
      A tree whose leaves are `[len(indices), ...]`.
    """
    keys = jax.vmap(lambda i: jax.random.fold_in(as_key(key), i))(
        np.asarray(indices, np.uint32)
    )
    return _sample(keys, params, kind, stacked=True)


def probe_key(key: Key, index: int) -> Array:
    """The key of probe number `index`: `fold_in(key, index)`."""
    return jax.random.fold_in(as_key(key), np.uint32(index))
