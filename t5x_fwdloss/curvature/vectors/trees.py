r"""Linear algebra on vectors that are pytrees shaped like the parameters.

A *vector* $v$ has one float leaf for each float leaf of the parameters, under the same
path, and `None` where the parameters hold integers or anything else that cannot be
differentiated. It is never ravelled: flattening a sharded tree gathers it. Sums are
taken leaf by leaf, in float32 or in the wider of the two leaves' types.
"""

import collections.abc
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from t5x_fwdloss.curvature.vectors import errors, layout

Scalar = float | np.floating | Array
Matvec = collections.abc.Callable[[PyTree], PyTree]


def leaf_path(key_path: tuple) -> str:
    """The T5X name of a leaf, such as `'decoder/layers_0/mlp/wi/kernel'`."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
        for key in key_path
    )


def leaf_paths(tree: PyTree) -> list[str]:
    """The T5X names of all leaves, in the order of `jax.tree.leaves`."""
    return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _is_float(leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def float_part(params: PyTree) -> PyTree:
    """The parameters with `None` for each leaf that is not of a real float type."""
    return jax.tree.map(lambda leaf: leaf if _is_float(leaf) else None, params)


def left_out(params: PyTree) -> list[str]:
    """Paths of the leaves that `float_part` drops: integers, keys, complex numbers."""
    return [
        leaf_path(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not _is_float(leaf)
    ]


def merge(floats: PyTree, params: PyTree) -> PyTree:
    """The parameters with their float leaves replaced by those of `floats`."""
    leaves = iter(jax.tree.leaves(floats))
    return jax.tree.map(lambda leaf: next(leaves) if _is_float(leaf) else leaf, params)


def vector_dtype(leaf) -> np.dtype:
    """The type of a vector's leaf: float32, or the leaf's own type where it is wider."""
    return widest_dtype(leaf, np.float32)


def widest_dtype(*leaves) -> np.dtype:
    """The float type with the most bits among those of the leaves."""
    dtypes = [np.dtype(jnp.result_type(leaf)) for leaf in leaves]
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)


def dimension(params: PyTree) -> int:
    """The number of float parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(float_part(params)))


def check_like(vector: PyTree, params: PyTree, name: str = "vector") -> None:
    """Checks that a vector has the float leaves of the parameters, path by path.

    Args:
      vector: The vector to check.
      params: The parameters.
      name: The name of the vector in the message.

    Raises:
      ValueError: A leaf is missing, or has another shape.
    """
    have = dict(
        zip(leaf_paths(vector), map(jnp.shape, jax.tree.leaves(vector)), strict=True)
    )
    floats = float_part(params)
    need = dict(
        zip(leaf_paths(floats), map(jnp.shape, jax.tree.leaves(floats)), strict=True)
    )
    if have != need or jax.tree.structure(vector) != jax.tree.structure(floats):
        wrong = [path for path in {**need, **have} if have.get(path) != need.get(path)]
        path = wrong[0] if wrong else "the containers"
        raise ValueError(
            f"The {name} must have the float leaves of the parameters: at {path} it has "
            f"{have.get(path)}, the parameters have {need.get(path)}."
        )


def _wide(leaf: Array) -> Array:
    return leaf.astype(vector_dtype(leaf))


@jax.jit
def leaf_inners(u: PyTree, v: PyTree) -> Float[Array, " leaves"]:
    """The inner product of each pair of leaves, in float32 or wider."""

    def one(a, b):
        dtype = widest_dtype(a, b, np.float32)
        return jnp.sum(a.astype(dtype) * b.astype(dtype))

    parts = jax.tree.leaves(jax.tree.map(one, u, v))
    if not parts:
        return jnp.zeros([0], jnp.float32)
    dtype = widest_dtype(*parts)
    return jnp.stack([part.astype(dtype) for part in parts])


@jax.jit
def inner(u: PyTree, v: PyTree) -> Float[Array, ""]:
    r"""The inner product $\sum_i u_i v_i$ over all leaves, in float32 or wider."""
    return jnp.sum(leaf_inners(u, v))


@jax.jit
def norm(v: PyTree) -> Float[Array, ""]:
    r"""The Euclidean norm $\sqrt{\sum_i v_i^2}$, in float32 or wider."""
    return jnp.sqrt(inner(v, v))


@jax.jit
def scale(a: Scalar, v: PyTree) -> PyTree:
    """The vector $a v$, with the leaf types of $v$."""
    return jax.tree.map(lambda leaf: jnp.asarray(a, leaf.dtype) * leaf, v)


@jax.jit
def axpy(a: Scalar, x: PyTree, y: PyTree) -> PyTree:
    """The vector $a x + y$, with the leaf types of $y$."""
    return jax.tree.map(
        lambda xi, yi: jnp.asarray(a, yi.dtype) * xi.astype(yi.dtype) + yi, x, y
    )


def add(u: PyTree, v: PyTree) -> PyTree:
    """The vector $u + v$."""
    return axpy(1.0, u, v)


def zeros_like(params: PyTree) -> PyTree:
    """The zero vector of the parameters' float leaves, sharded like them."""
    leaves, structure = jax.tree.flatten(float_part(params))
    avals = tuple((leaf.shape, vector_dtype(leaf)) for leaf in leaves)
    return layout.zeros(structure, avals, tuple(map(layout.sharding_of, leaves)))


@jax.jit
def as_vector(tree: PyTree) -> PyTree:
    """The float leaves of a tree, cast to float32 or wider."""
    return jax.tree.map(_wide, float_part(tree))


@jax.jit
def _stack(vectors):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *vectors)


def stack(vectors: collections.abc.Sequence[PyTree]) -> PyTree:
    """Vectors stacked along a new first axis of each leaf."""
    return _stack(list(vectors))


@jax.jit
def _unstack(vectors):
    count = jax.tree.leaves(vectors)[0].shape[0]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], vectors) for i in range(count)]


def unstack(vectors: PyTree) -> list[PyTree]:
    """The vectors of a stacked tree, in order."""
    return _unstack(vectors)


@jax.jit
def _finite_leaves(tree):
    return [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]


def check_finite(vector: PyTree, step: str) -> None:
    """Checks that every entry is finite; waits for the vector to be computed.

    Args:
      vector: The vector to check.
      step: The name of the computation, for the message.

    Raises:
      NonFiniteError: Some leaf holds NaN or Inf; it names the step and the leaves.
    """
    flags = jax.device_get(_finite_leaves(vector))
    paths = leaf_paths(vector)
    bad = tuple(path for path, ok in zip(paths, flags, strict=True) if not ok)
    if bad:
        raise errors.NonFiniteError(step, bad)


def finite_norm(vector: PyTree, step: str) -> float:
    """The norm of a vector that must be finite; see `checked_norm`."""
    return checked_norm(norm(vector), vector, step)


def checked_norm(length: Scalar, vector: PyTree, step: str) -> float:
    """The norm of a vector, as a host number.

    Args:
      length: The norm, already computed.
      vector: The vector.
      step: The name of the computation, for the message.

    Raises:
      NonFiniteError: The vector holds NaN or Inf, or the norm overflows.
    """
    value = float(length)
    if not math.isfinite(value):
        check_finite(vector, step)
        raise errors.NonFiniteError(step, ())
    return value


def epsilon(vector: PyTree) -> float:
    """The largest unit of rounding among a vector's leaves."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(vector))
