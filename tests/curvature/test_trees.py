"""Linear algebra on pytrees against the same on flat vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.vectors import trees

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)


def vectors(seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, problems.SIZE)).astype(np.float32)
    return a, b, problems.unflatten(a), problems.unflatten(b)


def test_paths_are_those_of_t5x():
    assert trees.leaf_paths(problems.unflatten(np.zeros(problems.SIZE))) == [
        "decoder/layers_0/bias",
        "decoder/layers_0/wo/kernel",
        "encoder/layers_0/wi/kernel",
    ]


def test_linear_algebra_is_that_of_the_flat_vectors():
    a, b, u, v = vectors()
    tol = 4 * problems.SIZE * EPS
    np.testing.assert_allclose(curvature.inner(u, v), a @ b, atol=tol)
    np.testing.assert_allclose(curvature.norm(u), np.linalg.norm(a), rtol=tol)
    np.testing.assert_array_equal(
        problems.flatten(curvature.scale(2.0, u)), 2 * a.astype(np.float64)
    )
    np.testing.assert_allclose(
        problems.flatten(curvature.axpy(-0.5, u, v)), b - 0.5 * a, atol=tol
    )
    stacked = curvature.stack([u, v])
    again = curvature.unstack(stacked)
    np.testing.assert_array_equal(problems.flatten(again[1]), b.astype(np.float64))


def test_inner_product_of_bfloat16_is_summed_in_float32():
    # bfloat16 holds 8 bits: a running sum of ones would stop at 256.
    ones = {"kernel": jnp.ones(1000, jnp.bfloat16)}
    result = curvature.inner(ones, ones)
    assert result.dtype == jnp.float32
    assert float(result) == 1000.0


@pytest.mark.usefixtures("x64")
def test_float64_is_not_narrowed():
    u = {"kernel": jnp.asarray([1.0, 1e-9])}
    assert curvature.inner(u, {"kernel": jnp.asarray([0.0, 1.0])}).dtype == jnp.float64
    assert float(curvature.norm(u)) - 1.0 == pytest.approx(5e-19, abs=2.3e-16)


def mixed():
    return {
        "decoder": {"kernel": jnp.ones((2, 2)), "half": jnp.ones(2, jnp.bfloat16)},
        "step": jnp.zeros((), jnp.int32),
        "mask": jnp.zeros(3, bool),
    }


def test_integer_leaves_are_left_out_and_named():
    params = mixed()
    assert curvature.left_out(params) == ["mask", "step"]
    floats = curvature.float_part(params)
    assert floats["step"] is None
    assert floats["mask"] is None
    assert curvature.dimension(params) == 6
    doubled = trees.merge(curvature.scale(2.0, floats), params)
    assert doubled["step"] is params["step"]
    np.testing.assert_array_equal(doubled["decoder"]["kernel"], 2.0)
    zeros = curvature.zeros_like(params)
    assert zeros["decoder"]["half"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ({"a": jnp.zeros(2)}, r"at b it has None, the parameters have \(3,\)"),
        (
            {"a": jnp.zeros(2), "b": jnp.zeros(4)},
            r"at b it has \(4,\), the parameters have \(3,\)",
        ),
        (
            {"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(1)},
            r"at c it has \(1,\), the parameters have None",
        ),
    ],
)
def test_a_vector_of_other_leaves_is_refused_by_path(vector, message):
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    with pytest.raises(ValueError, match=message):
        curvature.check_like(vector, params)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_named_by_step_and_path(bad):
    flat = np.ones(problems.SIZE)
    curvature.check_finite(problems.unflatten(flat), "step 1")
    flat[4] = bad
    match = r"vector of step 7 must be finite: .* in 'decoder/layers_0/wo/kernel'"
    with pytest.raises(curvature.NonFiniteError, match=match) as caught:
        curvature.check_finite(problems.unflatten(flat), "step 7")
    assert caught.value.paths == ("decoder/layers_0/wo/kernel",)
    assert caught.value.step == "step 7"


def test_helpers_trace_under_jit():
    _, _, u, v = vectors()
    inside = jax.jit(lambda u, v: curvature.inner(curvature.axpy(2.0, u, v), v))(u, v)
    outside = curvature.inner(curvature.axpy(2.0, u, v), v)
    np.testing.assert_allclose(inside, outside, rtol=8 * EPS)
