r"""Fisher matrices as Gauss-Newton products: $J^T F J$ with $F$ in the outputs.

The outputs are split into independent *units* (for a language model: tokens). With
$g_u$ the gradient of the negative log likelihood of unit $u$ in its outputs,

- the exact Fisher matrix has $F = \mathbb E_{y \sim p}\, g_u g_u^T$ on each unit. For a
  softmax without smoothing this is $\mathrm{diag}\, p - p p^T$, a closed form that goes
  into `derivatives.gauss_newton_product` as it is;
- the Monte-Carlo Fisher matrix takes $g_u$ at sampled labels, $F = \frac1S \sum_s
  g_u^{(s)} g_u^{(s)T}$: unbiased, of rank one per unit and sample;
- the empirical Fisher matrix takes $g_u$ at the labels of the data, and is no estimate
  of the others.

All of them are positive semidefinite, and sums over units: no normalization here.

References:
  Martens 2020, New insights and perspectives on the natural gradient method, section 9.
  Kunstner, Balles, Hennig 2019, Limitations of the empirical Fisher approximation.
"""

import collections.abc

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.curvature.products import derivatives

OutputGradient = collections.abc.Callable[..., PyTree]


def _rank_one(gradient, u, unit_ndim):
    """The product of every unit's $g g^T$ with its part of `u`."""
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(u), strict=True)
    dots = sum(
        jnp.sum(g * x, axis=tuple(range(g.ndim - unit_ndim, g.ndim)), keepdims=True)
        for g, x in pairs
    )
    return jax.tree.map(lambda g: g * dots, gradient)


def empirical_fisher_product(
    outputs: derivatives.Function,
    output_gradient: OutputGradient,
    *,
    unit_ndim: int = 1,
) -> derivatives.Function:
    r"""The function `(params, v, *args) -> J^T (sum_u g_u g_u^T) J v`.

    Args:
      outputs: `(params, *args) -> z`, an array (or arrays of the same leading axes).
      output_gradient: `(z, *args) -> g`, the loss's gradient in `z` at the data's own
        labels; where tokens have weights, times the square root of the weight, so that
        the sum is the weighted one.
      unit_ndim: How many trailing axes form one unit: 1 for tokens (`[vocab]`), 2 for
        sequences (`[length, vocab]`).

    Returns:
      The function.
    """

    def output_fisher(z, u, *args):
        return _rank_one(output_gradient(z, *args), u, unit_ndim)

    return derivatives.gauss_newton_product(outputs, output_fisher)


def sampled_fisher_product(
    outputs: derivatives.Function,
    sampled_gradient: OutputGradient,
    *,
    num_samples: int = 1,
    unit_ndim: int = 1,
) -> derivatives.Function:
    r"""The function `(params, v, key, *args) -> J^T (1/S sum_s g_s g_s^T) J v`.

    The same key gives the same matrix: a run has to use one key per batch, or the
    matrix changes under the iteration.

    Args:
      outputs: `(params, *args) -> z`.
      sampled_gradient: `(key, z, *args) -> g`: draws the labels from the model's own
        distribution and returns the gradient of their negative log likelihood in `z`
        (times the square root of the weight).
      num_samples: $S$.
      unit_ndim: As in `empirical_fisher_product`.

    Returns:
      The function; the key comes right after the vector.

    Raises:
      ValueError: The number of samples is below one.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1: got {num_samples}.")

    def output_fisher(z, u, key, *args):
        def one(total, sample_key):
            part = _rank_one(sampled_gradient(sample_key, z, *args), u, unit_ndim)
            return jax.tree.map(jnp.add, total, part), None

        zero = jax.tree.map(jnp.zeros_like, u)
        total, _ = jax.lax.scan(one, zero, jax.random.split(key, num_samples))
        return jax.tree.map(lambda x: x * jnp.asarray(1 / num_samples, x.dtype), total)

    # The outputs themselves do not depend on the key.
    def keyless(params, key, *args):
        del key
        return outputs(params, *args)

    return derivatives.gauss_newton_product(keyless, output_fisher)
