"""Sums over batches, damping, stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature

from . import problems

MATRICES = [problems.symmetric(np.arange(12.0) + i, seed=i)[0] for i in range(3)]


def params():
    return problems.unflatten(np.ones(problems.SIZE))


def product():
    loss = lambda p, a: problems.quadratic(np.eye(12), np.zeros(12))(p, a)
    return jax.jit(curvature.hessian_product(loss))


def batches():
    return [(jnp.asarray(matrix, jnp.float32),) for matrix in MATRICES]


def test_a_sum_over_batches_has_one_factor():
    matvec = curvature.summed(product(), params(), batches(), factor=0.25)
    got = problems.dense(matvec, params())
    np.testing.assert_allclose(got, 0.25 * sum(MATRICES), atol=1e-5)


def test_the_number_of_batches_does_not_matter():
    together = [(jnp.asarray(sum(MATRICES), jnp.float32),)]
    one = curvature.summed(product(), params(), together)
    three = curvature.summed(product(), params(), batches())
    v = curvature.random_like(0, params())
    np.testing.assert_allclose(
        problems.flatten(one(v)), problems.flatten(three(v)), atol=1e-4
    )


def test_a_sum_starts_from_zero():
    matvec = curvature.summed(product(), params(), batches())
    zero = matvec(curvature.zeros_like(params()))
    np.testing.assert_array_equal(problems.flatten(zero), 0.0)
    v = curvature.random_like(0, params())
    first = problems.flatten(matvec(v))
    np.testing.assert_array_equal(first, problems.flatten(matvec(v)))


def test_a_sum_does_not_overwrite_what_a_product_returns():
    v = curvature.random_like(0, params())
    before = problems.flatten(v)
    matvec = curvature.summed(lambda _, v: v, params(), [(), ()])
    np.testing.assert_array_equal(problems.flatten(matvec(v)), 2 * before)
    np.testing.assert_array_equal(problems.flatten(v), before)


def test_damping_adds_a_multiple_of_the_identity():
    matvec = curvature.damped(problems.matvec_of(MATRICES[0]), 0.5)
    got = problems.dense(matvec, params())
    np.testing.assert_allclose(got, MATRICES[0] + 0.5 * np.eye(12), atol=1e-5)
    with pytest.raises(ValueError, match="damping must be finite: got nan"):
        curvature.damped(matvec, float("nan"))


def test_stacked_products_are_the_single_ones():
    vs = curvature.random_stack(0, [0, 1, 2], params())
    single, batch = product(), batches()[1]
    many = jax.jit(curvature.stacked(single))(params(), vs, *batch)
    loop = curvature.one_by_one(lambda v: single(params(), v, *batch))(vs)
    for one, other in zip(
        curvature.unstack(many), curvature.unstack(loop), strict=True
    ):
        np.testing.assert_allclose(
            problems.flatten(one), problems.flatten(other), atol=1e-4
        )


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="at least one batch: got none"):
        curvature.summed(product(), params(), [])
