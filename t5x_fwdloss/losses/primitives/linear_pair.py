r"""A linear map and its transpose, given as two functions, differentiable to any order.

JAX transposes a linear map operation by operation. For a loop over chunks the result is
not what one would write: it adds whole head-sized arrays where a slice would do.
`LinearPair` takes both functions, $T_r$ and $T_r^T$, and tells JAX that the one is the
transpose of the other:

$$ \mathrm{jvp}:\quad \mathrm d\,(T_r x) = T_r\,\mathrm dx + (\partial_r T_r\, \mathrm dr)\, x $$

with the second term derived by JAX from the function itself, so that derivatives of any
order exist. `jax.custom_derivatives.linear_call` does the first half of this, but has
no derivative in $r$; `jax.custom_vjp` has no forward mode. Under `jax.shard_map` and on
meshes with Explicit axes it is $T_r$ alone, differentiated and transposed by JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from t5x_fwdloss.losses.primitives.axis_types import have_axis_types

Program = Callable[..., Sequence[jax.Array]]


class LinearPair:
    """Two transposed functions `(residuals, linear, **settings) -> results`.

    Each takes two lists of arrays and returns a list: `forward` maps `linear` to
    results, `transpose` maps cotangents of these results to cotangents of `linear`, both
    at the same residuals (whose integer arrays are left out of derivatives). Settings
    are hashable.
    """

    def __init__(self, name: str, forward: Program, transpose: Program):
        """Registers both functions with JAX.

        Args:
            name: the name of the primitives in a jaxpr.
            forward: the linear map.
            transpose: its transpose; tests must show that it is.
        """
        self._program = forward
        self._forward = core.Primitive(name)
        self._transpose = core.Primitive(f"{name}_transpose")
        _register(self._forward, self._transpose, forward)
        _register(self._transpose, self._forward, transpose)

    def __call__(
        self, residuals: Sequence[Any], linear: Sequence[Any], **settings: Any
    ) -> list[jax.Array]:
        """The linear map at these residuals."""
        if have_axis_types(*residuals, *linear):
            return list(self._program(residuals, linear, **settings))
        return self._forward.bind(
            *residuals, *linear, num_residuals=len(residuals), **settings
        )


def _register(primitive, transposed, program):
    """Evaluation, shapes, lowering, derivative, transpose and batching of one half."""
    primitive.multiple_results = True

    def evaluate(*args, num_residuals, **settings):
        return list(program(args[:num_residuals], args[num_residuals:], **settings))

    @functools.cache
    def compiled(**params):
        return jax.jit(functools.partial(evaluate, **params))

    def shapes(*avals, **params):
        like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        results = jax.eval_shape(lambda *args: evaluate(*args, **params), *like)
        return [ShapedArray(r.shape, r.dtype) for r in results]

    def derivative(primals, tangents, *, num_residuals, **settings):
        params = {"num_residuals": num_residuals, **settings}
        results = primitive.bind(*primals, **params)
        moving = [i for i, t in enumerate(tangents) if not _is_zero(t)]
        if not moving:
            return results, [ad.Zero(ShapedArray(r.shape, r.dtype)) for r in results]
        if moving[0] >= num_residuals:
            along = map(ad.instantiate_zeros, tangents[num_residuals:])
            return results, primitive.bind(*primals[:num_residuals], *along, **params)

        # Both terms in one pass of the function, not one pass for each.
        def of_moving(*values):
            replaced = dict(zip(moving, values, strict=True))
            args = [replaced.get(i, primal) for i, primal in enumerate(primals)]
            return evaluate(*args, **params)

        at, along = [primals[i] for i in moving], [tangents[i] for i in moving]
        return results, jax.jvp(of_moving, at, along)[1]

    def transpose(cotangents, *args, num_residuals, **settings):
        residuals, linear = args[:num_residuals], args[num_residuals:]
        found = transposed.bind(
            *residuals,
            *map(ad.instantiate_zeros, cotangents),
            num_residuals=num_residuals,
            **settings,
        )
        wanted = map(ad.is_undefined_primal, linear)
        return [None] * num_residuals + [
            c if w else None for c, w in zip(found, wanted, strict=True)
        ]

    def batch(args, axes, **params):
        mapped = jax.vmap(lambda *a: evaluate(*a, **params), in_axes=axes)
        results = mapped(*args)
        return results, [0] * len(results)

    primitive.def_impl(lambda *args, **params: compiled(**params)(*args))
    primitive.def_abstract_eval(shapes)
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=True))
    ad.primitive_jvps[primitive] = derivative
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch


def _is_zero(tangent) -> bool:
    return isinstance(tangent, ad.Zero) or (
        getattr(tangent, "dtype", None) == jax.dtypes.float0
    )
