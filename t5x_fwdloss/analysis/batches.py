"""The fixed list of batches of a run: checked, split, counted and hashed."""

import hashlib
from collections.abc import Mapping, Sequence
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


def split(batches: Sequence[Batch], num_microbatches: int) -> list[dict[str, Any]]:
    """Every batch cut into equal microbatches, in order.

    Raises:
        ValueError: `num_microbatches` is below one or does not divide the batch size.
    """
    size = min(np.shape(x)[0] for x in batches[0].values())
    if num_microbatches < 1 or size % num_microbatches:
        raise ValueError(
            "num_microbatches must be at least 1 and divide the batch size: got "
            f"num_microbatches={num_microbatches}, batch size={size}."
        )
    step = size // num_microbatches
    return [
        {name: x[start : start + step] for name, x in batch.items()}
        for batch in batches
        for start in range(0, size, step)
    ]


def on_device(batch: Batch) -> dict[str, Any]:
    """The batch as JAX arrays; arrays that have a sharding already keep it."""
    return {name: jnp.asarray(x) for name, x in batch.items()}


def num_tokens(batches: Sequence[Batch]) -> int:
    """The number of target tokens whose loss counts (nonzero weight, else no padding)."""
    return sum(int(np.count_nonzero(_whole(_counted(batch)))) for batch in batches)


def digest(batches: Sequence[Batch]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes; the same on every mesh."""
    total = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            x = np.ascontiguousarray(_whole(batch[name]))
            total.update(f"{name}|{x.shape}|{x.dtype}|".encode())
            total.update(x.tobytes())
    return total.hexdigest()


def _counted(batch: Batch):
    weights = batch.get("decoder_loss_weights")
    return weights if weights is not None else batch.get("decoder_target_tokens", 0)


def _whole(x) -> np.ndarray:
    # A batch that is spread over processes is small: gather it, so that its hash does
    # not depend on how many processes there are.
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def _signature(batch: Batch) -> dict[str, str]:
    return {
        name: f"{np.shape(batch[name])} {jnp.result_type(batch[name])}"
        for name in sorted(batch)
    }
