r"""The matrices of an objective, as products with a vector.

With the Jacobian $J_b$ of a batch's logits, all are sums over batches divided by the
one normalizer W, like the loss:

- `hessian`: $\nabla^2 L$, forward over reverse;
- `gauss_newton`: $\sum_b J_b^T H_b J_b / W$, $H_b$ the loss's Hessian in the logits;
- `fisher`: the same with $\mathrm{diag}\, p - p p^T$: labels drawn from the model,
  in expectation; equal to Gauss-Newton where smoothing and z-loss are zero;
- `sampled_fisher`: an unbiased draw of it, one label a token from one fixed key a batch;
- `empirical_fisher`: $\sum_t w_t g_t g_t^T / W$ at the labels of the data, token by
  token. It is no estimate of the others (Kunstner, Balles, Hennig 2019).
"""

from collections.abc import Callable
from typing import Any

import jax

from t5x_fwdloss.analysis.token_loss import TokenLoss
from t5x_fwdloss.curvature import fisher
from t5x_fwdloss.curvature.products import gauss_newton_product, hessian_product

Product = Callable[..., Any]

WORDS = {
    "hessian": "the Hessian",
    "gauss_newton": "the Gauss-Newton matrix",
    "fisher": "the Fisher matrix",
    "sampled_fisher": "the sampled Fisher matrix",
    "empirical_fisher": "the empirical Fisher matrix",
}


def products(
    loss: Callable[..., Any],
    outputs: Callable[..., Any] | None,
    token_loss: TokenLoss | None,
    normalizer: float,
    sample_seed: int = 0,
) -> dict[str, Product]:
    """The products `(params, v, batch, key, index)` by the matrix's name.

    Args:
        loss: `(params, batch, key, index)` to the batch's share of the objective.
        outputs: `(params, batch, key, index)` to the logits; None: the Hessian only.
        token_loss: the loss as a function of the logits.
        normalizer: W.
        sample_seed: what the labels of the sampled Fisher matrix depend on, with the
            number of their batch.
    """
    found: dict[str, Product] = {"hessian": hessian_product(loss)}
    if outputs is None or token_loss is None:
        return found

    def output_map(function):
        def scaled(logits, tangent, batch, key, index):
            del key, index
            return function(logits, tangent, batch) / normalizer

        return gauss_newton_product(outputs, scaled)

    def gradient(logits, batch, key, index):
        del key, index
        return token_loss.gradient(logits, batch) / normalizer**0.5

    def sampled_gradient(sample_key, logits, batch, key, index):
        del key, index
        return token_loss.sampled_gradient(sample_key, logits, batch) / normalizer**0.5

    def sampled(params, v, batch, key, index):
        root = jax.random.key(sample_seed, impl="threefry2x32")
        product = fisher.sampled_fisher_product(outputs, sampled_gradient)
        return product(params, v, jax.random.fold_in(root, index), batch, key, index)

    found["gauss_newton"] = output_map(token_loss.hessian)
    found["fisher"] = output_map(token_loss.fisher)
    found["sampled_fisher"] = sampled
    found["empirical_fisher"] = fisher.empirical_fisher_product(outputs, gradient)
    return found
