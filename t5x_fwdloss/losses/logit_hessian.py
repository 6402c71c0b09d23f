"""The Hessian of a token's loss in its logits, in closed form, as a product."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, ScalarLike, Shaped

from t5x_fwdloss.losses.custom_jvp import token_terms
from t5x_fwdloss.losses.log_normalizer import probabilities
from t5x_fwdloss.losses.targets import with_void


def logit_hessian_product(
    logits: Float[Array, "*batch vocab"],
    labels: Shaped[Array, "*batch"],
    tangent: Float[Array, "*batch vocab"],
    *,
    label_smoothing: float = 0.0,
    z_loss: ScalarLike = 0.0,
) -> Float[Array, "*batch vocab"]:
    r"""The product $H u$ of each token's loss Hessian with a tangent $u$ of its logits.

    $H u = s\,(p \circ u - p \langle p, u\rangle) + 2 c\, p \langle p, u\rangle$ with
    $s = \sum_j t_j + 2 c \log Z$ and $c$ the coefficient `z_loss`: the softmax
    Hessian, scaled, and the rank-one term of the z-loss. For one token, without weight
    or normalizer; float32 (float64 for float64 logits). $H$ is positive semidefinite
    where $s \ge 0$.

    Args:
        logits: unnormalized log-probabilities.
        labels: class indices; they matter only outside the vocabulary.
        tangent: the vector $u$.
        label_smoothing: the target weight moved off the label, in [0, 1).
        z_loss: the coefficient $c \ge 0$.
    """
    labels = with_void(labels)
    _, log_sum, shift, mass = token_terms(logits, labels, label_smoothing)
    dtype = shift.dtype
    probs = probabilities(logits.astype(dtype), shift, log_sum)
    weighted = probs * tangent.astype(dtype)
    mean = row_inners(probs, tangent.astype(dtype))[..., None]
    z_loss = jnp.asarray(z_loss, dtype)
    scale = (mass + 2 * z_loss * (shift + log_sum))[..., None]
    return scale * (weighted - probs * mean) + 2 * z_loss * probs * mean


def row_inners(
    a: Float[Array, "*batch vocab"], b: Float[Array, "*batch vocab"]
) -> Float[Array, "*batch"]:
    r"""The inner products $\sum_j a_j b_j$ of the rows of two arrays.

    A contraction, not a sum of products: where only `b` is mapped over several vectors,
    XLA's CPU compiler has fused broadcast, product, sum and the next product into one
    kernel that gives wrong numbers (docs/upstream/xla_cpu_ynn_fusion.md).

    Args:
        a: rows, such as probabilities or gradients.
        b: rows of the same shape, such as tangents.
    """
    return jnp.einsum("...v,...v->...", a, b, precision=jax.lax.Precision.HIGHEST)
