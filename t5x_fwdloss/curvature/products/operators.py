r"""Host-driven products put together from compiled ones: sums, damping, stacks.

Products over a list of batches are sums of the batches' products, times one factor for
all: with $f = \frac1W \sum_b f_b$ the factor is $1/W$. There is no mean of means, so a
split into other batches gives the same number.
"""

import collections.abc
import functools

import jax
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import in_flight, trees

Product = collections.abc.Callable[..., PyTree]


@functools.partial(jax.jit, donate_argnames="total")
def _accumulate(total, part):
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)


def summed(
    product: Product,
    params: PyTree,
    batches: collections.abc.Sequence[tuple],
    *,
    factor: float = 1.0,
    fresh: bool = False,
) -> trees.Matvec:
    """The map `v -> factor * sum over batches of product(params, v, *batch)`.

    Args:
      product: A compiled function `(params, v, *batch) -> A_b v`.
      params: The parameters.
      batches: For each batch the tuple of further arguments.
      factor: One over the normalizer of all batches together.
      fresh: Whether a product's result is never one of its arguments, as that of a
        compiled program; then it is not copied before it is added to.

    Returns:
      The product; it holds on to the parameters and the batches.

    Raises:
      ValueError: There are no batches.
    """
    if not batches:
        raise ValueError("A sum of products must have at least one batch: got none.")

    def matvec(v):
        total = product(params, v, *batches[0])
        if not fresh:
            total = trees.scale(1.0, total)
        for number, batch in enumerate(batches[1:]):
            part = product(params, v, *batch)
            total = in_flight.limited(number, _accumulate(total, part))
        return total if factor == 1.0 else trees.scale(factor, total)

    return matvec


def damped(matvec: trees.Matvec, damping: float) -> trees.Matvec:
    r"""The map $v \mapsto A v + \lambda v$.

    Args:
      matvec: The product with $A$.
      damping: $\lambda$; negative values shift the spectrum down.

    Returns:
      The product.

    Raises:
      ValueError: The damping is not finite.
    """
    if not np.isfinite(damping):
        raise ValueError(f"damping must be finite: got {damping}.")
    return lambda v: trees.axpy(damping, v, matvec(v))


def stacked(product: Product) -> Product:
    """The function `(params, vs, *args) -> A vs` for vectors stacked along axis 0.

    One compiled product for several vectors: what does not depend on the vector is
    computed once, and matrix products get wider.

    Args:
      product: A pure function `(params, v, *args) -> A v`.

    Returns:
      The function, to be jitted by the caller.
    """

    def many(params, vs, *args):
        return jax.vmap(lambda v: product(params, v, *args))(vs)

    return many


def one_by_one(matvec: trees.Matvec) -> trees.Matvec:
    """The map of stacked vectors that multiplies one after the other, for any matvec."""
    return lambda vs: trees.stack([matvec(v) for v in trees.unstack(vs)])
