"""The implementations by name, and the check of every setting that chooses among them."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from jax.core import Tracer
from jaxtyping import Array, Float, ScalarLike

from t5x_fwdloss.losses import autodiff, custom_jvp, custom_vjp
from t5x_fwdloss.losses.primitives.axis_types import laid_out_like, vary_alike
from t5x_fwdloss.losses.weighting import as_number, check_loss_normalizing_factor

IMPLEMENTATIONS: Mapping[str, Callable] = {
    "custom_vjp": custom_vjp.cross_entropy,
    "autodiff": autodiff.cross_entropy,
    "custom_jvp": custom_jvp.cross_entropy,
}


def cross_entropy_with_logits(
    logits: Float[Array, "*batch vocab"],
    targets: Float[Array, "*batch vocab"],
    z_loss: ScalarLike,
    *,
    impl: str,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Loss (z-loss included) and z-loss term of each token, by the chosen implementation.

    $L = -\sum_j t_j (z_j - \log Z) + c\,(\log Z)^2$ and $c\,(\log Z)^2$: T5X's function
    of the same name. The implementations agree in value, and in derivative where target
    rows sum to one; see their docstrings for what each carries.

    Args:
        logits: unnormalized log-probabilities.
        targets: one row of weights over the classes per token.
        z_loss: the coefficient $c \ge 0$.
        impl: a key of `IMPLEMENTATIONS`; any other name raises ValueError.
    """
    check_loss_settings(impl)
    logits, targets = vary_alike(logits, laid_out_like(targets, logits))
    return IMPLEMENTATIONS[impl](logits, targets, z_loss)


def check_loss_settings(
    impl: Any,
    chunk_length: Any = None,
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    loss_normalizing_factor: Any = None,
) -> None:
    """Refuses settings that no loss can be computed with.

    Args:
        impl: must be a key of `IMPLEMENTATIONS`.
        chunk_length: must be None or a whole number of tokens, at least one.
        label_smoothing: must be a number in [0, 1).
        z_loss: must be finite and not negative; not looked at while it is traced.
        loss_normalizing_factor: as `check_loss_normalizing_factor` takes it.

    Raises:
        ValueError: if one of them is not so.
    """
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"The loss must be one of {names}: got {impl!r}.")
    is_whole = isinstance(chunk_length, numbers.Integral)
    is_whole = is_whole and not isinstance(chunk_length, bool)
    if chunk_length is not None and (not is_whole or chunk_length < 1):
        raise ValueError(
            "The chunk length must be None or a whole number of at least 1: "
            f"got {chunk_length!r}."
        )
    is_number = isinstance(label_smoothing, numbers.Real)
    if not is_number or not 0 <= float(label_smoothing) < 1:
        raise ValueError(
            f"label_smoothing must be a number in [0, 1): got {label_smoothing!r}."
        )
    check_loss_normalizing_factor(loss_normalizing_factor)
    if isinstance(z_loss, Tracer):
        return
    if not 0 <= as_number(z_loss) < math.inf:
        raise ValueError(f"z_loss must be finite and not negative: got {z_loss!r}.")
