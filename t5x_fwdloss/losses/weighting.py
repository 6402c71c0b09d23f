"""Loss weights and normalizing factors, by T5X's contract.

Source of the contract: `get_loss_normalizing_factor_and_weights` in `t5x/losses.py`.
"""

import enum
import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Integer, ScalarLike, Shaped

SPECIAL_FACTORS = (
    "NUM_REAL_TARGET_TOKENS",
    "NUM_TOTAL_TARGET_TOKENS",
    "AVERAGE_PER_SEQUENCE",
)


def get_loss_normalizing_factor_and_weights(
    loss_normalizing_factor: ScalarLike | str | enum.Enum | None,
    batch: Mapping[str, Array | np.ndarray],
) -> tuple[ScalarLike | None, Array | np.ndarray | None]:
    """The divisor of the loss, and the weight of each token.

    * None or a number: itself, and the batch's `decoder_loss_weights` if it has them.
    * `"NUM_REAL_TARGET_TOKENS"`: the sum of the weights.
    * `"NUM_TOTAL_TARGET_TOKENS"`: batch times length, padding included.
    * `"AVERAGE_PER_SEQUENCE"`: each weight is divided by the sum of the weights of its
      sequence, a packed segment being a sequence of its own, and the factor is the sum
      of the result, the number of sequences with any weight. Sequences without weight
      get zeros.

    With a special factor and no weights in the batch, non-padding tokens (above zero)
    have weight one.

    Args:
        loss_normalizing_factor: None, a number, one of the three names in upper or
            lower case, or T5X's enum member of that name.
        batch: `decoder_target_tokens`, optionally `decoder_loss_weights`, and for
            packed batches `decoder_segment_ids` and `decoder_positions`.

    `check_loss_normalizing_factor` says which other factors are rejected.
    """
    check_loss_normalizing_factor(loss_normalizing_factor)
    weights = batch.get("decoder_loss_weights")
    factor = loss_normalizing_factor
    name = factor.name if isinstance(factor, enum.Enum) else factor
    if not isinstance(name, str):
        return name, weights
    name = name.upper()
    targets = batch["decoder_target_tokens"]
    if weights is None:
        weights = jnp.asarray(targets > 0, jnp.float32)
    if name == "NUM_TOTAL_TARGET_TOKENS":
        return np.prod(targets.shape), weights
    if name == "AVERAGE_PER_SEQUENCE":
        weights = _average_per_sequence(weights, batch)
    return jnp.sum(weights), weights


def check_loss_normalizing_factor(factor: Any) -> None:
    """Rejects an invalid normalizing factor.

    Args:
        factor: must be None, a finite number (not checked while it is traced), or one
            of `SPECIAL_FACTORS` by name, in upper or lower case, or by T5X's enum.

    Raises:
        ValueError: if it is none of these.
    """
    name = factor.name if isinstance(factor, enum.Enum) else factor
    if isinstance(name, str):
        fits = name.upper() in SPECIAL_FACTORS
    else:
        fits = name is None or isinstance(name, Tracer)
        fits = fits or math.isfinite(as_number(name))
    if not fits:
        raise ValueError(
            "The loss normalizing factor must be None, a number or one of "
            f"{', '.join(SPECIAL_FACTORS)}: got {factor!r}."
        )


def as_number(x: Any) -> float:
    """A Python, NumPy or JAX number as a float; NaN for anything else."""
    if (
        isinstance(x, bool)
        or not isinstance(x, numbers.Real | np.generic | np.ndarray | jax.Array)
        or getattr(x, "ndim", 0)
    ):
        return math.nan
    try:
        return float(x)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def _average_per_sequence(weights, batch):
    weights = jnp.asarray(weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        weights = weights.astype(jnp.float32)
    if "decoder_segment_ids" in batch:
        positions = jnp.asarray(batch["decoder_positions"])
        segment_ids = jnp.asarray(batch["decoder_segment_ids"])
        totals = jax.vmap(_sum_per_segment)(weights, positions, segment_ids)
    else:
        totals = jnp.sum(weights, axis=-1, keepdims=True)
    # For padding, and for sequences without weight, this divides by zero.
    return jnp.nan_to_num(weights / totals, nan=0, posinf=0, neginf=0)


def _sum_per_segment(
    weights: Float[Array, " length"],
    positions: Integer[Array, " length"],
    segment_ids: Integer[Array, " length"],
) -> Float[Array, " length"]:
    """The sum of the weights of each token's segment; zero on padding (segment 0).

    Segments are recognized by their first position, as in T5X, so that there are at
    most `length` of them whatever the ids are.
    """
    is_real = (segment_ids != 0).astype(weights.dtype)
    ordinals = jnp.cumsum((positions == 0).astype(jnp.int32))
    sums = jax.ops.segment_sum(
        weights * is_real, ordinals, num_segments=weights.shape[0] + 1
    )
    return sums[ordinals] * is_real


def weight_sum_of(
    weights: Shaped[Array | np.ndarray, "..."] | None, shape: tuple[int, ...]
) -> ScalarLike:
    """The sum of the weights, or the number of tokens without weights."""
    return np.prod(shape) if weights is None else jnp.sum(weights)
