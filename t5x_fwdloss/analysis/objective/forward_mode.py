"""Whether a loss has forward mode, determined without compiling.

JAX traces a jvp through a `jax.custom_vjp` function and fails only when the result is
used: the trace then contains the primitive `custom_lin`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from t5x_fwdloss.curvature.products.derivatives import directional_derivative

# Relative errors by the narrowest type that the network multiplies matrices in: the
# rounding of a dozen layers, with a margin.
TOLERANCES = {
    "float64": 1e-8,
    "float32": 5e-4,
    "float16": 2e-2,
    "bfloat16": 1e-1,
}


def blocking_functions(
    loss: Callable[..., Any], params: Any, direction: Any, *args: Any
) -> list[str] | None:
    """The `jax.custom_vjp` functions on the path of a tangent of the loss.

    Args:
        loss: `(params, *args)` to a scalar.
        params: parameters.
        direction: a vector like them.
        *args: the loss's other arguments.

    Returns:
        None if the loss has forward mode; otherwise the names of the `custom_vjp`
        functions in it (empty if JAX does not give them).
    """
    product = directional_derivative(loss)
    pushed = jax.make_jaxpr(product)(params, direction, *args)
    if all(eqn.primitive.name != "custom_lin" for eqn in equations(pushed.jaxpr)):
        return None
    plain = jax.make_jaxpr(loss)(params, *args)
    names = [
        eqn.params["call_jaxpr"].jaxpr.debug_info.func_name
        for eqn in equations(plain.jaxpr)
        if eqn.primitive.name == "custom_vjp_call"
    ]
    return list(dict.fromkeys(names))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of the jaxprs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def narrowest_product(loss: Callable[..., Any], params: Any, *args: Any) -> str:
    """The narrowest floating-point type of an operand of the loss's matrix products.

    The type of the loss itself, if it multiplies no matrices.
    """
    traced = jax.make_jaxpr(loss)(params, *args)
    operands = [
        operand
        for eqn in equations(traced.jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
        for operand in eqn.invars
    ]
    types = [str(x.aval.dtype) for x in operands or traced.jaxpr.outvars]
    floats = [t for t in types if jnp.issubdtype(t, jnp.floating)]
    return max(floats, key=lambda t: float(jnp.finfo(t).eps))
