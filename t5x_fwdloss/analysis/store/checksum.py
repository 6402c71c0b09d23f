"""A hash of a tree of arrays, the same on every mesh and number of processes."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from t5x_fwdloss.analysis.objective import parameters


def checksum(tree: PyTree) -> str:
    """A hash of names, shapes, dtypes and bits of all leaves.

    Each device sums mixed words of its own part as integers, whose sum does not depend
    on the order: the hash is the same on every mesh and number of processes.
    """
    named = parameters.named_leaves(tree)
    summed = _summed(parameters.replicated(tree))
    sums = jax.device_get([summed(_on_device(leaf)) for leaf in named.values()])
    total = hashlib.sha256()
    for (name, leaf), words in zip(named.items(), sums, strict=True):
        total.update(f"{name}|{np.shape(leaf)}|{jnp.result_type(leaf)}|".encode())
        total.update(words.astype("<u4").tobytes())
    return total.hexdigest()


def _on_device(leaf):
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.memory_kind != "pinned_host":
        return leaf
    return jax.device_put(leaf, sharding.with_memory_kind("device"))


@functools.cache
def _summed(layout):
    return jax.jit(_word_sums, out_shardings=layout)


def _word_sums(leaf: Array) -> UInt32[Array, " 2"]:
    words = _words(leaf)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        # No reshape, which would gather a sharded leaf.
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position = position * jnp.uint32(size % 2**32) + along
    mixed = [
        _mixed(words ^ _mixed(position + jnp.uint32(start)))
        for start in (0x9E3779B9, 0x7F4A7C15)
    ]
    return jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in mixed])


def _words(leaf):
    kind = leaf.dtype
    if jnp.issubdtype(kind, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    if jnp.issubdtype(kind, jnp.complexfloating):
        return _words(jnp.stack([leaf.real, leaf.imag]))
    if jnp.issubdtype(kind, jnp.floating) or kind.itemsize == 8:
        unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(kind.itemsize, jnp.uint32)
        leaf = jax.lax.bitcast_convert_type(leaf, unsigned)
    return leaf.astype(jnp.uint32)


def _mixed(x):
    # The finalizer of MurmurHash3 (Appleby 2011): each bit changes half of the others.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
