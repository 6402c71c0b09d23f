"""The loss of a batch: token losses times weights, over a factor, summed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Integer, ScalarLike, Shaped

from t5x_fwdloss.losses.implementations import LossSettings
from t5x_fwdloss.losses.primitives.axis_types import vary_alike
from t5x_fwdloss.losses.targets import (
    class_indices,
    entropy_of_targets,
)
from t5x_fwdloss.losses.weighting import weight_sum_of


def compute_weighted_cross_entropy(
    logits: Float[Array, "..."],
    targets: Shaped[Array | np.ndarray, "..."],
    weights: Shaped[Array | np.ndarray, "..."] | None = None,
    label_smoothing: float = 0.0,
    z_loss: ScalarLike = 0.0,
    loss_normalizing_factor: ScalarLike | None = None,
    *,
    impl: str = "custom_vjp",
) -> tuple[Float[Array, ""], Float[Array, ""], ScalarLike]:
    r"""The weighted loss of a batch, its z-loss part, and the sum of the weights.

    $\sum_i w_i (L_i - H) / N$ and $\sum_i w_i\,c\,(\log Z_i)^2 / N$ over the tokens $i$,
    with $L_i$ the token's loss, z-loss included, $H$ the entropy of a smoothed target
    row, $c$ the coefficient `z_loss` and $N$ the normalizing factor (1 for None): T5X's
    function of the same name. With `impl="custom_vjp"` value and gradient equal T5X's
    bit for bit. The others leave out a token of weight zero whose logits are not all
    finite, in the value and in every derivative, where T5X's rule has NaN.

    Args:
        logits: `[batch, length, vocab]`, or any number of leading axes.
        targets: class indices `[batch, length]`, of any integer dtype, or floating with
            integer values. A label outside the vocabulary has a cross entropy of zero
            (without smoothing) and keeps its z-loss term.
        weights: weight of each token `[batch, length]`, bool, integer or floating; None
            means all ones, and then the third result is batch times length.
        label_smoothing: a Python number in [0, 1).
        z_loss: the coefficient $c \ge 0$.
        loss_normalizing_factor: None or a number. The three special names become a
            number by `get_loss_normalizing_factor_and_weights`.
        impl: a key of `IMPLEMENTATIONS`.

    Settings, shapes and dtypes that do not fit raise ValueError before anything runs
    (`LossSettings`, `check_token_arrays`).
    """
    settings = LossSettings(impl, None, label_smoothing, z_loss)
    check_token_arrays(logits.shape[:-1], targets, weights)
    is_void = void_tokens(logits, weights, settings)
    loss, z_term = token_losses(logits, class_indices(targets), settings, is_void)
    loss, z_term = weigh(loss, z_term, weights, loss_normalizing_factor, is_void)
    return jnp.sum(loss), jnp.sum(z_term), weight_sum_of(weights, targets.shape)


def void_tokens(
    rows: Float[Array, "*batch width"],
    weights: Shaped[Array | np.ndarray, "*batch"] | None,
    settings: LossSettings,
) -> Bool[Array, "*batch"] | None:
    """Tokens of weight zero whose logits, or hidden states, are not all finite.

    Zero times their derivatives would be NaN, so they must not be differentiated at all.
    None without weights, and for `custom_vjp`, which keeps T5X's NaN.
    """
    if weights is None or not settings.implementation.leaves_void_out:
        return None
    # NaN and Inf show in a row's maximum or minimum; reductions need no new array.
    ends = (jnp.max(rows, axis=-1), jnp.min(rows, axis=-1))
    is_number = jnp.isfinite(ends[0]) & jnp.isfinite(ends[1])
    return (jnp.asarray(weights) == jnp.zeros((), weights.dtype)) & ~is_number


def token_losses(
    logits: Float[Array, "*batch vocab"],
    labels: Integer[Array, "*batch"],
    settings: LossSettings,
    is_void: Bool[Array, "*batch"] | None = None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Loss of each token, minus the entropy of its target row, and its z-loss term.

    Void tokens get the values of all-zero logits.
    """
    logits, labels = vary_alike(logits, labels)
    loss, z_term = settings.implementation.tokens(
        logits,
        labels,
        label_smoothing=settings.label_smoothing,
        z_loss=settings.z_loss,
        is_void=is_void,
    )
    return loss - entropy_of_targets(settings.label_smoothing, logits.shape[-1]), z_term


def weigh(
    loss: Float[Array, "*batch"],
    z_term: Float[Array, "*batch"],
    weights: Shaped[Array | np.ndarray, "*batch"] | None,
    factor: ScalarLike | None,
    is_void: Bool[Array, "*batch"] | None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Both terms times the weights, over the factor; zero for void tokens."""
    # Weights and factor come in many dtypes; T5X leaves their promotion to jax.
    with jax.numpy_dtype_promotion("standard"):
        if weights is not None:
            if is_void is not None:
                loss = jnp.where(is_void, 0.0, loss)
                z_term = jnp.where(is_void, 0.0, z_term)
            loss, z_term = loss * weights, z_term * weights
        if factor is not None:
            loss, z_term = loss / factor, z_term / factor
    return loss, z_term


def check_token_arrays(
    token_shape: tuple[int, ...],
    targets: Shaped[Array | np.ndarray, "..."],
    weights: Shaped[Array | np.ndarray, "..."] | None,
) -> None:
    """Rejects labels and weights that do not fit the tokens.

    Args:
        token_shape: the leading axes of the logits, or of the hidden states.
        targets: must have that shape, and an integer dtype or, if their values are
            known, integer values.
        weights: must have that shape, and, if their values are known, a sum that is not
            negative.

    Raises:
        ValueError: if one of them does not.
    """
    if targets.shape != token_shape:
        raise ValueError(
            "Targets must have one axis fewer than the logits and agree in the others: "
            f"got targets {targets.shape} for tokens {token_shape}."
        )
    _check_whole(targets)
    if weights is None:
        return
    if weights.shape != targets.shape:
        raise ValueError(
            "Weights must have the shape of the targets: "
            f"got weights {weights.shape} for targets {targets.shape}."
        )
    if _is_at_hand(weights) and np.sum(np.asarray(weights)) < 0:
        raise ValueError(
            f"The sum of the weights must not be negative: got {np.sum(weights)}."
        )


def _check_whole(targets):
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return
    if not jnp.issubdtype(targets.dtype, jnp.floating):
        raise ValueError(f"Targets must be integers: got dtype {targets.dtype}.")
    if _is_at_hand(targets):
        values = np.asarray(targets).astype(np.float64)
        broken = values[values != np.floor(values)]
        if broken.size:
            raise ValueError(f"Targets must be whole numbers: got {broken[0]}.")


def _is_at_hand(array):
    if isinstance(array, Tracer):
        return False
    return getattr(array, "is_fully_addressable", True)


def weighted_token_cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Shaped[Array | np.ndarray, "*batch"],
    weights: Shaped[Array | np.ndarray, "*batch"] | None = None,
    *,
    impl: str = "custom_vjp",
) -> Float[Array, "*batch"]:
    r"""$w_i (\log Z_i - z_{i, y_i})$ of each token; its negative sum is the score.

    Args:
        logits: unnormalized log-probabilities.
        targets: class indices; zero for a label outside the vocabulary.
        weights: weight of each token; None means all ones.
        impl: a key of `IMPLEMENTATIONS`.

    Settings, shapes and dtypes that do not fit raise ValueError before anything runs.
    """
    settings = LossSettings(impl)
    check_token_arrays(logits.shape[:-1], targets, weights)
    is_void = void_tokens(logits, weights, settings)
    loss, z_term = token_losses(logits, class_indices(targets), settings, is_void)
    return weigh(loss, z_term, weights, None, is_void)[0]
