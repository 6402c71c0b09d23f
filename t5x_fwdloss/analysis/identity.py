"""What makes two runs the same run: neither the mesh nor the machine is in it."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from t5x_fwdloss.analysis import parameters
from t5x_fwdloss.analysis.objective import Objective

# How far the loss of the same network may differ between two meshes or machines, relative
# to its value, by the narrowest type in which the network multiplies matrices.
LOSS_ROUNDING = {
    "float64": 1e-10,
    "float32": 1e-5,
    "float16": 1e-3,
    "bfloat16": 4e-3,
}


def of_settings(
    objective: Objective,
    measurements: Sequence[Any],
    *,
    seed: int,
    checkpoint: str,
    step: int | None,
    other_checkpoints: Mapping[str, str],
) -> dict[str, Any]:
    """What is known of a run before anything is compiled.

    Args:
        objective: the loss over the fixed list of batches.
        measurements: dataclasses of settings, in order.
        seed: the run's seed.
        checkpoint: path of the checkpoint.
        step: its training step.
        other_checkpoints: path to checksum of the other checkpoints that are read.
    """
    found = {
        "checkpoint": checkpoint,
        "step": step,
        "batches": objective.batches_hash,
        "seed": seed,
        "loss": objective.settings,
        "normalizer": {"kind": objective.normalizer_kind, "W": objective.W},
        "dropout_seed": objective.dropout_seed,
        "precision": objective.precision,
        "measurements": [
            {"kind": type(m).__name__, **dataclasses.asdict(m)} for m in measurements
        ],
    }
    if other_checkpoints:
        found["other_checkpoints"] = dict(other_checkpoints)
    return found


def of_network(objective: Objective, params: PyTree) -> dict[str, Any]:
    """What the parameters and the network add: checksum, activation dtype, loss.

    A loss that is not finite raises `NonFiniteLossError`.
    """
    return {
        "parameters": checksum(params),
        "activation_dtype": objective.activation_dtype(params),
        "loss_value": objective.value(params),
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names of what is wanted and differs in what was found, in JSON's types.

    The loss is compared up to `LOSS_ROUNDING`, everything else exactly.
    """
    return [name for name in wanted if not _same(name, found, wanted)]


def _same(name, found, wanted) -> bool:
    one, other = found.get(name), wanted[name]
    if name != "loss_value" or not isinstance(one, float):
        return one == other
    kind = wanted["activation_dtype"]
    if wanted.get("precision") != "highest" and kind == "float32":
        kind = "bfloat16"  # in which accelerators multiply at a lower precision
    return math.isclose(one, other, rel_tol=LOSS_ROUNDING.get(kind, 4e-3))


def checksum(params: PyTree) -> str:
    """A hash of names, shapes, dtypes and bits of all parameters.

    Each device sums up mixed words of its own part in integers, which add up to the same
    in every order: the hash is the same on every mesh and number of processes.
    """
    named = parameters.named_leaves(params)
    summed = _summed(parameters.replicated(params))
    sums = jax.device_get([summed(leaf) for leaf in named.values()])
    total = hashlib.sha256()
    for (name, leaf), words in zip(named.items(), sums, strict=True):
        total.update(f"{name}|{np.shape(leaf)}|{jnp.result_type(leaf)}|".encode())
        total.update(words.astype("<u4").tobytes())
    return total.hexdigest()


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
