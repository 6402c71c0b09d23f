"""The head and the loss together, one length chunk at a time: no `[batch, length, vocab]`.

Memory is bounded by a few `[batch, chunk_length, vocab]` arrays and the head's own
float32 gradient, whatever the length. The values, and all that a model's metrics need,
equal those of the full logits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, ScalarLike, Shaped

from t5x_fwdloss.losses.head_terms import HeadSettings
from t5x_fwdloss.losses.implementations import LossSettings
from t5x_fwdloss.losses.log_normalizer import accumulation_dtype
from t5x_fwdloss.losses.primitives.axis_types import vary_alike
from t5x_fwdloss.losses.targets import (
    class_indices,
    entropy_of_targets,
)
from t5x_fwdloss.losses.weighted import (
    check_token_arrays,
    void_tokens,
    weigh,
)
from t5x_fwdloss.losses.weighting import weight_sum_of


class ChunkedLoss(NamedTuple):
    """The loss and predictions of a batch whose full logits were never in memory.

    Attributes:
        loss: the weighted loss, as `compute_weighted_cross_entropy` returns it.
        z_loss: its z-loss part.
        weight_sum: the sum of the weights.
        predictions: the class of the largest logit of each token, int32
            `[batch, length]`.
    """

    loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    weight_sum: ScalarLike
    predictions: Integer[Array, "batch length"]


def chunked_weighted_cross_entropy(
    hidden: Float[Array, "batch length embed"],
    head: Float[Array, "..."],
    targets: Shaped[Any, "batch length"],
    weights: Shaped[Any, "batch length"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: ScalarLike = 0.0,
    loss_normalizing_factor: ScalarLike | None = None,
    *,
    chunk_length: int,
    impl: str = "custom_vjp",
    tied: bool = False,
    scale: float = 1.0,
) -> ChunkedLoss:
    r"""`compute_weighted_cross_entropy` of the logits `scale * hidden @ head`.

    The product is computed in float32 (float64 for float64 input), and the head's
    gradient is summed over chunks in the same dtype. With `impl="custom_jvp"` both
    directions of differentiation have a loop of their own (see `head_terms.py`); JAX
    differentiates the others chunk by chunk, with rematerialization. Settings that
    `LossSettings` rejects, and shapes or dtypes that do not fit each other, raise
    `ValueError`.

    Args:
        hidden: the decoder's last hidden states, any floating dtype.
        head: the output kernel `[embed, vocab]`, or with `tied` the embedding
            `[vocab, embed]`.
        targets: class indices.
        weights: weight of each token; None means all ones.
        label_smoothing: a Python number in [0, 1).
        z_loss: coefficient of the squared log-normalizer.
        loss_normalizing_factor: None or a number.
        chunk_length: positions per chunk, at least one; the length need not be a
            multiple of it, and may be shorter.
        impl: a key of `IMPLEMENTATIONS`.
        tied: whether `head` is the embedding.
        scale: a constant factor of the logits, a Python number.
    """
    settings = LossSettings(impl, chunk_length, label_smoothing, z_loss)
    is_void = void_tokens(hidden, weights, settings)
    loss, z_term, predictions = _token_losses(
        hidden, head, targets, weights, is_void, settings, tied, scale
    )
    loss, z_term = weigh(loss, z_term, weights, loss_normalizing_factor, is_void)
    weight_sum = weight_sum_of(weights, targets.shape)
    return ChunkedLoss(jnp.sum(loss), jnp.sum(z_term), weight_sum, predictions)


def chunked_weighted_token_cross_entropy(
    hidden: Float[Array, "batch length embed"],
    head: Float[Array, "..."],
    targets: Shaped[Any, "batch length"],
    weights: Shaped[Any, "batch length"] | None = None,
    *,
    chunk_length: int,
    impl: str = "custom_vjp",
    tied: bool = False,
    scale: float = 1.0,
) -> Float[Array, "batch length"]:
    """`weighted_token_cross_entropy` of the logits `scale * hidden @ head`.

    Args:
        hidden: the decoder's last hidden states, any floating dtype.
        head: the output kernel `[embed, vocab]`, or with `tied` the embedding.
        targets: class indices.
        weights: weight of each token; None means all ones.
        chunk_length: positions per chunk, at least one.
        impl: a key of `IMPLEMENTATIONS`.
        tied: whether `head` is the embedding.
        scale: a constant factor of the logits, a Python number.
    """
    settings = LossSettings(impl, chunk_length)
    is_void = void_tokens(hidden, weights, settings)
    loss, z_term, _ = _token_losses(
        hidden, head, targets, weights, is_void, settings, tied, scale
    )
    return weigh(loss, z_term, weights, None, is_void)[0]


def _token_losses(hidden, head, targets, weights, is_void, settings, tied, scale):
    """Loss minus the target row's entropy, z-loss term and class of each token.

    Raises:
        ValueError: if head and hidden states do not fit each other.
    """
    check_token_arrays(hidden.shape[:-1], targets, weights)
    embed_axis = 1 if tied else 0
    if head.ndim != 2 or head.shape[embed_axis] != hidden.shape[-1]:
        layout = "[vocab, embed]" if tied else "[embed, vocab]"
        raise ValueError(
            f"The head must be {layout} with the hidden states' embed: got head "
            f"{head.shape} for hidden states {hidden.shape}."
        )
    length = hidden.shape[1]
    size = min(settings.chunk_length, length)
    padding = ((0, 0), (0, -length % size))
    # Padded positions are cut off again, token by token, before anything is summed.
    hidden = jnp.pad(hidden, (*padding, (0, 0)))
    labels = jnp.pad(class_indices(targets), padding)
    if is_void is not None:
        is_void = jnp.pad(is_void, padding)
    # Otherwise bfloat16 inputs would have their gradients summed in bfloat16: the
    # head's over chunks, the hidden states' over its parts.
    head = head.astype(accumulation_dtype(head.dtype))
    hidden = hidden.astype(accumulation_dtype(hidden.dtype))
    hidden, head, labels = vary_alike(hidden, head, labels)
    head_settings = HeadSettings(
        size,
        settings.label_smoothing,
        tied,
        scale,
        jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
    )
    loss, z_term, classes = settings.implementation.head(
        hidden, head, labels, is_void, head_settings, settings.z_loss
    )
    vocab = head.shape[1 - embed_axis]
    loss = loss - entropy_of_targets(settings.label_smoothing, vocab)
    return loss[:, :length], z_term[:, :length], classes[:, :length]
