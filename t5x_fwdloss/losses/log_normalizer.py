r"""The log-normalizer of a row of logits, split so that nothing cancels.

Notation of this folder: $z$ the logits of one token, $t$ its target row, $p$ the
softmax, $\log Z = \log\sum_j e^{z_j}$. Everything is held as $\log Z = m + \ell$ with
the shift $m = \max_j z_j$ and $\ell = \log\sum_j e^{z_j - m}$: at logits of 1e4 the sum
$m + \ell$ has lost four digits of $\ell$, and with them the probabilities.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def accumulation_dtype(dtype) -> jnp.dtype:
    """float64 for float64, float32 for everything narrower."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def shifted_log_sum(
    logits: Float[Array, "*batch vocab"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""The pair $(m, \ell)$ of each row; do not differentiate it directly.

    A row whose classes are all at -inf gets $(0, 0)$, so that its probabilities are
    zero instead of NaN.
    """
    highest = jnp.max(logits, axis=-1)
    shift = jnp.where(jnp.isfinite(highest), highest, jnp.zeros_like(highest))
    total = jnp.sum(jnp.exp(logits - shift[..., None]), axis=-1)
    # The largest class contributes exactly one, so the bound affects empty rows only.
    return shift, jnp.log(jnp.maximum(total, jnp.ones_like(total)))


def probabilities(
    logits: Float[Array, "*batch vocab"],
    shift: Float[Array, "*batch"],
    log_sum: Float[Array, "*batch"],
) -> Float[Array, "*batch vocab"]:
    r"""The softmax $p = e^{(z - m) - \ell}$; zero at classes of -inf."""
    return jnp.exp((logits - shift[..., None]) - log_sum[..., None])
