"""Amortized products: the same numbers, and which way they were taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.products import linearized, uniform

from . import problems

regression = problems.SoftmaxRegression()


def loss(params, scale):
    return scale * regression.loss(params) ** 2


def outputs(params, scale):
    del scale
    return regression.outputs(params)


def output_hessian(z, u, scale):
    return scale * regression.output_hessian(z, u)


def scales():
    return [(jnp.asarray(scale, jnp.zeros(()).dtype),) for scale in (1.0, 2.0, 0.5)]


MAPS = {
    "hessian": lambda: curvature.hessian_map(loss),
    "gauss_newton": lambda: curvature.gauss_newton_map(outputs, output_hessian),
}


def expected(name, params):
    gradient = regression.gradient()
    if name == "gauss_newton":
        return 3.5 * regression.hessian()
    value = float(regression.loss(params))
    return 3.5 * 2 * (value * regression.hessian() + np.outer(gradient, gradient))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("budget", [None, 0, "one"])
def test_linearized_or_not_the_numbers_are_the_same(name, budget):
    params = regression.params()
    linear_map = MAPS[name]()
    if budget == "one":
        every = curvature.AmortizedProduct(linear_map, params, scales())
        budget = int(1.5 * every.batches[0].residual_bytes)
        number = 1
    else:
        number = 0 if budget == 0 else 3
    product = curvature.AmortizedProduct(
        linear_map, params, scales(), memory_budget=budget
    )
    assert product.num_linearized == number
    assert [record.linearized for record in product.batches] == [True] * number + [
        False
    ] * (3 - number)
    got = problems.dense(product, params)
    np.testing.assert_allclose(got, expected(name, params), rtol=1e-10)
    vs = curvature.random_stack(0, [0, 1], params)
    for many, v in zip(
        curvature.unstack(product.stacked(vs)), curvature.unstack(vs), strict=True
    ):
        np.testing.assert_allclose(
            problems.flatten(many), problems.flatten(product(v)), rtol=1e-9, atol=1e-12
        )


def test_the_record_says_what_was_done_and_why():
    params = regression.params()
    product = curvature.AmortizedProduct(
        MAPS["hessian"](), params, scales(), memory_budget=10
    )
    record = product.batches[0]
    assert not record.linearized
    assert record.residual_bytes > 10
    assert f"{record.residual_bytes} bytes, 0 already held, budget 10" in record.reason
    none = curvature.AmortizedProduct(
        MAPS["hessian"](), params, scales(), memory_budget=0
    )
    assert none.batches[0].reason == "no memory budget"


def test_one_hundred_products_trace_once_and_hold_no_memory():
    params = regression.params()
    traces = []

    def counted(params, scale):
        traces.append(1)
        return loss(params, scale)

    product = curvature.AmortizedProduct(
        curvature.hessian_map(counted), params, scales()
    )
    v = curvature.random_like(0, params)
    product(v)
    traced, alive = len(traces), len(jax.live_arrays())
    for i in range(100):
        product(curvature.scale(float(i), v))
    assert len(traces) == traced
    assert len(jax.live_arrays()) <= alive


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="at least one batch: got none"):
        curvature.AmortizedProduct(MAPS["hessian"](), regression.params(), [])


def test_free_memory_is_a_number_of_bytes():
    assert 2**20 < linearized.free_bytes() < 2**50


def clipped(params, x):
    """Layers with `where` and `relu`, one of them in a loop; float32."""

    def layer(x, kernel):
        return jnp.where(x @ kernel > 0.1, jnp.tanh(x @ kernel), 2.0), None

    x, _ = jax.lax.scan(layer, x, params["loop"])
    hidden = jax.nn.relu(x @ params["wide"])
    return jnp.sum(jnp.sin(jnp.pad(hidden, ((0, 0), (0, 3))) @ params["out"]))


@pytest.mark.parametrize("fold", [True, False])
def test_an_array_of_one_number_is_not_kept(fold):
    shapes = {"loop": (3, 7, 7), "wide": (7, 11), "out": (14, 2)}
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    params, x = {name: draw(shape) for name, shape in shapes.items()}, draw((5, 7))
    linear_map = curvature.hessian_map(clipped)
    product = curvature.AmortizedProduct(linear_map, params, [(x,)], fold=fold)
    (residuals,) = product._residuals
    kept = [a for a in jax.tree.leaves(residuals) if jnp.size(a) > 1]
    assert kept
    # Values of the network differ, and a mask that is true everywhere is no float.
    one_number = [a.shape for a in kept if a.dtype == "float32" and jnp.ptp(a) == 0]
    assert not one_number
    assert product.residual_bytes >= sum(a.nbytes for a in kept)
    assert (5, 11) in [x.shape for x in residuals.others if x]
    direct = curvature.AmortizedProduct(linear_map, params, [(x,)], memory_budget=0)
    v = curvature.random_like(0, params)
    vs = curvature.random_stack(0, [0, 1], params)
    for got, wanted in (
        (product(v), direct(v)),
        (product.stacked(vs), direct.stacked(vs)),
    ):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(abs(b).max()))


NUMBERS = {
    "bfloat16": [0.0, -2.5, np.nan, np.inf],
    "float32": [0.0, -2.5, np.nan, np.inf],
    "int32": [0, -2, 7],
    "bool": [False, True],
}


@pytest.mark.parametrize(
    ("dtype", "number"), [(dtype, x) for dtype, xs in NUMBERS.items() for x in xs]
)
def test_a_number_that_is_not_kept_comes_back_in_its_type(dtype, number):
    def function(x):
        return {"x": x, "same": jnp.full((3, 2), number, dtype), "one": jnp.asarray(2)}

    found = jax.jit(uniform.kept(function, jnp.ones(4)))(jnp.arange(4.0))
    assert [x.shape for x in found.arrays] == [(), (4,)]
    again, wanted = found.whole(), function(jnp.arange(4.0))
    for name, value in wanted.items():
        assert again[name].dtype == value.dtype
        np.testing.assert_array_equal(*(np.float64(x) for x in (again[name], value)))


@pytest.mark.parametrize("length", [0, 3])
def test_numbers_are_known_through_loops_and_changes_of_type(length):
    def function(x):
        def step(carry, row):
            del carry
            return jnp.full(5, 4.0), (jnp.full(6, 3.0), 2 * row)

        last, (same, twice) = jax.lax.scan(step, jnp.zeros(5), x)
        return last, same, twice, jnp.full(7, 2.5).astype("int32")

    x = jnp.arange(2.0 * length).reshape(length, 2)
    found = jax.jit(uniform.kept(function, x))(x)
    assert [a.shape for a in found.arrays] == [(5,), (length, 2)]
    for a, b in zip(found.whole(), function(x), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
