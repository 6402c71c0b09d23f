"""The plain formula: JAX differentiates it, correctly for any targets."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, ScalarLike

from t5x_fwdloss.losses.log_normalizer import accumulation_dtype


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Float[Array, "*batch vocab"],
    z_loss: ScalarLike,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Loss and z-loss term of each token, transparent to every transformation.

    $L = -\sum_j t_j (z_j - \log Z) + c\,(\log Z)^2$ and $c\,(\log Z)^2$, with $c$ the
    coefficient `z_loss`; float32 whatever the dtype of the logits (float64 for float64).
    Derivatives with respect to logits, targets and coefficient are the formula's own,
    whether or not the targets sum to one. Classes at -inf give NaN; a weighted loss
    leaves such tokens out where their weight is zero.

    Args:
        logits: unnormalized log-probabilities; any floating dtype.
        targets: one row of weights over the classes per token.
        z_loss: the coefficient $c \ge 0$.
    """
    dtype = accumulation_dtype(logits.dtype)
    logits, targets = logits.astype(dtype), targets.astype(dtype)
    # The shift cancels in the formula; held constant it cancels in the derivative too.
    shift = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - shift
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    cross_entropy = -jnp.sum(targets * (shifted - log_sum), axis=-1)
    log_z = jnp.squeeze(shift + log_sum, axis=-1)
    z_term = jnp.asarray(z_loss, dtype) * jnp.square(log_z)
    return cross_entropy + z_term, z_term
