r"""Smoothed targets, T5X's way: $1 - s$ on the label, $s / (V - 1)$ on every other class.

A label outside $[0, V)$ matches no class: its row has the off value everywhere. With
one class the off value is $s$ (T5X's special case): an in-range row sums to $1 - s$.

Source: `t5x/losses.py`, `compute_weighted_cross_entropy`, and
`flax/training/common_utils.py`, `onehot`.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer, Shaped

from t5x_fwdloss.losses.log_normalizer import accumulation_dtype
from t5x_fwdloss.losses.primitives.axis_types import laid_out_like


def on_and_off_values(label_smoothing: float, vocab_size: int) -> tuple[float, float]:
    """The target on the label, and on every other class."""
    confidence = 1.0 - label_smoothing
    return confidence, (1.0 - confidence) / max(vocab_size - 1, 1)


def entropy_of_targets(label_smoothing: float, vocab_size: int) -> Float[Array, ""]:
    """The entropy of a smoothed row; T5X subtracts it, so the minimal loss is zero."""
    on_value, off_value = on_and_off_values(label_smoothing, vocab_size)
    # Term by term T5X's expression, in jax and not in Python: equal bit for bit.
    return -(
        on_value * jnp.log(on_value)
        + (vocab_size - 1) * off_value * jnp.log(off_value + 1e-20)
    )


def class_indices(
    targets: Shaped[Array | np.ndarray, "*batch"],
) -> Integer[Array, "*batch"]:
    """Labels as integers that can hold any class of any vocabulary.

    An int8 or uint8 array has 256 values, and compared in that dtype a label would match
    every class that is equal to it modulo 256. A label that is not a whole number
    matches no class: it becomes -1, as does NaN.

    Args:
        targets: labels of an integer or floating dtype.
    """
    targets = jnp.asarray(targets)
    if jnp.issubdtype(targets.dtype, jnp.integer):
        narrow = jnp.iinfo(targets.dtype).bits < 32
        return targets.astype(jnp.int32) if narrow else targets
    targets = targets.astype(accumulation_dtype(targets.dtype))
    # The conversion saturates beyond int32, where no class is.
    is_whole = targets == jnp.floor(targets)
    return jnp.where(is_whole, targets, -jnp.ones_like(targets)).astype(jnp.int32)


def label_mask(
    labels: Shaped[Array, "*batch"], vocab_size: int
) -> Bool[Array, "*batch vocab"]:
    """True at the label of each token; all false for a label that matches no class.

    A comparison with an iota, which the compiler fuses into whatever reads it: no array
    is made, no scatter in the transpose, no gather across a sharded vocabulary.
    """
    labels = class_indices(labels)
    classes = jnp.arange(vocab_size, dtype=labels.dtype)
    return labels[..., None] == jnp.expand_dims(classes, range(labels.ndim))


def dense_targets(
    labels: Shaped[Array, "*batch"], vocab_size: int, label_smoothing: float, dtype
) -> Float[Array, "*batch vocab"]:
    """Target rows, float32 as T5X's (float64 where the logits' `dtype` is float64)."""
    on_value, off_value = on_and_off_values(label_smoothing, vocab_size)
    dtype = accumulation_dtype(dtype)
    mask = label_mask(labels, vocab_size)
    return jnp.where(mask, jnp.asarray(on_value, dtype), jnp.asarray(off_value, dtype))


def with_void(
    targets: Shaped[Array | np.ndarray, "*batch"],
    is_void: Bool[Array, "*batch"] | None = None,
) -> Integer[Array, "*batch"]:
    """The `class_indices`, with the largest integer for void tokens only.

    Functions of single tokens then recognize void tokens without another array.
    """
    labels = class_indices(targets)
    labels = jnp.where(labels == _void_label(labels), _no_class(labels), labels)
    if is_void is None:
        return labels
    return jnp.where(is_void, jnp.asarray(_void_label(labels), labels.dtype), labels)


def cleared(
    rows: Float[Array, "*batch width"], labels: Integer[Array, "*batch"]
) -> Float[Array, "*batch width"]:
    """Logits or hidden states with zeros for the tokens that `with_void` has marked."""
    is_void = (labels == _void_label(labels))[..., None]
    is_void = laid_out_like(jnp.broadcast_to(is_void, rows.shape), rows)
    return jnp.where(is_void, jnp.zeros_like(rows), rows)


def without(
    is_void: Bool[Array, "*batch"] | None, rows: Float[Array, "*batch width"]
) -> Float[Array, "*batch width"]:
    """The rows, with zeros for void tokens."""
    if is_void is None:
        return rows
    return jnp.where(is_void[..., None], jnp.zeros_like(rows), rows)


def _void_label(labels):
    return jnp.iinfo(labels.dtype).max


def _no_class(labels):
    return jnp.asarray(_void_label(labels) - 1, labels.dtype)
