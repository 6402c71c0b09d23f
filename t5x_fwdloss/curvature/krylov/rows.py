"""Compiled operations on vectors and a few basis vectors at once; `basis` calls them.

`rows` is a tuple of basis vectors, each in its own memory: one compiled function reads
them all, and writes into the memory of a vector that is no longer needed. (One stacked
array would need a copy, and on CPUs its inner products took twice as long.) A sharded
leaf is summed on its own devices and only numbers are exchanged. Every function takes
the shardings that its results must keep.
"""

import functools

import jax
import jax.numpy as jnp

from t5x_fwdloss.curvature.vectors import layout as shardings_lib
from t5x_fwdloss.curvature.vectors import trees


@functools.partial(jax.jit, static_argnames="shardings")
def measure(rows, w, *, shardings):
    """The inner products of a vector with the rows, `[len(rows)]`."""
    inners = jnp.stack([trees.inner(row, w) for row in rows])
    return shardings_lib.replicate(inners, shardings)


@functools.partial(jax.jit, static_argnames="shardings", donate_argnames="w")
def subtract(w, rows, c, *, shardings):
    """The vector minus the rows times their coefficients; reuses its memory."""

    def one(leaf, *others):
        for number, other in enumerate(others):
            leaf = leaf - c[number].astype(leaf.dtype) * other
        return leaf

    return shardings_lib.constrain(jax.tree.map(one, w, *rows), shardings)


@functools.partial(jax.jit, static_argnames="shardings", donate_argnames="w")
def local_step(w, v, previous, coefficient, *, shardings):
    """The three-term recurrence `w - c previous - <v, w> v`, `<v, w>` and the new norm.

    Reuses the memory of `w`.
    """
    alpha = trees.inner(v, w)

    def one(w, v, previous):
        c, a = jnp.asarray(coefficient, w.dtype), alpha.astype(w.dtype)
        return w - c * previous - a * v

    w = shardings_lib.constrain(jax.tree.map(one, w, v, previous), shardings)
    return w, alpha, trees.norm(w)


def _scaled(factor, w, *, shardings):
    return shardings_lib.constrain(trees.scale(factor, w), shardings)


# The vector times a number, in new memory, and in its own.
scaled = jax.jit(_scaled, static_argnames="shardings")
scale_in_place = jax.jit(_scaled, static_argnames="shardings", donate_argnames="w")


@functools.partial(jax.jit, static_argnames="shardings")
def cast(w, like, *, shardings):
    """The vector with the leaf types of another, in the shardings given."""
    w = jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), w, like)
    return shardings_lib.constrain(w, shardings)
