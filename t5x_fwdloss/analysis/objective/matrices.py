r"""The matrices of an objective, as products with a vector.

With the Jacobian $J_b$ of a batch's outputs, all are sums over batches divided by the
one normalizer W, like the loss:

- `hessian`: $\nabla^2 L$, forward over reverse;
- `gauss_newton`: $\sum_b J_b^T H_b J_b / W$, $H_b$ the loss's Hessian in the outputs;

and where the outputs are logits and the loss is the cross entropy of tokens:

- `fisher`: the same with $\mathrm{diag}\, p - p p^T$: labels drawn from the model,
  in expectation; equal to Gauss-Newton where smoothing and z-loss are zero;
- `sampled_fisher`: an unbiased draw of it, one label per token, from a key that depends
  on the example's number only, so that any split gives the same matrix;
- `empirical_fisher`: $\sum_t w_t g_t g_t^T / W$ at the labels of the data, token by
  token. It does not estimate the others (Kunstner, Balles, Hennig 2019).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_fwdloss import losses
from t5x_fwdloss.analysis.objective.of_outputs.any_loss import AnyLoss
from t5x_fwdloss.analysis.objective.of_outputs.token_loss import TokenLoss
from t5x_fwdloss.curvature.products.linearized import (
    LinearMap,
    gauss_newton_map,
    hessian_map,
)
from t5x_fwdloss.curvature.vectors import probes

WORDS = {
    "hessian": "the Hessian",
    "gauss_newton": "the Gauss-Newton matrix",
    "fisher": "the Fisher matrix",
    "sampled_fisher": "the sampled Fisher matrix",
    "empirical_fisher": "the empirical Fisher matrix",
}


def linear_maps(
    loss: Callable[..., Any],
    outputs: Callable[..., Any] | None,
    of_outputs: TokenLoss | AnyLoss | None,
    normalizer: float,
    sample_seed: int = 0,
) -> dict[str, LinearMap]:
    """The matrices by name, with arguments `(params, v, batch, key, index)`.

    Args:
        loss: `(params, batch, key, index)` to the batch's share of the objective.
        outputs: `(params, batch, key, index)` to the outputs; None: the Hessian only.
        of_outputs: the loss as a function of the outputs; one that is not of tokens has
            the Hessian and the Gauss-Newton matrix only.
        normalizer: W.
        sample_seed: seed of the labels of the sampled Fisher matrix, which also depend
            on the number of their example.
    """
    found = {"hessian": hessian_map(loss)}
    if outputs is None or of_outputs is None:
        return found

    def output_map(function):
        def scaled(z, tangent, batch, key, index):
            del key
            product = function(z, tangent, batch, index)
            return jax.tree.map(lambda x: x / normalizer, product)

        return gauss_newton_map(outputs, scaled)

    found["gauss_newton"] = output_map(lambda z, u, b, _: of_outputs.hessian(z, u, b))
    if not isinstance(of_outputs, TokenLoss):
        return found
    token_loss = of_outputs

    def empirical(logits, tangent, batch, index):
        del index
        return _rank_one(token_loss.gradient(logits, batch), tangent)

    def sampled(logits, tangent, batch, index):
        keys = _example_keys(sample_seed, index, logits.shape[0])
        return _rank_one(token_loss.sampled_gradient(keys, logits, batch), tangent)

    found["fisher"] = output_map(lambda z, u, b, _: token_loss.fisher(z, u, b))
    found["sampled_fisher"] = output_map(sampled)
    found["empirical_fisher"] = output_map(empirical)
    return found


def _example_keys(seed, index, size):
    """A key for each example of batch `index`, by its number over all batches."""
    root = probes.as_key(seed)
    return jax.vmap(jax.random.fold_in, (None, 0))(
        root, index * size + jnp.arange(size)
    )


def _rank_one(gradient, tangent):
    # The product of every token's g g^T with its part of the tangent.
    return gradient * losses.row_inners(gradient, tangent)[..., None]
