"""Linearized products of networks whose equations hold functions: the plain products.

Each network meets the equation twice, with an argument that depends on the parameters
and with a constant.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.products import folding, linearized

pytestmark = pytest.mark.usefixtures("x64")


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x) ** 2


@with_jvp.defjvp
def _(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return with_jvp(x), jnp.sin(2 * x) * x_dot


@jax.custom_vjp
def with_vjp(x):
    return jnp.cos(x)


with_vjp.defvjp(lambda x: (jnp.cos(x), x), lambda x, bar: (-jnp.sin(x) * bar,))


def scanned(x):
    return jax.lax.scan(lambda c, row: (jnp.tanh(c + row), c * row), x[0], x)[1]


def sharded(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda x: jnp.sin(x) * jax.lax.psum(x, "data")
    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
    return jax.shard_map(local, mesh=mesh, **specs)(x)


def branching(x):
    # No derivative passes through the predicate.
    positive = jax.lax.stop_gradient(jnp.sum(x)) > 0
    return jax.lax.cond(positive, jnp.sin, lambda x: x**2, x)


def looping(x):
    """A while loop, which has a forward mode alone, on a constant."""
    double = lambda pair: (pair[0] + 1, pair[1] * 1.5)
    fixed = jax.lax.stop_gradient(x)
    return jnp.sin(x) * jax.lax.while_loop(lambda p: p[0] < 3, double, (0, fixed))[1]


FUNCTIONS = {
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "relu": jax.nn.relu,
    "scan": scanned,
    "remat": jax.checkpoint(lambda x: jnp.sin(with_jvp(x))),
    "remat of scan": jax.checkpoint(scanned),
    "cond": branching,
    "while": looping,
    "jit": jax.jit(lambda x: jax.jit(with_jvp)(x) * x),
    "shard_map": sharded,
}
WITHOUT_FORWARD_MODE = ("custom_vjp",)


def parameters():
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(3, 3))), "b": jnp.asarray([0.1, -0.2, 1])}


def data():
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, 3)))


def network(name):
    function = FUNCTIONS[name]

    def outputs(params, x):
        hidden = function(x @ params["w"]) + params["b"][None]
        return hidden * function(x)

    return outputs


def maps(name):
    outputs = network(name)
    loss = lambda params, x: jnp.sum(jnp.sin(outputs(params, x)))
    found = {"hessian": curvature.hessian_map(loss)}
    if name not in WITHOUT_FORWARD_MODE:
        found["gauss_newton"] = curvature.gauss_newton_map(
            outputs, lambda z, u, _: jnp.cos(z) * u
        )
    return found


def assert_trees_agree(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_single_and_stacked_products_are_the_plain_ones(name):
    params = parameters()
    vs = curvature.random_stack(0, [0, 1], params)
    for linear_map in maps(name).values():
        product = curvature.AmortizedProduct(linear_map, params, [(data(),)])
        plain = jax.jit(linear_map.direct)
        expected = [plain(params, v, data()) for v in curvature.unstack(vs)]
        found = curvature.unstack(product.stacked(vs))
        for v, many, one in zip(curvature.unstack(vs), found, expected, strict=True):
            assert_trees_agree(product(v), one)
            assert_trees_agree(many, one)
        assert product.folding == linearized.FOLDED


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_equation_on_a_constant_is_evaluated(name):
    x = data()
    linear = lambda v: v * FUNCTIONS[name](x) + jnp.sum(v) * FUNCTIONS[name](2 * x)
    program = jax.jit(lambda: folding.fold((linear, x)))()
    assert_trees_agree(program(x), linear(x))


def test_equations_that_differ_in_their_closed_constants_alone_are_told_apart():
    x = data()
    first, second = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    body = lambda c: jax.lax.cond(jnp.sum(x) > -1e9, lambda: x * c, lambda: x)
    linear = lambda v: v * body(first) + 3.0 * v * body(second)
    program = jax.jit(lambda: folding.fold((linear, x)))()
    assert_trees_agree(program(x), linear(x))


def break_at_linearization(monkeypatch):
    def fold(*functions):
        raise KeyError("subfuns")

    monkeypatch.setattr(folding, "fold", fold)


def break_in_the_product(monkeypatch):
    def call(self, tree, number=0):
        raise KeyError("subfuns")

    monkeypatch.setattr(folding.Folded, "__call__", call)


def break_in_stacked_products(monkeypatch):
    call = folding.Folded.__call__

    def broken(self, tree, number=0):
        if type(jax.tree.leaves(tree)[0]).__name__ == "BatchTracer":
            raise KeyError("subfuns")
        return call(self, tree, number)

    monkeypatch.setattr(folding.Folded, "__call__", broken)


BREAKS = [break_at_linearization, break_in_the_product, break_in_stacked_products]


@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("break_folding", BREAKS)
def test_where_folding_fails_products_are_those_of_jax_and_it_is_said_once(
    break_folding, matrix, monkeypatch, caplog
):
    break_folding(monkeypatch)
    params, linear_map = parameters(), maps("relu")[matrix]
    vs = curvature.random_stack(0, [0, 1], params)
    with caplog.at_level(logging.WARNING):
        batches = [(data(),), (2 * data(),)]
        product = curvature.AmortizedProduct(linear_map, params, batches)
        found = [product(v) for v in curvature.unstack(vs)]
        together = curvature.unstack(product.stacked(vs))
    for v, one, many in zip(curvature.unstack(vs), found, together, strict=True):
        parts = [linear_map.direct(params, v, *args) for args in batches]
        expected = jax.tree.map(jnp.add, *parts)
        assert_trees_agree(one, expected)
        assert_trees_agree(many, expected)
    assert product.num_linearized == 2
    assert product.folding == "not folded: KeyError: 'subfuns'"
    assert [r.getMessage() for r in caplog.records] == [
        "Linear functions are not folded: KeyError: 'subfuns'"
    ]


def test_an_error_of_the_loss_itself_is_raised_and_not_blamed_on_folding(caplog):
    def loss(params, x):
        raise ValueError("a loss of its own")

    linear_map = curvature.hessian_map(loss)
    with pytest.raises(ValueError, match="a loss of its own"):
        curvature.AmortizedProduct(linear_map, parameters(), [(data(),)])
    product = curvature.AmortizedProduct(
        maps("relu")["hessian"], parameters(), [(data(),)]
    )
    with pytest.raises(ValueError, match="at w it has"):
        product({"w": jnp.ones((2, 2)), "b": jnp.ones(3)})
    assert product.folding == linearized.FOLDED
    assert not caplog.records


def test_folding_can_be_switched_off(monkeypatch):
    break_at_linearization(monkeypatch)
    params, linear_map = parameters(), maps("relu")["gauss_newton"]
    v = curvature.random_like(0, params)
    product = curvature.AmortizedProduct(linear_map, params, [(data(),)], fold=False)
    assert_trees_agree(product(v), linear_map.direct(params, v, data()))
    assert product.folding == "not folded: switched off"
