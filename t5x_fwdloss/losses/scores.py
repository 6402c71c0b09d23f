"""Cross entropy of each token without z-loss or smoothing: what T5X's scores are made of."""

import numpy as np
from jaxtyping import Array, Float, Shaped

from t5x_fwdloss.losses.implementations import check_loss_settings
from t5x_fwdloss.losses.targets import class_indices
from t5x_fwdloss.losses.weighted import (
    check_token_arrays,
    token_losses,
    void_tokens,
    weigh,
)


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
        targets: class numbers; zero for a label outside the vocabulary.
        weights: weight of each token; None for one everywhere.
        impl: a key of `IMPLEMENTATIONS`.

    Settings, shapes and dtypes that do not fit raise ValueError before anything runs.
    """
    check_loss_settings(impl)
    check_token_arrays(logits.shape[:-1], targets, weights)
    is_void = void_tokens(logits, weights, impl)
    labels = class_indices(targets)
    loss, z_term = token_losses(logits, labels, 0.0, 0.0, impl, is_void)
    return weigh(loss, z_term, weights, None, is_void)[0]
