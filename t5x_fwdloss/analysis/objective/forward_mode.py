"""What the jaxpr of a loss's directional derivative says: forward mode, and types.

JAX traces a jvp through a `jax.custom_vjp` function and fails only when the result is
used: the trace then contains the primitive `custom_lin`.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

# Relative errors by the narrowest type that the network multiplies matrices in: the
# rounding of a dozen layers, with a margin.
TOLERANCES = {
    "float64": 1e-8,
    "float32": 5e-4,
    "float16": 2e-2,
    "bfloat16": 1e-1,
}


def is_blocked(pushed: Any) -> bool:
    """Whether a `jax.custom_vjp` function lies on the path of the tangent.

    Args:
        pushed: the jaxpr of the loss and its directional derivative.
    """
    return any(eqn.primitive.name == "custom_lin" for eqn in equations(pushed.jaxpr))


def custom_vjp_functions(loss: Any) -> list[str]:
    """The names of the `jax.custom_vjp` functions in the jaxpr of a loss.

    Empty if JAX does not give them.
    """
    names = [
        eqn.params["call_jaxpr"].jaxpr.debug_info.func_name
        for eqn in equations(loss.jaxpr)
        if eqn.primitive.name == "custom_vjp_call"
    ]
    return list(dict.fromkeys(names))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of the jaxprs in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def narrowest_product(pushed: Any) -> str:
    """The narrowest floating-point type of an operand of the loss's matrix products.

    The type of the loss itself, if it multiplies no matrices.

    Args:
        pushed: the jaxpr of the loss and its directional derivative.
    """
    operands = [
        operand
        for eqn in equations(pushed.jaxpr)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
        for operand in eqn.invars
    ]
    types = [str(x.aval.dtype) for x in operands or pushed.jaxpr.outvars]
    floats = [t for t in types if jnp.issubdtype(t, jnp.floating)]
    return max(floats, key=lambda t: float(jnp.finfo(t).eps))
