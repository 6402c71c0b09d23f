"""Eigenpairs of matrices with known spectra; restarts, blocks and resuming."""

import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
GENERAL = np.array([-4.0, -2.5, -1.0, -0.1, 0.0, 0.2, 0.7, 1.0, 2.0, 3.0, 5.0, 9.0])


def start(seed=0):
    return problems.unflatten(np.random.default_rng(seed).normal(size=problems.SIZE))


def large_problem(seed=0):
    """300 parameters: a bulk and outliers at both ends, as in a network."""
    rng = np.random.default_rng(seed)
    bulk = rng.normal(size=292)
    eigenvalues = np.sort(np.r_[bulk, 12, 20, 25, 50, 100.0, -8, -11, -15])
    matrix, _ = problems.symmetric(eigenvalues)
    shapes = {"kernel": (20, 15)}
    vector = problems.unflatten(rng.normal(size=300), shapes=shapes)
    return eigenvalues, matrix, vector, shapes


def check_pairs(result, matrix, tol):
    """What is reported is what a dense computation says, whatever converged."""
    for theta, vector, residual in zip(
        result.eigenvalues, result.eigenvectors, result.residuals, strict=True
    ):
        y = problems.flatten(vector)
        assert np.linalg.norm(y) == pytest.approx(1, abs=tol)
        true = np.linalg.norm(matrix @ y - theta * y)
        assert residual == pytest.approx(true, abs=tol * result.scale, rel=1e-3)


@pytest.mark.parametrize("max_basis", [None, 16])
def test_both_ends_are_found_with_their_true_residuals(max_basis):
    eigenvalues, matrix, vector, _ = large_problem()
    result = curvature.eigenpairs(
        problems.matvec_of(matrix),
        vector,
        num_largest=4,
        num_smallest=3,
        max_steps=300,
        tolerance=1e-5,
        max_basis=max_basis,
    )
    expected = np.r_[eigenvalues[::-1][:4], eigenvalues[:3]]
    assert all(result.converged)
    assert result.ends == ("largest",) * 4 + ("smallest",) * 3
    np.testing.assert_allclose(result.eigenvalues, expected, atol=1e-5 * 100)
    assert result.orthogonality < 1e-5
    assert result.num_products == result.num_steps + 7
    assert (result.num_restarts > 0) == (max_basis is not None)
    check_pairs(result, matrix, 50 * EPS)


def test_it_stops_at_the_tolerance_and_not_before():
    # One pair at each end: no copy could change a place, and none is looked for.
    _, matrix, vector, _ = large_problem()
    steps = [
        curvature.eigenpairs(
            problems.matvec_of(matrix),
            vector,
            num_largest=1,
            num_smallest=1,
            max_steps=300,
            tolerance=tolerance,
        )
        for tolerance in (1e-1, 1e-3, 1e-5)
    ]
    assert steps[0].num_steps < steps[1].num_steps < steps[2].num_steps < 300
    for result in steps:
        assert all(result.converged)

        def excess(row, result=result):
            values, estimates = np.abs(row[1::2]), row[2::2]
            level = 10 * EPS * np.sqrt(row[0]) * values.max()
            return (estimates / (result.tolerance * values + level)).max()

        assert excess(result.history[-1]) <= 1
        assert excess(result.history[-2]) > 0.9


def test_too_few_steps_are_said_to_be_too_few():
    _, matrix, vector, _ = large_problem()
    result = curvature.eigenpairs(
        problems.matvec_of(matrix),
        vector,
        num_largest=3,
        num_smallest=3,
        max_steps=8,
        tolerance=1e-5,
    )
    assert not all(result.converged)
    assert result.num_steps == 8
    check_pairs(result, matrix, 50 * EPS)


def test_a_tolerance_below_rounding_ends_at_what_rounding_leaves():
    # The whole space: the estimates are zero, the true residuals are of rounding.
    matrix, _ = problems.symmetric(GENERAL)
    result = curvature.eigenpairs(
        problems.matvec_of(matrix),
        start(),
        num_largest=3,
        num_smallest=3,
        tolerance=1e-12,
    )
    np.testing.assert_array_equal(result.history[-1][2::2], 0.0)
    assert (result.residuals > 1e-12 * np.abs(result.eigenvalues)).any()
    assert all(result.converged)
    level = 10 * EPS * np.sqrt(result.num_steps)
    assert result.rounding == pytest.approx(level)
    np.testing.assert_allclose(
        result.allowed, 1e-12 * np.abs(result.eigenvalues) + level * 9, rtol=1e-5
    )
    check_pairs(result, matrix, 50 * EPS)


@pytest.mark.parametrize(
    "eigenvalues",
    [
        np.ones(12),
        np.zeros(12),
        np.repeat([2.0, 5.0, -3.0], 4),
        np.r_[np.zeros(10), 3.0, -2.0],
        np.r_[1.0 + 1e-3 * np.arange(6), 7.0 + 1e-3 * np.arange(6)],
        -np.arange(1.0, 13.0),
        1e-6 * np.arange(1.0, 13.0),
    ],
    ids=["identity", "zero", "repeated", "rank2", "clusters", "negative", "small"],
)
def test_multiplicities_are_counted_with_fresh_directions(eigenvalues):
    matrix, _ = problems.symmetric(eigenvalues)
    result = curvature.eigenpairs(
        problems.matvec_of(matrix),
        start(),
        num_largest=12,
        num_smallest=0,
        max_steps=100,
        tolerance=1e-5,
    )
    scale = np.abs(eigenvalues).max()
    np.testing.assert_allclose(
        result.eigenvalues, np.sort(eigenvalues)[::-1], atol=100 * EPS * scale
    )
    assert all(result.converged)
    assert result.num_steps <= 12


def test_a_block_start_sees_a_multiplicity_that_one_vector_does_not():
    rng = np.random.default_rng(1)
    eigenvalues = np.r_[rng.uniform(-1, 1, size=297), 10.0, 10.0, 10.0]
    matrix, _ = problems.symmetric(eigenvalues)
    shapes = {"kernel": (20, 15)}
    vectors = [
        problems.unflatten(rng.normal(size=300), shapes=shapes) for _ in range(3)
    ]
    options = {"num_largest": 3, "num_smallest": 0, "tolerance": 1e-4}
    product = problems.matvec_of(matrix)
    single = curvature.eigenpairs(product, vectors[0], max_steps=8, **options)
    block = curvature.eigenpairs(product, vectors, max_steps=60, **options)
    np.testing.assert_allclose(block.eigenvalues, 10.0, rtol=1e-5)
    assert all(block.converged)
    assert block.num_steps < 60
    assert single.eigenvalues[1] < 1.5
    restarted = curvature.eigenpairs(
        product, vectors, max_steps=60, max_basis=16, **options
    )
    np.testing.assert_allclose(restarted.eigenvalues, 10.0, rtol=1e-5)


def test_dependent_start_vectors_are_deflated():
    matrix, _ = problems.symmetric(GENERAL)
    vector = start()
    result = curvature.eigenpairs(
        problems.matvec_of(matrix),
        [vector, curvature.scale(2.0, vector), start(1)],
        num_largest=2,
        num_smallest=2,
        tolerance=1e-5,
    )
    np.testing.assert_allclose(result.eigenvalues, [9, 5, -4, -2.5], atol=100 * EPS * 9)


def test_fewer_dimensions_than_pairs_gives_each_pair_once():
    matrix = np.diag([3.0, -1.0, 2.0])
    vector = {"w": jnp.asarray([1.0, 1.0, 1.0])}
    result = curvature.eigenpairs(
        problems.matvec_of(matrix), vector, num_largest=2, num_smallest=2
    )
    np.testing.assert_allclose(result.eigenvalues, [3, 2, -1], atol=20 * EPS)
    assert result.ends == ("largest", "largest", "smallest")


@pytest.mark.parametrize("max_basis", [None, 20])
@pytest.mark.parametrize("stop", [1, 7, 19, 20, 21, 26])
def test_a_killed_run_ends_with_the_same_bits(stop, max_basis):
    _, matrix, vector, _ = large_problem()
    product = problems.matvec_of(matrix)
    options = {
        "num_largest": 6,
        "num_smallest": 4,
        "max_steps": 40,
        "tolerance": 1e-9,
        "max_basis": max_basis,
    }
    saved = {}

    def save(state):
        if state.space.num_products == stop:
            saved["state"] = problems.packed(state)

    whole = curvature.eigenpairs(product, vector, on_step=save, **options)
    state = problems.unpacked(curvature.EigenpairsState, saved["state"], vector)
    again = curvature.eigenpairs(product, vector, state=state, **options)
    np.testing.assert_array_equal(whole.eigenvalues, again.eigenvalues)
    np.testing.assert_array_equal(whole.residuals, again.residuals)
    np.testing.assert_array_equal(whole.history, again.history)
    for one, other in zip(whole.eigenvectors, again.eigenvectors, strict=True):
        np.testing.assert_array_equal(problems.flatten(one), problems.flatten(other))


def test_scaling_the_operator_scales_the_answer_and_not_the_work():
    _, matrix, vector, _ = large_problem()
    options = {"num_largest": 2, "num_smallest": 2, "tolerance": 1e-4}
    one = curvature.eigenpairs(problems.matvec_of(matrix), vector, **options)
    other = curvature.eigenpairs(problems.matvec_of(1e-6 * matrix), vector, **options)
    assert one.num_steps == other.num_steps
    np.testing.assert_allclose(
        other.eigenvalues, 1e-6 * one.eigenvalues, rtol=2e-5, atol=0
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_largest": 0, "num_smallest": 0}, "not both zero: got 0 and 0"),
        ({"num_largest": -1}, "must not be negative.*got -1 and 1"),
        ({"max_steps": 0}, "max_steps must be at least 1: got 0"),
        ({"tolerance": 0.0}, "tolerance must lie between 0 and 1: got 0.0"),
        ({"rounding": -1.0}, "rounding must be at least 0: got -1.0"),
        ({"max_basis": 4}, "max_basis must be at least 5 .*: got 4"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    matrix, _ = problems.symmetric(GENERAL)
    with pytest.raises(ValueError, match=message):
        curvature.eigenpairs(problems.matvec_of(matrix), start(), **options)


def test_nan_in_the_last_product_names_the_pair():
    matrix, _ = problems.symmetric(GENERAL)
    product, calls = problems.matvec_of(matrix), []
    last = curvature.eigenpairs(product, start(), tolerance=1e-9).num_products

    def broken(v):
        calls.append(1)
        w = product(v)
        return curvature.scale(jnp.nan, w) if len(calls) == last else w

    with pytest.raises(curvature.NonFiniteError, match="residual of smallest eigenpa"):
        curvature.eigenpairs(broken, start(), tolerance=1e-9)


def test_a_number_of_starts_are_vectors_of_fresh():
    matrix, _ = problems.symmetric(np.r_[np.linspace(-1.0, 3.0, 196), 9, 9, 9, -7.0])
    product = problems.matvec_of(matrix)
    rng = np.random.default_rng(3)
    drawn = [
        problems.unflatten(x, shapes={"kernel": (200,)})
        for x in rng.normal(size=(40, 200))
    ]
    settings = {"num_largest": 3, "num_smallest": 1, "max_steps": 60}
    listed = curvature.eigenpairs(
        product, drawn[:2], fresh=lambda i: drawn[2 + i], **settings
    )
    numbered = curvature.eigenpairs(product, 2, fresh=drawn.__getitem__, **settings)
    np.testing.assert_array_equal(numbered.eigenvalues, listed.eigenvalues)
    assert numbered.num_products == listed.num_products


def test_neither_fresh_starts_nor_the_old_basis_are_held_beside_the_vectors_in_use():
    matrix, _ = problems.symmetric(np.r_[np.linspace(-1.0, 3.0, 196), 9, 8, 7, -7.0])
    product = problems.matvec_of(matrix)
    drawn, states, seen = [], [], []

    def fresh(number):
        row = np.random.default_rng(number).normal(size=200)
        vector = problems.unflatten(row, shapes={"kernel": (200,)})
        drawn.append(weakref.ref(vector["kernel"]))
        return vector

    def watched(v):
        alive = sum(ref() is not None for ref in drawn)
        seen.append((alive, states[-1].space.basis.size if states else 0))
        return product(v)

    found = curvature.eigenpairs(
        watched, 2, fresh=fresh, num_largest=3, num_smallest=1, on_step=states.append
    )
    assert len(drawn) > 2
    assert all(alive == 0 for alive, _ in seen)
    # For the true residuals: the pairs, and vectors that were not multiplied yet.
    at_the_end = [size for _, size in seen[found.num_steps :]]
    assert len(at_the_end) == 4
    assert max(at_the_end) <= 4 + 3 < max(size for _, size in seen)


@pytest.mark.parametrize("start", [[], 0, 2])
def test_starts_that_are_none_are_refused(start):
    message = "at least one start vector: got 0|a list where fresh is None: got 2"
    with pytest.raises(ValueError, match=message):
        curvature.eigenpairs(lambda v: v, start)
