"""The implementations by name, what each can do, and the settings of a loss."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from jax.core import Tracer
from jaxtyping import Array, Float, ScalarLike

from t5x_fwdloss.losses import autodiff, custom_jvp, custom_vjp, head_terms
from t5x_fwdloss.losses.primitives.axis_types import laid_out_like, vary_alike
from t5x_fwdloss.losses.targets import dense_targets, without
from t5x_fwdloss.losses.weighting import as_number, check_loss_normalizing_factor


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to differentiate the loss, as functions of logits or hidden states.

    Attributes:
        dense: `(logits, targets, z_loss)` to loss and z-loss term of each token, for
            target rows `[..., vocab]`.
        tokens: `(logits, labels, *, label_smoothing, z_loss, is_void)` to the same, for
            integer labels.
        head: `(hidden, head, labels, is_void, settings, z_loss)` to loss, z-loss term
            and class of each token, length chunk by length chunk.
        has_forward_mode: whether `jax.jvp` works on it.
        leaves_void_out: whether a token of weight zero whose logits are not all finite
            has no part in values and derivatives; otherwise they are NaN there.
    """

    dense: Callable[..., Any]
    tokens: Callable[..., Any]
    head: Callable[..., Any]
    has_forward_mode: bool
    leaves_void_out: bool


def _of_dense(dense, *, has_forward_mode, leaves_void_out) -> Implementation:
    """An implementation made from a loss of dense target rows."""

    def tokens(logits, labels, *, label_smoothing, z_loss, is_void=None):
        logits = without(is_void, logits)
        targets = dense_targets(labels, logits.shape[-1], label_smoothing, logits.dtype)
        return dense(logits, laid_out_like(targets, logits), z_loss)

    head = head_terms.rematerialized(tokens)
    return Implementation(dense, tokens, head, has_forward_mode, leaves_void_out)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "custom_vjp": _of_dense(
        custom_vjp.cross_entropy, has_forward_mode=False, leaves_void_out=False
    ),
    "autodiff": _of_dense(
        autodiff.cross_entropy, has_forward_mode=True, leaves_void_out=True
    ),
    "custom_jvp": Implementation(
        custom_jvp.cross_entropy,
        custom_jvp.token_cross_entropy,
        head_terms.head_cross_entropy,
        has_forward_mode=True,
        leaves_void_out=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The settings that define a model's loss, checked on construction.

    Attributes:
        impl: a key of `IMPLEMENTATIONS`.
        chunk_length: target positions per chunk of the head and the loss, at least one;
            None computes all logits at once.
        label_smoothing: share of the target spread over the other classes, in [0, 1).
        z_loss: coefficient of the squared log-normalizer, finite and not negative; not
            checked while it is traced.
        loss_normalizing_factor: divisor of the summed loss: None, a number that is not
            zero, or one of T5X's special factors, by name or by T5X's enum.

    Raises:
        ValueError: a setting is not as described.
    """

    # The class checks its types itself: it accepts NumPy's and JAX's numbers, too.
    impl: Any = "custom_vjp"
    chunk_length: Any = None
    label_smoothing: Any = 0.0
    z_loss: Any = 0.0
    loss_normalizing_factor: Any = None

    def __post_init__(self):
        """Checks the settings.

        Raises:
            ValueError: a setting is invalid.
        """
        if not isinstance(self.impl, str) or self.impl not in IMPLEMENTATIONS:
            names = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"The loss must be one of {names}: got {self.impl!r}.")
        length, smoothing = self.chunk_length, self.label_smoothing
        is_whole = isinstance(length, numbers.Integral) and not isinstance(length, bool)
        if length is not None and (not is_whole or length < 1):
            raise ValueError(
                "The chunk length must be None or a whole number of at least 1: "
                f"got {length!r}."
            )
        is_number = isinstance(smoothing, numbers.Real)
        if not is_number or not 0 <= float(smoothing) < 1:
            raise ValueError(
                f"label_smoothing must be a number in [0, 1): got {smoothing!r}."
            )
        check_loss_normalizing_factor(self.loss_normalizing_factor)
        if isinstance(self.z_loss, Tracer):
            return
        if not 0 <= as_number(self.z_loss) < math.inf:
            raise ValueError(
                f"z_loss must be finite and not negative: got {self.z_loss!r}."
            )

    @property
    def implementation(self) -> Implementation:
        """The implementation that `impl` names."""
        return IMPLEMENTATIONS[self.impl]

    @property
    def record(self) -> dict[str, Any]:
        """The settings under T5X's names, as JSON values."""
        factor = self.loss_normalizing_factor
        return {
            "loss_impl": self.impl,
            "loss_chunk_length": self.chunk_length,
            "label_smoothing": float(self.label_smoothing),
            "z_loss": float(self.z_loss),
            "loss_normalizing_factor": getattr(factor, "name", factor),
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
    rows sum to one; see their docstrings for the differences.

    Args:
        logits: unnormalized log-probabilities.
        targets: one row of weights over the classes per token.
        z_loss: the coefficient $c \ge 0$.
        impl: a key of `IMPLEMENTATIONS`; any other name raises ValueError.
    """
    implementation = LossSettings(impl).implementation
    logits, targets = vary_alike(logits, laid_out_like(targets, logits))
    return implementation.dense(logits, targets, z_loss)
