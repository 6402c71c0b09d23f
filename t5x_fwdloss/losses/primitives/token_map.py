r"""Maps over tokens: functions that treat all tokens alike and independently.

The derivative of such a map is such a map, and so is its transpose. `token_map` is a
primitive that knows this: under `jvp`, transposition and `vmap` it becomes another
`token_map`, to any order. This leaves the evaluation free. On accelerators the compiler
fuses the whole into a few passes. XLA's CPU compiler instead materializes every operand
of a sum over the vocabulary that holds a comparison or is used twice, each as large as
the logits; there the map runs over blocks of tokens. Under `jax.shard_map` and on
meshes with Explicit axes it is plain JAX.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from t5x_fwdloss.losses.primitives.axis_types import have_axis_types

BLOCK_ELEMENTS = 2**17  # of the widest array in a block: it should stay in the cache


# A map over tokens: `program(residuals, linear) -> results`, lists of `[tokens, ...]`.
# Linear in the second list; the first may hold integers. Hashable, being a parameter of
# the primitive: make it an instance of a frozen dataclass. It must not mix tokens.
Program = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def token_map(
    program: Program, residuals: Sequence[Any], linear: Sequence[Any] = ()
) -> list[jax.Array]:
    """`program(residuals, linear)`, evaluated in blocks where that saves memory."""
    if have_axis_types(*residuals, *linear):
        return list(program(residuals, linear))
    return token_map_p.bind(
        *residuals, *linear, program=program, num_residuals=len(residuals)
    )


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The tangents of a map's results, linear in the tangents that are not zero."""

    program: Program
    num_residuals: int
    moving: tuple[int, ...]  # positions, among all arguments, of those tangents

    def __call__(self, residuals, linear):
        def results(*values):
            args = list(residuals)
            for position, value in zip(self.moving, values, strict=True):
                args[position] = value
            return self.program(args[: self.num_residuals], args[self.num_residuals :])

        at = [residuals[position] for position in self.moving]
        return jax.jvp(results, at, list(linear))[1]


@dataclasses.dataclass(frozen=True)
class _Transpose:
    """The transpose of a map in its linear arguments."""

    program: Program
    linear: tuple[tuple[tuple[int, ...], Any], ...]  # inner shape and dtype of each

    def __call__(self, residuals, linear):
        num_tokens = linear[0].shape[0]
        like = [
            jax.ShapeDtypeStruct((num_tokens, *s), dtype) for s, dtype in self.linear
        ]
        of_linear = lambda *args: self.program(residuals, args)
        return list(jax.linear_transpose(of_linear, *like)(list(linear)))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A map over tokens for many values, `[tokens, many, ...]`, of some arguments."""

    program: Program
    is_mapped: tuple[bool, ...]  # of all arguments

    def __call__(self, residuals, linear):
        def results(*args):
            return self.program(args[: len(residuals)], args[len(residuals) :])

        axes = [1 if mapped else None for mapped in self.is_mapped]
        return jax.vmap(results, axes, 1)(*residuals, *linear)


def _at_once(*args, program, num_residuals):
    return list(program(args[:num_residuals], args[num_residuals:]))


def _by_blocks(*args, program, num_residuals):
    """A loop over blocks of tokens that writes each block's results in place."""
    at_once = functools.partial(_at_once, program=program, num_residuals=num_residuals)
    num_tokens = args[0].shape[0]
    size = block_size(num_tokens, max(arg.size for arg in args))
    if size == num_tokens:
        return at_once(*args)
    # Filled with a number made of all arguments, though every entry is overwritten:
    # zeros depend on nothing, and would be allocated long before the arguments are.
    firsts = [arg[(0,) * arg.ndim].astype(jnp.float32) for arg in args]
    seed = jnp.sum(jnp.stack(firsts))
    shapes = jax.eval_shape(at_once, *args)
    homes = [_home(args, shape) for shape in shapes]
    wholes = [
        jnp.full(shape.shape, seed.astype(shape.dtype)) if home is None else args[home]
        for shape, home in zip(shapes, homes, strict=True)
    ]

    def write_block(index, wholes):
        start = index * size
        current = list(args)
        for home, whole in zip(homes, wholes, strict=True):
            if home is not None:
                current[home] = whole
        take = lambda arg: jax.lax.dynamic_slice_in_dim(arg, start, size)
        results = at_once(*map(take, current))
        put = lambda w, r: jax.lax.dynamic_update_slice_in_dim(w, r, start, 0)
        return list(map(put, wholes, results))

    return jax.lax.fori_loop(0, num_tokens // size, write_block, wholes)


def _home(args, shape):
    """Which argument a result may overwrite, block by block, if any.

    In a second derivative the last wide argument is the tangent of the logits, and this
    map the last to read it. A lone wide argument is the logits, which others still read.
    """
    wide = [i for i, arg in enumerate(args) if arg.ndim > 1]
    if len(wide) < 2:
        return None
    last = args[wide[-1]]
    return wide[-1] if (last.shape, last.dtype) == (shape.shape, shape.dtype) else None


def block_size(num_tokens: int, num_elements: int) -> int:
    """The largest divisor of `num_tokens` whose part of `num_elements` fits a block."""
    sizes = [n for n in range(1, num_tokens + 1) if num_tokens % n == 0]
    fitting = [n for n in sizes if num_elements // num_tokens * n <= BLOCK_ELEMENTS]
    return max(fitting, default=1)


@functools.cache
def _compiled(program: Program, num_residuals: int) -> Callable:
    bind = functools.partial(
        token_map_p.bind, program=program, num_residuals=num_residuals
    )
    return jax.jit(bind)


def _shapes(*avals, program, num_residuals):
    like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    at_once = functools.partial(_at_once, program=program, num_residuals=num_residuals)
    return [ShapedArray(r.shape, r.dtype) for r in jax.eval_shape(at_once, *like)]


def _jvp(primals, tangents, *, program, num_residuals):
    results = token_map(program, primals[:num_residuals], primals[num_residuals:])
    moving = tuple(i for i, tangent in enumerate(tangents) if not _is_zero(tangent))
    if not moving:
        return results, list(map(_zero_tangent, results))
    if moving[0] >= num_residuals:  # a linear map is its own derivative
        along = map(ad.instantiate_zeros, tangents[num_residuals:])
        return results, token_map(program, primals[:num_residuals], list(along))
    derivative = _Derivative(program, num_residuals, moving)
    return results, token_map(derivative, primals, [tangents[i] for i in moving])


def _zero_tangent(result):
    return ad.Zero(jax.typeof(result).to_tangent_aval())


def _is_zero(tangent):
    is_float0 = getattr(tangent, "dtype", None) == jax.dtypes.float0
    return isinstance(tangent, ad.Zero) or is_float0


def _transpose(cotangents, *args, program, num_residuals):
    residuals, linear = args[:num_residuals], args[num_residuals:]
    inner = tuple((a.aval.shape[1:], a.aval.dtype) for a in linear)
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    found = token_map(_Transpose(program, inner), residuals, cotangents)
    return [None] * num_residuals + found


def _batch(args, axes, *, program, num_residuals):
    """Maps the program: the mapped axis follows the tokens, where an argument has it.

    Merged with the tokens it would cut through the batch, and on a mesh the compiler
    would gather all of it; arguments without it would be repeated.
    """
    moved = [
        arg if axis is None else jnp.moveaxis(arg, axis, 1)
        for arg, axis in zip(args, axes, strict=True)
    ]
    mapped = _Mapped(program, tuple(axis is not None for axis in axes))
    results = token_map_p.bind(*moved, program=mapped, num_residuals=num_residuals)
    return results, [1] * len(results)


def _lower_for_cpu(ctx, *args, **params):
    # Blocks cut through the batch: on a mesh that would move tokens between devices.
    on_mesh = getattr(ctx.module_context.axis_context, "num_devices", 1) != 1
    evaluate = _at_once if on_mesh else _by_blocks
    return mlir.lower_fun(evaluate, multiple_results=True)(ctx, *args, **params)


token_map_p = Primitive("token_map")
token_map_p.multiple_results = True
token_map_p.def_impl(
    lambda *args, program, num_residuals: _compiled(program, num_residuals)(*args)
)
token_map_p.def_abstract_eval(_shapes)
mlir.register_lowering(token_map_p, mlir.lower_fun(_at_once, multiple_results=True))
mlir.register_lowering(token_map_p, _lower_for_cpu, platform="cpu")
ad.primitive_jvps[token_map_p] = _jvp
ad.primitive_transposes[token_map_p] = _transpose
batching.primitive_batchers[token_map_p] = _batch
