"""Joined products against `jax.jvp` itself, in all programs that may hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from t5x_fwdloss import curvature, losses
from t5x_fwdloss.analysis.objective.forward_mode import equations
from t5x_fwdloss.curvature.products.joined_products import joined

WIDE, NARROW = (32, 4, 60), (16, 12, 16)


def linear(x, w):
    return jnp.sum(jnp.tanh(jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())))) ** 2)


def transposed(x, w):
    # The contracted axes in other places, and two of them.
    x = x.reshape(x.shape[0], 2, -1).transpose(1, 0, 2)
    w = w.T.reshape(w.shape[1], 2, -1)
    return jnp.sum(jax.lax.dot_general(x, w, (((0, 2), (1, 2)), ((), ()))) ** 3)


def scanned(x, w):
    body = lambda carry, _: (carry + linear(x + carry, w), None)
    return jax.lax.scan(body, jnp.zeros((), x.dtype), None, length=3)[0]


FUNCTIONS = {
    "plain": linear,
    "transposed": transposed,
    "jit": jax.jit(linear),
    "remat": jax.checkpoint(linear),
    "scan": scanned,
}


def operands(shape, dtype=np.float64, seed=0):
    rows, inner, columns = shape
    rng = np.random.default_rng(seed)
    draw = lambda *size: jnp.asarray(rng.normal(size=size).astype(dtype))
    return draw(rows, inner), draw(inner, columns)


def pushed(function):
    return lambda x, v: jax.jvp(function, x, v)


def num_products(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("shape", [WIDE, NARROW], ids=["wide", "narrow"])
def test_value_and_tangent_are_those_of_jvp(function, shape):
    x, v = operands(shape), operands(shape, seed=1)
    expected = jax.jit(pushed(function))(x, v)
    got = jax.jit(joined(pushed(function)))(x, v)
    np.testing.assert_allclose(got, expected, rtol=1e-13)
    before, after = (
        num_products(f, x, v) for f in (pushed(function), joined(pushed(function)))
    )
    assert (before, after) == ((3, 2) if shape == WIDE else (3, 3))


def matmul(x, w):
    # `x @ w` is a program of its own, whose result is not that of a `dot_general`.
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())))


def test_a_product_that_is_read_elsewhere_stays():
    x, v = operands(WIDE, np.float32), operands(WIDE, np.float32, seed=1)
    (a, w), (b, u) = x, v
    makers = jax.make_jaxpr(pushed(matmul))(x, v)
    (add,) = [eqn for eqn in makers.jaxpr.eqns if eqn.primitive.name == "add_any"]
    shown = makers.replace(
        jaxpr=makers.jaxpr.replace(outvars=[*add.outvars, add.invars[0]])
    )
    both = core.jaxpr_as_fun(shown)
    tangent, part = joined(both)(a, w, b, u)
    np.testing.assert_allclose(tangent, b @ w + a @ u, rtol=1e-5, atol=1e-5)
    assert min(np.abs(part - b @ w).max(), np.abs(part - a @ u).max()) < 1e-5


@pytest.mark.parametrize(("first", "second", "found"), [(2, 2, 3), (2, 3, 4)])
def test_only_products_of_the_same_shape_are_joined(first, second, found):
    x = operands((40, 40, first), np.float32)[0]
    w, u = (operands((40, 40, n), np.float32, seed=n)[1] for n in (first, second))

    def gradient(x, w, u):
        return jax.grad(
            lambda x: jnp.sum(matmul(x, w) ** 2 + matmul(x, u)[:, :1] ** 2)
        )(x)

    assert num_products(joined(gradient), x, w, u) == found
    np.testing.assert_allclose(
        joined(gradient)(x, w, u), gradient(x, w, u), rtol=1e-4, atol=1e-4
    )


@pytest.mark.usefixtures("x64")
def test_a_derivative_of_the_derivative_goes_through():
    x, v = operands(WIDE), operands(WIDE, seed=1)
    loss = lambda params: linear(*params)
    slope = lambda params: curvature.directional_derivative(loss)(params, v)[1]
    expected = curvature.hessian_product(loss)(x, v)
    for got in (jax.grad(slope)(x), jax.jit(jax.grad(slope))(x)):
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_a_custom_rule_inside_stays_the_rule():
    @jax.custom_jvp
    def head(x, w):
        return x @ w

    head.defjvp(lambda args, _: (head(*args), 2.0 * head(*args)))
    x, v = operands(WIDE, np.float32), operands(WIDE, np.float32, seed=1)
    slope = lambda x: joined(pushed(head))(x, v)[1]
    (_, second), expected = jax.jvp(slope, (x,), (v,)), 4.0 * head(*x)
    np.testing.assert_allclose(second, expected, rtol=1e-5)


def test_the_tangent_of_wide_logits_takes_less_memory():
    shape = (512, 32, 4096)
    x, v = operands(shape, np.float32), operands(shape, np.float32, seed=1)
    labels = jnp.zeros([512], jnp.int32)

    def loss(x, w):
        return jnp.sum(losses.token_cross_entropy(x @ w, labels)[0])

    def arrays_of_logits(function):
        compiled = jax.jit(function).lower(x, v).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (512 * 4096 * 4)

    before, after = map(arrays_of_logits, (pushed(loss), joined(pushed(loss))))
    operands_side_by_side = 2 * (512 * 32 + 32 * 4096) / (512 * 4096)
    assert after <= before - 1 + operands_side_by_side + 0.06
