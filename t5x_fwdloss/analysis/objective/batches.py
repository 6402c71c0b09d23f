"""The fixed list of batches of a run: checked, split, counted and hashed."""

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

Batch = Mapping[str, Any]


def checked(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """The batches as dictionaries, all with the same features and shapes.

    Raises:
        ValueError: there is no batch, or two batches differ in a name, shape or dtype.
    """
    found = [dict(batch) for batch in batches]
    if not found:
        raise ValueError("an analysis needs at least one batch: got an empty dataset.")
    first = _signature(found[0])
    for number, batch in enumerate(found):
        other = _signature(batch)
        if other == first:
            continue
        names = [n for n in {**first, **other} if first.get(n) != other.get(n)]
        raise ValueError(
            "all batches must have the same features, shapes and dtypes: batch 0 has "
            f"{names[0]} {first.get(names[0], 'absent')}, batch {number} has "
            f"{other.get(names[0], 'absent')}."
        )
    return found


def num_examples(batch: Batch) -> int:
    """The number of examples of a batch: the first axis of its features."""
    return min(np.shape(x)[0] for x in batch.values())


def split(batches: Sequence[Batch], num_microbatches: int) -> list[dict[str, Any]]:
    """Every batch cut into equal microbatches, in order.

    Raises:
        ValueError: `num_microbatches` does not divide the batch size.
    """
    size = num_examples(batches[0])
    if size % num_microbatches:
        raise ValueError(
            "num_microbatches must divide the batch size: got "
            f"num_microbatches={num_microbatches}, batch size={size}."
        )
    if num_microbatches == 1:
        return [dict(batch) for batch in batches]
    found = []
    for batch in batches:
        layout = {name: _layout(x, num_microbatches) for name, x in batch.items()}
        found += _cut(dict(batch), num_microbatches, tuple(layout.items()))
    return found


@functools.partial(jax.jit, static_argnames=("num", "layout"))
def _cut(batch, num, layout):
    # One compiled function: slices of arrays over several processes are exchanged.
    pieces = []
    for number in range(num):
        piece = {}
        for name, sharding in layout:
            step = batch[name].shape[0] // num
            part = batch[name][number * step : (number + 1) * step]
            if sharding is not None:
                part = jax.lax.with_sharding_constraint(part, sharding)
            piece[name] = part
        pieces.append(piece)
    return pieces


def _layout(x, num):
    """The sharding of a piece: the batch's, if it divides the piece."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    try:
        sharding.shard_shape((x.shape[0] // num, *x.shape[1:]))
    except ValueError:
        return None
    return sharding


def on_device(batch: Batch) -> dict[str, Any]:
    """The batch as JAX arrays; arrays that have a sharding already keep it."""
    return {name: jnp.asarray(x) for name, x in batch.items()}


def counted(batch: Batch) -> Any:
    """Which target tokens count: those of nonzero weight, or all but padding."""
    weights = batch.get("decoder_loss_weights")
    found = batch.get("decoder_target_tokens", 0) if weights is None else weights
    return jnp.asarray(found) != 0


def num_tokens(masks: Iterable[Any]) -> int:
    """The number of tokens that count, by their masks batch by batch."""
    return sum(int(np.count_nonzero(_whole(mask))) for mask in masks)


@functools.partial(jax.jit, static_argnames="num_classes")
def num_labels_outside(batch: Batch, mask: Any, num_classes: int) -> jax.Array:
    """The number of counted labels outside `[0, num_classes)`."""
    labels = jnp.asarray(batch["decoder_target_tokens"]).astype(jnp.int32)
    return jnp.sum(((labels < 0) | (labels >= num_classes)) & mask)


def total(arrays: Iterable[Any]) -> float:
    """The sum of all entries in float64; that of many float32 numbers would round."""
    return math.fsum(float(_whole(x).astype(np.float64).sum()) for x in arrays)


def digest(batches: Sequence[Batch]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes; the same on every mesh."""
    total = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            x = np.ascontiguousarray(_whole(batch[name]))
            total.update(f"{name}|{x.shape}|{x.dtype}|".encode())
            total.update(x.tobytes())
    return total.hexdigest()


def _whole(x) -> np.ndarray:
    # A batch spread over processes is small: gather it, so that its hash does not
    # depend on the number of processes.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def _signature(batch: Batch) -> dict[str, str]:
    return {
        name: f"{np.shape(batch[name])} {jnp.result_type(batch[name])}"
        for name in sorted(batch)
    }
