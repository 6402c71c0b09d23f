"""Compiled operations on one block of stacked vectors; `basis` drives them.

A block is a tree whose leaves are `[rows, ...]`. A sharded leaf is summed where it lies and
only `[rows]` numbers are exchanged. Sums over a leaf are `jnp.sum`, which the compiler
splits: a matrix product adds up eight million float32 numbers one after the other, and was
seen to be wrong by 4e-4. Every function takes the shardings that its results must keep.
"""

import functools

import jax
import jax.numpy as jnp

from t5x_fwdloss.curvature import shardings as shardings_lib
from t5x_fwdloss.curvature import trees

HIGHEST = jax.lax.Precision.HIGHEST


def coefficients(block, w):
    """The inner products of a vector with the rows, `[rows]`; traced."""

    def one(rows, leaf):
        return jnp.sum(rows * leaf[None], axis=tuple(range(1, rows.ndim)))

    parts = jax.tree.leaves(jax.tree.map(one, block, w))
    dtype = trees.widest_dtype(*parts)
    return functools.reduce(jnp.add, [part.astype(dtype) for part in parts])


@functools.partial(jax.jit, static_argnames="shardings")
def measure(block, w, *, shardings):
    """The same, to be read on the host."""
    return shardings_lib.replicate(coefficients(block, w), shardings)


@functools.partial(jax.jit, static_argnames="shardings", donate_argnames="w")
def subtract(w, block, c, *, shardings):
    """The vector minus the rows times their coefficients; reuses its memory."""
    w = jax.tree.map(jnp.subtract, w, trees.combine(block, c))
    return shardings_lib.constrain(w, shardings)


def _local_step(w, v, previous, coefficient, overlap, *, shardings):
    # <v, previous> is rounding, but it would enter alpha multiplied by c.
    alpha = trees.inner(v, w) - coefficient * overlap

    def one(w, v, previous):
        c, a = jnp.asarray(coefficient, w.dtype), alpha.astype(w.dtype)
        return w.astype(v.dtype) - c * previous - a * v

    w = shardings_lib.constrain(jax.tree.map(one, w, v, previous), shardings)
    return w, alpha, trees.norm(w)


# The three-term recurrence: w - c v_previous - <v, w> v, with <v, w> and the new norm;
# `last_local_step` reuses the memory of v_previous.
local_step = jax.jit(_local_step, static_argnames="shardings")
last_local_step = jax.jit(
    _local_step, static_argnames="shardings", donate_argnames="previous"
)


def _write_row(block, index, w, factor, *, shardings, stacked):
    v = shardings_lib.constrain(trees.scale(factor, w), shardings)
    block = jax.tree.map(
        lambda rows, leaf: jax.lax.dynamic_update_index_in_dim(rows, leaf, index, 0),
        block,
        v,
    )
    return shardings_lib.constrain(block, stacked), v


# The block with a row set to `factor * w`, and that row; reuses the block, and with
# `write_own_row` the vector, too.
_STATIC = ("shardings", "stacked")
write_row = jax.jit(_write_row, static_argnames=_STATIC, donate_argnames="block")
write_own_row = jax.jit(
    _write_row, static_argnames=_STATIC, donate_argnames=("block", "w")
)


@functools.partial(jax.jit, static_argnames="shardings")
def read_row(block, index, *, shardings):
    """One row as a vector."""
    v = jax.tree.map(
        lambda rows: jax.lax.dynamic_index_in_dim(rows, index, 0, keepdims=False),
        block,
    )
    return shardings_lib.constrain(v, shardings)


@functools.partial(jax.jit, static_argnames="shardings", donate_argnames="total")
def add_rotated(total, rotation, block, *, shardings):
    """Stacked vectors plus `rotation` `[n, rows]` times the block."""
    total = jax.tree.map(
        lambda out, rows: (
            out
            + jnp.einsum(
                "nk,k...->n...", rotation.astype(rows.dtype), rows, precision=HIGHEST
            )
        ),
        total,
        block,
    )
    return shardings_lib.constrain(total, shardings)


@functools.partial(jax.jit, static_argnames="shardings")
def gram(left, right, *, shardings):
    """The inner products of all rows of two blocks."""
    total = jax.vmap(lambda v: coefficients(right, v))(left)
    return shardings_lib.replicate(total, shardings)
