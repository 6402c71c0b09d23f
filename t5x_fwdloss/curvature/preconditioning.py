r"""Directions and curvature as an adaptive optimizer sees them.

Adam and Adafactor divide the gradient by the root of a running second moment,
$d = g / (\sqrt v + \epsilon)$; with $D = (\sqrt v + \epsilon)^{-1/2}$ the map whose
eigenvalues decide the stability of their steps is $D A D$. The caller takes the second
moments out of its checkpoint; here they are a tree like the parameters.

References:
  Kingma, Ba 2015, Adam, algorithm 1; Shazeer, Stern 2018, Adafactor, algorithm 4.
  Cohen et al. 2022, Adaptive gradient methods at the edge of stability, section 2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from t5x_fwdloss.curvature import krylov, trees


def factored_second_moment(
    row: Float[Array, "..."],
    column: Float[Array, "..."],
    *,
    row_lacks: tuple[int, ...],
    column_lacks: tuple[int, ...],
) -> Float[Array, "..."]:
    r"""Adafactor's second moment of a leaf, $v_{ij} = r_i c_j / \operatorname{mean}(r)$.

    Args:
      row: $r$: the mean of the squared gradients over the axes `row_lacks`.
      column: $c$: their mean over the axes `column_lacks`.
      row_lacks: Axes of the leaf that `row` does not have (T5X's `d0`).
      column_lacks: Axes of the leaf that `column` does not have (T5X's `d1`).

    Returns:
      The second moment, in the shape of the leaf.

    Raises:
      ValueError: The shapes are not those of one leaf's row and column.
    """
    ndim = row.ndim + len(row_lacks)
    if ndim != column.ndim + len(column_lacks) or set(row_lacks) & set(column_lacks):
        raise ValueError(
            "row and column must lack different axes of one leaf: got shapes "
            f"{row.shape} without {row_lacks} and {column.shape} without {column_lacks}."
        )
    wide = trees.vector_dtype(row)
    row = jnp.expand_dims(row.astype(wide), row_lacks)
    column = jnp.expand_dims(column.astype(wide), column_lacks)
    return row / jnp.mean(row, axis=column_lacks, keepdims=True) * column


@jax.jit
def preconditioner(second_moment: PyTree, epsilon: trees.Scalar = 1e-8) -> PyTree:
    r"""The diagonal $1 / (\sqrt v + \epsilon)$, a vector; $v$ must not be negative."""
    return jax.tree.map(
        lambda leaf: 1 / (jnp.sqrt(leaf) + jnp.asarray(epsilon, leaf.dtype)),
        trees.as_vector(second_moment),
    )


@jax.jit
def apply_diagonal(diagonal: PyTree, vector: PyTree) -> PyTree:
    """The elementwise product of two vectors, such as a preconditioned gradient."""
    return jax.tree.map(lambda d, x: d.astype(x.dtype) * x, diagonal, vector)


@jax.jit
def root(diagonal: PyTree) -> PyTree:
    """The elementwise square root."""
    return jax.tree.map(jnp.sqrt, diagonal)


def congruent(matvec: krylov.Matvec, diagonal: PyTree) -> krylov.Matvec:
    r"""The map $v \mapsto D A D v$, symmetric where $A$ is.

    With $D$ the root of the preconditioner $P$ it has the eigenvalues of $P A$.

    Args:
      matvec: The product with $A$.
      diagonal: $D$, a vector.

    Returns:
      The product.
    """
    return lambda v: apply_diagonal(diagonal, matvec(apply_diagonal(diagonal, v)))
