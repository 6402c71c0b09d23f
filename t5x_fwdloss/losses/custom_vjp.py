r"""T5X's cross entropy: a rule for the reverse pass, kept bit for bit.

Every expression, and the order of its operations, is that of `cross_entropy_with_logits`
in T5X (`t5x/losses.py`, commit cc342d4, Apache-2.0, the T5X authors). The primal and the
forward half of the rule use different arithmetic there, and therefore here.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, ScalarLike


@jax.custom_vjp
def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Float[Array, "*batch vocab"],
    z_loss: ScalarLike,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Loss and z-loss term of each token, with T5X's reverse-mode rule.

    $L = -\sum_j t_j (z_j - \log Z) + c\,(\log Z)^2$ and $c\,(\log Z)^2$, with $c$ the
    coefficient `z_loss`. The loss contains the z-loss term.

    The rule assumes targets that sum to one, drops the cotangent of the second output
    and gives the coefficient a derivative of zero. It has no forward mode: `jax.jvp`,
    `jax.linearize` and `jax.jacfwd` raise TypeError; forward over reverse works.
    Classes at -inf give NaN.

    Args:
        logits: unnormalized log-probabilities; any floating dtype.
        targets: one distribution over the classes per token.
        z_loss: the coefficient $c \ge 0$.
    """
    with jax.numpy_dtype_promotion("standard"):  # bfloat16 logits, float32 targets
        log_z = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        log_softmax = logits - log_z
        loss = -jnp.sum(targets * log_softmax, axis=-1)
        z_term = z_loss * jax.lax.square(jnp.squeeze(log_z, axis=-1))
        return loss + z_term, jnp.asarray(z_term)


def _forward(logits, targets, z_loss):
    with jax.numpy_dtype_promotion("standard"):
        max_logit = logits.max(axis=-1, keepdims=True)
        shifted = logits - max_logit
        exp_shifted = jnp.exp(shifted)
        sum_exp = jnp.sum(exp_shifted, axis=-1, keepdims=True)
        log_softmax = shifted - jnp.log(sum_exp)
        loss = -jnp.sum(targets * log_softmax, axis=-1)
        log_z = jnp.squeeze(jnp.log(sum_exp) + max_logit, axis=-1)
        z_term = z_loss * jax.lax.square(log_z)
        residuals = logits, targets, z_loss, exp_shifted, sum_exp, log_softmax, log_z
        return (loss + z_term, z_term), residuals


def _backward(residuals, cotangents):
    # z_bar = L_bar * ((1 + 2 c log Z) p - t): the one sum(t) = 1 is assumed here.
    loss_bar, _ = cotangents  # the z-loss term is only logged
    logits, targets, z_loss, exp_shifted, sum_exp, log_softmax, log_z = residuals
    with jax.numpy_dtype_promotion("standard"):
        scale = jnp.expand_dims(1 + 2 * z_loss * log_z, -1)
        gradient = scale * exp_shifted / sum_exp - targets
        loss_bar = jnp.expand_dims(loss_bar, axis=-1)
        logits_bar = jnp.asarray(loss_bar * gradient, logits.dtype)
        targets_bar = jnp.asarray(-loss_bar * log_softmax, targets.dtype)
        return logits_bar, targets_bar, jnp.zeros_like(z_loss)


cross_entropy.defvjp(_forward, _backward)
