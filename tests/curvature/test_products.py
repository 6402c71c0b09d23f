"""Products against closed forms, dense float64 matrices and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.products import derivatives

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
regression = problems.SoftmaxRegression()


def network(params, x, y):
    """A small loss with a Hessian that changes from point to point."""
    hidden = jnp.tanh(x @ params["encoder"]["layers_0"]["wi"]["kernel"])
    out = hidden @ params["decoder"]["layers_0"]["wo"]["kernel"]
    bias = params["decoder"]["layers_0"]["bias"]
    return jnp.sum((out[:, 0] - y) ** 2) + jnp.sum(jnp.cos(bias)) * jnp.sum(out)


def network_problem(seed=0):
    rng = np.random.default_rng(seed)
    params = problems.unflatten(rng.normal(size=problems.SIZE))
    dtype = jnp.zeros(()).dtype
    x, y = (jnp.asarray(rng.normal(size=s), dtype) for s in [(4, 2), (4,)])
    v = problems.unflatten(rng.normal(size=problems.SIZE))
    u = problems.unflatten(rng.normal(size=problems.SIZE))
    return params, (x, y), u, v


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", derivatives.MODES)
def test_hessian_of_softmax_regression_is_the_closed_form(mode):
    product = jax.jit(curvature.hessian_product(regression.loss, mode))
    matrix = problems.dense(
        lambda v: product(regression.params(), v), regression.params()
    )
    np.testing.assert_allclose(matrix, regression.hessian(), atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_gradient_and_directional_derivative_are_the_closed_form():
    params = regression.params()
    g = problems.flatten(jax.jit(curvature.gradient(regression.loss))(params))
    np.testing.assert_allclose(g, regression.gradient(), atol=1e-13)
    v = curvature.random_like(0, params, "normal")
    value, slope = jax.jit(curvature.directional_derivative(regression.loss))(params, v)
    np.testing.assert_allclose(value, regression.loss(params), rtol=1e-14)
    np.testing.assert_allclose(slope, g @ problems.flatten(v), rtol=1e-13)


@pytest.mark.usefixtures("x64")
def test_gauss_newton_of_a_linear_model_is_its_hessian():
    product = jax.jit(
        curvature.gauss_newton_product(regression.outputs, regression.output_hessian)
    )
    matrix = problems.dense(
        lambda v: product(regression.params(), v), regression.params()
    )
    np.testing.assert_allclose(matrix, regression.hessian(), atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_gauss_newton_is_the_dense_product_and_not_the_hessian():
    params, (x, y), _, _ = network_problem()

    def outputs(params, x, y):
        hidden = jnp.tanh(x @ params["encoder"]["layers_0"]["wi"]["kernel"])
        return (hidden @ params["decoder"]["layers_0"]["wo"]["kernel"])[:, 0]

    hessian = lambda z, u, *_: jnp.asarray(2.0) * (u + z * z * u)
    product = jax.jit(curvature.gauss_newton_product(outputs, hessian))
    matrix = problems.dense(lambda v: product(params, v, x, y), params)
    jac = jax.jacrev(outputs)(params, x, y)
    jac = np.hstack([np.asarray(j).reshape(4, -1) for j in jax.tree.leaves(jac)])
    z = np.asarray(outputs(params, x, y))
    np.testing.assert_allclose(matrix, jac.T @ np.diag(2 + 2 * z**2) @ jac, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", derivatives.MODES)
def test_hessian_is_the_dense_one(mode):
    params, args, _, _ = network_problem()
    product = jax.jit(curvature.hessian_product(network, mode))
    matrix = problems.dense(lambda v: product(params, v, *args), params)
    leaves, structure = jax.tree.flatten(params)
    shapes = [leaf.shape for leaf in leaves]
    sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def flat_loss(flat):
        parts = [
            p.reshape(s) for p, s in zip(jnp.split(flat, sizes), shapes, strict=True)
        ]
        return network(jax.tree.unflatten(structure, parts), *args)

    expected = jax.jit(jax.hessian(flat_loss))(problems.flatten_jax(params))
    np.testing.assert_allclose(matrix, expected, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", derivatives.MODES)
def test_hessian_is_the_finite_difference_of_the_gradient(mode):
    params, args, _, v = network_problem()
    product = jax.jit(curvature.hessian_product(network, mode))(params, v, *args)
    gradient = jax.jit(curvature.gradient(network))
    h = 1e-5  # error h^2 from the formula, eps / h from rounding: 1e-10 each
    plus = problems.flatten(gradient(curvature.axpy(h, v, params), *args))
    minus = problems.flatten(gradient(curvature.axpy(-h, v, params), *args))
    scale = np.abs(plus).max()
    np.testing.assert_allclose(
        problems.flatten(product), (plus - minus) / (2 * h), atol=1e-8 * scale
    )


@pytest.mark.parametrize("mode", derivatives.MODES)
def test_products_are_symmetric_linear_and_zero_at_zero(mode):
    params, args, u, v = network_problem()
    product = jax.jit(curvature.hessian_product(network, mode))
    apply = lambda vector: product(params, vector, *args)
    hu, hv = apply(u), apply(v)
    scale = float(curvature.norm(u) * curvature.norm(hv))
    assert (
        abs(float(curvature.inner(u, hv) - curvature.inner(v, hu))) < 50 * EPS * scale
    )
    both = apply(curvature.axpy(-3.0, u, v))
    expected = curvature.axpy(-3.0, hu, hv)
    np.testing.assert_allclose(
        problems.flatten(both), problems.flatten(expected), atol=50 * EPS * scale
    )
    zero = apply(curvature.zeros_like(params))
    np.testing.assert_array_equal(problems.flatten(zero), 0.0)


def test_two_calls_give_the_same_bits():
    params, args, _, v = network_problem()
    product = jax.jit(curvature.hessian_product(network))
    first = problems.flatten(product(params, v, *args))
    np.testing.assert_array_equal(first, problems.flatten(product(params, v, *args)))


def test_the_hessian_moves_with_the_parameters():
    params, args, u, v = network_problem()
    product = jax.jit(curvature.hessian_product(network))
    here = problems.flatten(product(params, v, *args))
    there = problems.flatten(product(curvature.add(params, u), v, *args))
    assert np.abs(here - there).max() > 0.01 * np.abs(here).max()


def test_bfloat16_leaves_give_float32_products_of_bfloat16_accuracy():
    matrix, _ = problems.symmetric(np.arange(1.0, 13.0))
    loss = problems.quadratic(matrix, np.zeros(problems.SIZE))
    wide = lambda p: loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), p))
    params = problems.unflatten(np.ones(problems.SIZE), jnp.bfloat16)
    v = curvature.random_like(0, params)
    product = jax.jit(curvature.hessian_product(wide))(params, v)
    assert {leaf.dtype for leaf in jax.tree.leaves(product)} == {jnp.dtype("float32")}
    expected = matrix @ problems.flatten(v)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(
        problems.flatten(product), expected, atol=eps * np.abs(expected).max()
    )


@pytest.mark.parametrize("mode", derivatives.MODES)
def test_integer_leaves_are_constants(mode):
    params = {"n": jnp.asarray(3, jnp.int32), "w": jnp.asarray([1.0, 2.0])}
    loss = lambda p: p["n"].astype(jnp.float32) * jnp.sum(p["w"] ** 2)
    v = curvature.random_like(0, params)
    product = jax.jit(curvature.hessian_product(loss, mode))(params, v)
    assert product["n"] is None
    np.testing.assert_allclose(product["w"], 6 * np.asarray(v["w"]), rtol=4 * EPS)
    _, slope = jax.jit(curvature.directional_derivative(loss))(params, v)
    expected = 6 * np.asarray(params["w"]) @ np.asarray(v["w"])
    np.testing.assert_allclose(slope, expected, rtol=8 * EPS)


def test_a_tied_leaf_has_the_hessian_of_the_chain_rule():
    matrix, _ = problems.symmetric(np.arange(1.0, 5.0))
    two = problems.quadratic(matrix, np.zeros(4))
    tied = lambda p: two({"a": p["table"], "b": p["table"]})
    params = {"table": jnp.ones(2)}
    got = problems.dense(
        lambda v: jax.jit(curvature.hessian_product(tied))(params, v), params
    )
    expected = sum(matrix[i : i + 2, j : j + 2] for i in (0, 2) for j in (0, 2))
    np.testing.assert_allclose(got, expected, atol=32 * EPS)


def test_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="mode must be one of .*: got 'sideways'"):
        curvature.hessian_product(network, "sideways")


def test_a_vector_of_other_shapes_is_refused_before_tracing():
    params, args, _, _ = network_problem()
    with pytest.raises(ValueError, match="must have the float leaves of the param"):
        curvature.hessian_product(network)(params, {"encoder": None}, *args)


def test_no_retracing_over_calls():
    params, args, _, v = network_problem()
    traces = []

    def counted(params, x, y):
        traces.append(1)
        return network(params, x, y)

    product = jax.jit(curvature.hessian_product(counted))
    for i in range(5):
        product(params, curvature.scale(float(i), v), *args)
    assert len(traces) == 1
