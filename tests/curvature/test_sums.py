"""Sums of products over batches, one vector or several at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature

from . import problems

MATRICES = [problems.symmetric(np.arange(12.0) + i, seed=i)[0] for i in range(3)]


def params():
    return problems.unflatten(np.ones(problems.SIZE))


def product(matrices, **options):
    loss = problems.quadratic(np.eye(12), np.zeros(12))
    batches = [(jnp.asarray(matrix, jnp.float32),) for matrix in matrices]
    return curvature.AmortizedProduct(
        curvature.hessian_map(loss), params(), batches, **options
    )


@pytest.mark.parametrize("memory_budget", [None, 0])
def test_the_number_of_batches_does_not_matter(memory_budget):
    for matrices in (MATRICES, [sum(MATRICES)]):
        got = problems.dense(product(matrices, memory_budget=memory_budget), params())
        np.testing.assert_allclose(got, sum(MATRICES), atol=1e-5)


@pytest.mark.parametrize("memory_budget", [None, 0])
def test_a_sum_starts_from_zero_and_leaves_its_vector_alone(memory_budget):
    matvec = product(MATRICES, memory_budget=memory_budget)
    zero = matvec(curvature.zeros_like(params()))
    np.testing.assert_array_equal(problems.flatten(zero), 0.0)
    v = curvature.random_like(0, params())
    before, first = problems.flatten(v), problems.flatten(matvec(v))
    np.testing.assert_array_equal(first, problems.flatten(matvec(v)))
    np.testing.assert_array_equal(before, problems.flatten(v))


@pytest.mark.parametrize("memory_budget", [None, 0])
def test_stacked_products_are_the_single_ones(memory_budget):
    vs = curvature.random_stack(0, [0, 1, 2], params())
    matvec = product(MATRICES, memory_budget=memory_budget)
    many = curvature.unstack(matvec.stacked(vs))
    for one, v in zip(many, curvature.unstack(vs), strict=True):
        np.testing.assert_allclose(
            problems.flatten(one), problems.flatten(matvec(v)), atol=1e-4
        )


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="at least one batch: got none"):
        product([])
