"""Cross entropy for T5X models: arrays in, arrays out; no T5X, no gin, no model."""

from t5x_fwdloss.losses.chunked import (
    ChunkedLoss,
    chunked_weighted_cross_entropy,
    chunked_weighted_token_cross_entropy,
)
from t5x_fwdloss.losses.custom_jvp import token_cross_entropy
from t5x_fwdloss.losses.implementations import (
    IMPLEMENTATIONS,
    Implementation,
    LossSettings,
    cross_entropy_with_logits,
)
from t5x_fwdloss.losses.logit_hessian import logit_hessian_product, row_inners
from t5x_fwdloss.losses.weighted import (
    compute_weighted_cross_entropy,
    weighted_token_cross_entropy,
)
from t5x_fwdloss.losses.weighting import get_loss_normalizing_factor_and_weights

__all__ = [
    "IMPLEMENTATIONS",
    "ChunkedLoss",
    "Implementation",
    "LossSettings",
    "chunked_weighted_cross_entropy",
    "chunked_weighted_token_cross_entropy",
    "compute_weighted_cross_entropy",
    "cross_entropy_with_logits",
    "get_loss_normalizing_factor_and_weights",
    "logit_hessian_product",
    "row_inners",
    "token_cross_entropy",
    "weighted_token_cross_entropy",
]
