"""Conjugate gradients: the minimum over Krylov spaces, resumed, and stopped where none is."""

import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.vectors import packing

from . import problems

pytestmark = pytest.mark.usefixtures("x64")
EIGENVALUES = np.array([0.1, 0.2, 0.5, 1, 1, 2, 3, 5, 8, 13, 21, 34.0])
MATRIX, VECTORS = problems.symmetric(EIGENVALUES)
RIGHT = np.random.default_rng(1).normal(size=problems.SIZE)


def solve(matrix=MATRIX, right=RIGHT, **settings):
    product = problems.matvec_of(matrix)
    return curvature.conjugate_gradients(product, problems.unflatten(right), **settings)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_each_step_minimizes_over_its_krylov_space(steps):
    found = solve(max_steps=steps, tolerance=1e-12)
    space = np.stack([np.linalg.matrix_power(MATRIX, k) @ RIGHT for k in range(steps)])
    basis = np.linalg.qr(space.T)[0]
    inside = np.linalg.solve(basis.T @ MATRIX @ basis, basis.T @ RIGHT)
    x = problems.flatten(found.solution)
    np.testing.assert_allclose(x, basis @ inside, rtol=1e-6, atol=1e-9)
    rest = RIGHT - MATRIX @ x
    np.testing.assert_allclose(problems.flatten(found.residual), rest, atol=1e-12)
    relative = np.linalg.norm(rest) / np.linalg.norm(RIGHT)
    assert found.relative_residual == pytest.approx(relative)
    assert found.num_products == steps
    assert not found.negative


def test_it_stops_at_the_tolerance_with_the_solution():
    found = solve(tolerance=1e-6, max_steps=100)
    x = np.linalg.solve(MATRIX, RIGHT)
    assert (
        found.relative_residual <= 1e-6 < (found.squared[-2] / found.squared[0]) ** 0.5
    )
    np.testing.assert_allclose(
        problems.flatten(found.solution), x, rtol=1e-3, atol=1e-5
    )
    assert found.num_products <= 14


def test_a_search_resumes_bit_for_bit_from_a_saved_state():
    whole, states = solve(tolerance=1e-9), []
    solve(tolerance=1e-9, max_steps=4, on_step=lambda state: states.append(state))
    plain, vectors = packing.pack(states[-1])
    like = problems.unflatten(RIGHT)
    state = packing.unpack(curvature.CgState, plain, vectors, like)
    resumed = solve(tolerance=1e-9, state=state)
    assert [state.num_products for state in states] == [1, 2, 3, 4]
    assert resumed.squared == whole.squared
    for one, other in zip(
        *(problems.leaves_of(x.solution) for x in (resumed, whole)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_negative_curvature_ends_the_search_at_the_last_minimum():
    shifted = MATRIX - 0.3 * np.eye(problems.SIZE)
    found = solve(shifted, max_steps=50, tolerance=1e-12)
    assert found.negative
    before = solve(shifted, max_steps=found.num_products - 1, tolerance=1e-12)
    assert not before.negative
    np.testing.assert_array_equal(
        problems.flatten(found.solution), problems.flatten(before.solution)
    )
    direction = problems.flatten(found.direction)
    assert direction @ shifted @ direction <= 0
    at_once = solve(-MATRIX)
    assert at_once.negative
    assert at_once.num_products == 1
    np.testing.assert_array_equal(problems.flatten(at_once.solution), 0.0)


def test_a_right_side_of_zero_needs_no_product():
    found = solve(right=np.zeros(problems.SIZE))
    assert (found.num_products, found.relative_residual) == (0, 0.0)
    np.testing.assert_array_equal(problems.flatten(found.solution), 0.0)


def test_a_product_that_is_not_finite_is_named():
    bad = MATRIX.copy()
    bad[0, 0] = np.nan
    with pytest.raises(curvature.NonFiniteError, match="product 1"):
        solve(bad)
