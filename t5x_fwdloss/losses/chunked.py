"""The head and the loss together, one length chunk at a time: no `[batch, length, vocab]`.

Memory is bounded by a few `[batch, chunk_length, vocab]` arrays and the head's own
float32 gradient, whatever the length. Values, and everything that the metrics of a
model need, are those of the whole logits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, ScalarLike, Shaped

from t5x_fwdloss.losses.head_terms import (
    HeadSettings,
    head_logits,
    head_terms,
    scan_over_chunks,
)
from t5x_fwdloss.losses.implementations import check_loss_settings
from t5x_fwdloss.losses.log_normalizer import accumulation_dtype
from t5x_fwdloss.losses.primitives.axis_types import vary_alike
from t5x_fwdloss.losses.targets import (
    class_indices,
    entropy_of_targets,
    with_void,
)
from t5x_fwdloss.losses.weighted import (
    check_token_arrays,
    token_losses,
    void_tokens,
    weigh,
    without,
)
from t5x_fwdloss.losses.weighting import weight_sum_of


class ChunkedLoss(NamedTuple):
    """What a training step needs of a batch whose logits were never in memory.

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

    The product is made in float32 (float64 for float64 input), and the gradient of the
    head is summed over chunks in it. With `impl="custom_jvp"` both directions of
    differentiation have a loop of their own (see `head_terms.py`); the others are
    differentiated by JAX, chunk by chunk, rematerialized. Settings that
    `check_loss_settings` refuses, and shapes or dtypes that do not fit each other, raise
    `ValueError`.

    Args:
        hidden: the decoder's last hidden states, any floating dtype.
        head: the output kernel `[embed, vocab]`, or with `tied` the embedding
            `[vocab, embed]`.
        targets: class numbers.
        weights: weight of each token; None for one everywhere.
        label_smoothing: a Python number in [0, 1).
        z_loss: coefficient of the squared log-normalizer.
        loss_normalizing_factor: None or a number.
        chunk_length: positions per chunk, at least one; the length need not be a
            multiple of it, and may be shorter.
        impl: a key of `IMPLEMENTATIONS`.
        tied: whether `head` is the embedding.
        scale: a constant factor of the logits, a Python number.
    """
    check_loss_settings(impl, chunk_length, label_smoothing, z_loss)
    is_void = void_tokens(hidden, weights, impl)
    loss, z_term, predictions = _token_losses(
        hidden,
        head,
        targets,
        weights,
        is_void,
        label_smoothing,
        z_loss,
        chunk_length=chunk_length,
        impl=impl,
        tied=tied,
        scale=scale,
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
        targets: class numbers.
        weights: weight of each token; None for one everywhere.
        chunk_length: positions per chunk, at least one.
        impl: a key of `IMPLEMENTATIONS`.
        tied: whether `head` is the embedding.
        scale: a constant factor of the logits, a Python number.
    """
    check_loss_settings(impl, chunk_length)
    is_void = void_tokens(hidden, weights, impl)
    loss, z_term, _ = _token_losses(
        hidden,
        head,
        targets,
        weights,
        is_void,
        0.0,
        0.0,
        chunk_length=chunk_length,
        impl=impl,
        tied=tied,
        scale=scale,
    )
    return weigh(loss, z_term, weights, None, is_void)[0]


def _token_losses(
    hidden,
    head,
    targets,
    weights,
    is_void,
    label_smoothing,
    z_loss,
    *,
    chunk_length,
    impl,
    tied,
    scale,
):
    """Loss less the entropy of the target row, z-loss term and class of each token.

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
    size = min(chunk_length, length)
    padding = -length % size
    # Padded positions are cut off again, token by token, before anything is summed.
    labels = class_indices(targets)
    if impl == "custom_jvp":
        labels = with_void(labels, is_void)
    else:
        hidden = without(is_void, hidden)
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    labels = jnp.pad(labels, ((0, 0), (0, padding)))
    # Else a head in bfloat16 would have its gradient summed over chunks in bfloat16, and
    # hidden states the several parts of theirs.
    head = head.astype(accumulation_dtype(head.dtype))
    hidden = hidden.astype(accumulation_dtype(hidden.dtype))
    hidden, head, labels = vary_alike(hidden, head, labels)
    settings = HeadSettings(
        size,
        label_smoothing,
        tied,
        scale,
        jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
    )
    if impl == "custom_jvp":
        cross_entropy, log_sum, shift, _, classes = head_terms(
            hidden, head, labels, settings
        )
        z_term = jnp.asarray(z_loss, log_sum.dtype) * jnp.square(shift + log_sum)
        vocab = head.shape[1 - embed_axis]
        loss = cross_entropy + z_term - entropy_of_targets(label_smoothing, vocab)
    else:
        loss, z_term, classes = _rematerialized(
            hidden, head, labels, settings, z_loss, impl
        )
    return loss[:, :length], z_term[:, :length], classes[:, :length]


def _rematerialized(hidden, head, labels, settings, z_loss, impl):
    """Token losses by a scan that JAX differentiates, each chunk's logits made again."""

    def chunk(hidden, labels):
        logits = head_logits(hidden, head, settings)
        loss, z_term = token_losses(
            logits, labels, settings.label_smoothing, z_loss, impl
        )
        return loss, z_term, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return scan_over_chunks(chunk, (hidden, labels), settings.chunk_length)
