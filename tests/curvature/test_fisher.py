"""Fisher matrices of softmax regression against sums over classes and samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature

from . import problems

plain = problems.SoftmaxRegression(z_loss=0.0, smoothing=0.0)
smooth = problems.SoftmaxRegression()


def exact():
    """E over labels of the model's own distribution, class by class."""
    p, _ = plain.probabilities()
    total = 0.0
    for n, jac in enumerate(plain.jacobians()):
        for k in range(plain.classes):
            g = jac.T @ (p[n] - np.eye(plain.classes)[k])
            total = total + plain.weights[n] * p[n, k] * np.outer(g, g)
    return total


@pytest.mark.usefixtures("x64")
def test_exact_fisher_is_the_expectation_over_labels():
    product = jax.jit(
        curvature.gauss_newton_product(plain.outputs, plain.output_hessian)
    )
    got = problems.dense(lambda v: product(plain.params(), v), plain.params())
    np.testing.assert_allclose(got, exact(), atol=1e-13)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("unit_ndim", [1, 2])
def test_empirical_fisher_is_the_sum_of_outer_products(unit_ndim):
    gradients = smooth.logit_gradients()
    product = jax.jit(
        curvature.empirical_fisher_product(
            smooth.outputs, lambda _: jnp.asarray(gradients), unit_ndim=unit_ndim
        )
    )
    got = problems.dense(lambda v: product(smooth.params(), v), smooth.params())
    rows = [j.T @ g for j, g in zip(smooth.jacobians(), gradients, strict=True)]
    if unit_ndim == 2:  # all examples together are one unit
        rows = [sum(rows)]
    np.testing.assert_allclose(got, sum(np.outer(g, g) for g in rows), atol=1e-12)


def sampled_gradient(key, z):
    labels = jax.random.categorical(key, z)
    one_hot = jax.nn.one_hot(labels, plain.classes, dtype=z.dtype)
    root = jnp.sqrt(jnp.asarray(plain.weights, z.dtype))[:, None]
    return root * (jax.nn.softmax(z) - one_hot)


@pytest.mark.usefixtures("x64")
def test_sampled_fisher_is_the_mean_over_its_samples():
    product = jax.jit(
        curvature.sampled_fisher_product(plain.outputs, sampled_gradient, num_samples=3)
    )
    key = jax.random.key(4)
    got = problems.dense(lambda v: product(plain.params(), v, key), plain.params())
    z = plain.outputs(plain.params())
    expected = 0.0
    for sample_key in jax.random.split(key, 3):
        g = np.asarray(sampled_gradient(sample_key, z))
        for jac, row in zip(plain.jacobians(), g, strict=True):
            expected = expected + np.outer(jac.T @ row, jac.T @ row) / 3
    np.testing.assert_allclose(got, expected, atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_sampled_fisher_is_unbiased_and_depends_on_its_key_only():
    samples = 4000
    product = jax.jit(
        curvature.sampled_fisher_product(
            plain.outputs, sampled_gradient, num_samples=samples
        )
    )
    params = plain.params()
    v = curvature.random_like(0, params)
    first, second, other = (
        problems.flatten(product(params, v, jax.random.key(seed))) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    # The spread of one sample is below the sum of |g| |g.v| over units: 5 errors.
    bound = 5 * 2 * np.abs(exact()).sum() / np.sqrt(samples)
    np.testing.assert_allclose(first, exact() @ problems.flatten(v), atol=bound)
    np.testing.assert_allclose(first, other, atol=2 * bound)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="num_samples must be at least 1: got 0"):
        curvature.sampled_fisher_product(plain.outputs, sampled_gradient, num_samples=0)
