r"""Products of derivative matrices with a vector, exact and never formed.

Notation: loss $f(\theta)$, gradient $g$, Hessian $H$, outputs (logits) $z(\theta)$ with
Jacobian $J$, Hessian $H_L$ of the loss in the outputs. Each constructor returns a pure
function `(params, v, *args)`, to be jitted by the caller; `args` is passed on to the
loss, usually one batch. Nothing is normalized here: the products are those of the
function given, so a sum over tokens stays a sum.

Parameters without a float type are constants; in a vector they are `None`. Tangents are
cast to the type of their parameter, results to float32 or wider.

References:
  Pearlmutter 1994, Fast exact multiplication by the Hessian, section 4.
  Schraudolph 2002, Fast curvature matrix-vector products, section 3.
"""

import collections.abc
import typing

import jax
from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import trees

MODES = ("forward_over_reverse", "reverse_over_forward", "reverse_over_reverse")
Function = collections.abc.Callable[..., typing.Any]


def of_floats(function: Function, params: PyTree, args: tuple) -> Function:
    """The function of the float leaves alone; the other leaves are constants."""
    return lambda floats: function(trees.merge(floats, params), *args)


def tangent(v: PyTree, params: PyTree) -> PyTree:
    """The vector in the types of the parameters, after a check of its shapes."""
    trees.check_like(v, params)
    return jax.tree.map(
        lambda leaf, param: leaf.astype(param.dtype), v, trees.float_part(params)
    )


def directional_derivative(loss: Function) -> Function:
    r"""The function `(params, v, *args) -> (f, <g, v>)`, by one forward pass.

    The loss itself needs forward mode, so a loss with a `jax.custom_vjp` rule (T5X's
    own) cannot be used here.

    Args:
      loss: `(params, *args) -> scalar`.

    Returns:
      The function; both results are scalars.
    """

    def product(params, v, *args):
        function = of_floats(loss, params, args)
        floats = trees.float_part(params)
        return jax.jvp(function, (floats,), (tangent(v, params),))

    return product


def second_directional_derivative(loss: Function) -> Function:
    r"""The function `(params, v, *args) -> (f, <g, v>, <v, H v>)`, without a reverse pass.

    One jvp through a jvp of the loss, which needs forward mode.

    Args:
      loss: `(params, *args) -> scalar`.

    Returns:
      The function; all three results are scalars.
    """

    def product(params, v, *args):
        function = of_floats(loss, params, args)
        floats, direction = trees.float_part(params), tangent(v, params)
        once = lambda at: jax.jvp(function, (at,), (direction,))
        (value, slope), (_, curvature) = jax.jvp(once, (floats,), (direction,))
        return value, slope, curvature

    return product


def mixed_directional_derivative(loss: Function) -> Function:
    r"""The function `(params, u, v, *args) -> (<g, u>, <u, H v>)`, by forward mode.

    Args:
      loss: `(params, *args) -> scalar`; it needs forward mode.

    Returns:
      The function; both results are scalars.
    """

    def product(params, u, v, *args):
        function = of_floats(loss, params, args)
        slope = lambda at: jax.jvp(function, (at,), (tangent(u, params),))[1]
        return jax.jvp(slope, (trees.float_part(params),), (tangent(v, params),))

    return product


def gradient(loss: Function) -> Function:
    """The function `(params, *args) -> g`, a vector in float32 or wider.

    Args:
      loss: `(params, *args) -> scalar`.

    Returns:
      The function.
    """

    def product(params, *args):
        function = of_floats(loss, params, args)
        return trees.as_vector(jax.grad(function)(trees.float_part(params)))

    return product


def hessian_product(loss: Function, mode: str = "forward_over_reverse") -> Function:
    r"""The function `(params, v, *args) -> H v`.

    Args:
      loss: `(params, *args) -> scalar`.
      mode: The order of the two derivatives. `"forward_over_reverse"`, the derivative
        of $g(\theta + t v)$ in $t$, takes the least time and memory and works for
        losses with a custom VJP rule; `"reverse_over_forward"`, the gradient of
        $\langle g, v \rangle$ by a forward pass, needs a loss with a forward mode;
        `"reverse_over_reverse"` is the gradient of $\langle g, v \rangle$ by two
        backward passes. All three give the same numbers up to rounding.

    Returns:
      The function.

    Raises:
      ValueError: The mode is unknown.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}: got {mode!r}.")

    def product(params, v, *args):
        function = of_floats(loss, params, args)
        floats = trees.float_part(params)
        direction = tangent(v, params)
        if mode == "forward_over_reverse":
            _, result = jax.jvp(jax.grad(function), (floats,), (direction,))
        elif mode == "reverse_over_forward":
            slope = lambda at: jax.jvp(function, (at,), (direction,))[1]
            result = jax.grad(slope)(floats)
        else:
            slope = lambda at: trees.inner(jax.grad(function)(at), direction)
            result = jax.grad(slope)(floats)
        return trees.as_vector(result)

    return product


def gauss_newton_product(outputs: Function, output_hessian: Function) -> Function:
    r"""The function `(params, v, *args) -> J^T H_L J v`.

    The outputs are linearized once; the transpose of that linear map is the backward
    pass, so the forward pass is not repeated.

    Args:
      outputs: `(params, *args) -> z`, any pytree of float arrays.
      output_hessian: `(z, u, *args) -> H_L u`, symmetric, in the shapes of $z$,
        including weights and normalizer, if any.

    Returns:
      The function.
    """

    def product(params, v, *args):
        function = of_floats(outputs, params, args)
        floats = trees.float_part(params)
        z, jacobian = jax.linearize(function, floats)
        return sandwich(z, jacobian, output_hessian, params, v, args)

    return product


def sandwich(
    z: PyTree,
    jacobian: Function,
    output_hessian: Function,
    params: PyTree,
    v: PyTree,
    args: tuple,
    transpose: Function | None = None,
) -> PyTree:
    """The vector `J^T H_L J v`, from outputs already linearized.

    Args:
      z: The outputs.
      jacobian: The linear map `v -> J v` of `jax.linearize`.
      output_hessian: As in `gauss_newton_product`.
      params: The parameters.
      v: The vector.
      args: Further arguments of `output_hessian`.
      transpose: The map `u -> J^T u`; None: derived from `jacobian`.

    Returns:
      The product.
    """
    z_dot = jacobian(tangent(v, params))
    z_bar = output_hessian(z, z_dot, *args)
    z_bar = jax.tree.map(lambda bar, dot: bar.astype(dot.dtype), z_bar, z_dot)
    if transpose is None:
        (result,) = jax.linear_transpose(jacobian, trees.float_part(params))(z_bar)
    else:
        result = transpose(z_bar)
    return trees.as_vector(result)
