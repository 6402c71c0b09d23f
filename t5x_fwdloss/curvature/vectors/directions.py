r"""Directions in which a loss is differentiated or plotted, as vectors.

Scales matter: a random direction of norm one moves a large leaf by less per entry than a
small one. `leaf_normalized` and `filter_normalized` give each leaf, or each filter, the
norm that it has in the parameters, so that one step size means the same everywhere.

References:
  Li, Xu, Taylor, Studer, Goldstein 2018, Visualizing the loss landscape, section 4.
"""

import collections.abc
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature.vectors import trees

FilterAxis = collections.abc.Callable[[str, tuple[int, ...]], int | None]


def normalized(vector: PyTree, name: str = "vector") -> PyTree:
    """The vector divided by its norm.

    Args:
      vector: The vector.
      name: Its name in error messages.

    Returns:
      The vector of norm one.

    Raises:
      ValueError: The vector is zero.
    """
    length = float(trees.norm(vector))
    if length == 0.0:
        raise ValueError(f"The {name} must not be zero to have a direction.")
    if not np.isfinite(length):
        trees.check_finite(vector, name)
    return trees.scale(1.0 / length, vector)


def difference(end: PyTree, start: PyTree) -> PyTree:
    """The vector `end - start` of two parameter trees, in float32 or wider."""
    trees.check_like(trees.float_part(end), start, "end point")
    return trees.axpy(-1.0, trees.as_vector(start), trees.as_vector(end))


def input_axis(path: str, shape: tuple[int, ...]) -> int | None:
    """The axis summed over in the norm of one filter, for T5X's parameters.

    A kernel is `[inputs, ...]`: a filter is the weights of one output. An embedding is
    `[tokens, features]`: a filter is one token's vector. Scales and biases have no
    filters: they are normalized as a whole.

    Args:
      path: The leaf's path.
      shape: Its shape.

    Returns:
      The axis, or None for the whole leaf.
    """
    if len(shape) < 2:
        return None
    return len(shape) - 1 if path.rpartition("/")[2] == "embedding" else 0


@jax.jit
def _leaf_normalized(vector, floats):
    def one(leaf, param):
        return _matched(leaf, param.astype(leaf.dtype), None)

    return jax.tree.map(one, vector, floats)


def _matched(leaf, param, axis):
    keep = axis is not None
    size = jnp.sqrt(jnp.sum(jnp.square(leaf), axis=axis, keepdims=keep))
    wanted = jnp.sqrt(jnp.sum(jnp.square(param), axis=axis, keepdims=keep))
    one = jnp.ones_like(size)
    return leaf * jnp.where(size > 0, wanted / jnp.where(size > 0, size, one), wanted)


def leaf_normalized(vector: PyTree, params: PyTree) -> PyTree:
    """The vector with each leaf scaled to the norm of the parameter's leaf."""
    trees.check_like(vector, params)
    return _leaf_normalized(vector, trees.float_part(params))


def filter_normalized(
    vector: PyTree, params: PyTree, *, axis_of: FilterAxis = input_axis
) -> PyTree:
    """The vector with each filter scaled to the norm of the parameter's filter.

    Args:
      vector: The vector, usually `random_like(key, params, "normal")`.
      params: The parameters.
      axis_of: The axis summed over in a filter's norm, by path and shape; None for a
        whole leaf.

    Returns:
      The vector; filters that are zero in the parameters become zero.
    """
    trees.check_like(vector, params)
    floats = trees.float_part(params)
    axes = [
        axis_of(path, leaf.shape)
        for path, leaf in zip(
            trees.leaf_paths(floats), jax.tree.leaves(floats), strict=True
        )
    ]

    leaves = _filter_normalized(
        jax.tree.leaves(vector), jax.tree.leaves(floats), tuple(axes)
    )
    return jax.tree.unflatten(jax.tree.structure(vector), leaves)


@functools.partial(jax.jit, static_argnames="axes")
def _filter_normalized(leaves, params, axes):
    return [
        _matched(leaf, param.astype(leaf.dtype), axis)
        for leaf, param, axis in zip(leaves, params, axes, strict=True)
    ]


def subspace_overlap(first: list[PyTree], second: list[PyTree]) -> float:
    r"""How far two spans of vectors agree: 1 for the same, 0 for orthogonal ones.

    With the orthogonal projections $P$ and $Q$ onto the spans it is
    $\mathrm{tr}(P Q) / \sqrt{\mathrm{tr}\,P\;\mathrm{tr}\,Q}$, for spans of the same
    dimension the mean squared cosine of their principal angles (Gur-Ari, Roberts, Dyer
    2018, section 3).

    Args:
      first: Linearly independent vectors.
      second: Others of the same shapes.

    Returns:
      The overlap.
    """
    first, second = (list(map(normalized, vectors)) for vectors in (first, second))

    def inners(rows, columns):
        return np.array([[float(trees.inner(a, b)) for b in columns] for a in rows])

    cross = inners(first, second)
    left = np.linalg.solve(inners(first, first), cross)
    right = np.linalg.solve(inners(second, second), cross.T)
    return float(np.sum(left * right.T) / np.sqrt(len(first) * len(second)))


def overlaps(
    vector: PyTree, eigenvectors: list[PyTree]
) -> tuple[Float[np.ndarray, " k"], float]:
    r"""How much of a vector lies in the span of orthonormal vectors.

    Args:
      vector: $g$, usually the gradient.
      eigenvectors: $y_1 \dots y_k$, orthonormal.

    Returns:
      The signed cosines $\langle y_i, g \rangle / \|g\|$, and the part of the squared
      norm in the span, $\sum_i \cos_i^2$, between 0 and 1 up to rounding.
    """
    unit = normalized(vector)
    cosines = np.array([float(trees.inner(y, unit)) for y in eigenvectors])
    return cosines, float(np.sum(cosines**2))
