"""Eigenpairs are the ones that their places say, at both ends, with any multiplicity."""

import numpy as np
import pytest
import scipy.stats

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.krylov import places
from t5x_fwdloss.curvature.krylov.chain import Chain
from t5x_fwdloss.curvature.krylov.space import Krylov

from . import problems

EPS = float(np.finfo(np.float32).eps)
SHAPES = {"kernel": (20, 15)}
BULK = np.random.default_rng(1).uniform(-1, 1, size=300)


def with_bulk(*outliers):
    return np.r_[BULK[: 300 - len(outliers)], outliers]


def vector(seed, shapes=SHAPES):
    size = int(np.prod(shapes["kernel"]))
    flat = np.random.default_rng(seed).normal(size=size)
    return problems.unflatten(flat, shapes=shapes)


def found(eigenvalues, *, seed=0, shapes=SHAPES, **options):
    matrix, _ = problems.symmetric(eigenvalues, seed)
    given = {"num_largest": 5, "num_smallest": 2, "max_steps": 80, "tolerance": 1e-3}
    return curvature.eigenpairs(
        problems.matvec_of(matrix), vector(seed, shapes), **given | options
    )


def expected(eigenvalues, result):
    ordered = np.sort(eigenvalues)
    counts = [result.ends.count(end) for end in ("largest", "smallest")]
    return np.r_[ordered[::-1][: counts[0]], ordered[: counts[1]]]


def check_places(eigenvalues, result):
    """Whatever is converged is the eigenvalue of its place, within its residual."""
    errors = np.abs(result.eigenvalues - expected(eigenvalues, result))
    assert (errors <= result.allowed)[np.array(result.converged)].all()
    assert (result.residuals <= result.allowed)[np.array(result.converged)].all()
    allowed = 1e-3 * np.abs(result.eigenvalues) + result.rounding * result.scale
    np.testing.assert_allclose(result.allowed, allowed, rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_small_end_under_large_outliers_is_right(seed):
    bulk = np.random.default_rng(seed).normal(size=389) * 0.05
    eigenvalues = np.r_[np.geomspace(1000, 1, 10), bulk, -0.5]
    result = found(eigenvalues, seed=seed, shapes={"kernel": (20, 20)})
    check_places(eigenvalues, result)
    assert all(result.converged)
    # What rounding allows is a hundredth of it; the residual of 0.46 was a thousandth
    # of the largest eigenvalue.
    assert result.eigenvalues[5] == pytest.approx(-0.5, abs=1e-4)
    assert result.rounding * result.scale < 0.01


MULTIPLE = {
    "ones and twos": (np.repeat([1.0, 2.0], 150), {"num_largest": 20}),
    "two signs": (np.repeat([-1.0, 1.0], 150), {}),
    "a triple": (with_bulk(10, 9, 9, 9, 8), {"num_smallest": 0}),
    "the last place": (with_bulk(10, 9, 8, 8, 8), {"num_largest": 3}),
    "all five": (with_bulk(9, 9, 9, 9, 9), {"num_smallest": 0}),
    "null space": (
        np.r_[np.zeros(250), np.linspace(1, 2, 50)],
        {"num_largest": 1, "num_smallest": 3},
    ),
    "negative": (-with_bulk(10, 9, 9, 9, 8), {"num_largest": 0, "num_smallest": 4}),
}


@pytest.mark.parametrize(("eigenvalues", "options"), MULTIPLE.values(), ids=MULTIPLE)
def test_places_are_right_under_multiplicity(eigenvalues, options):
    result = found(eigenvalues, **{"num_smallest": 0} | options)
    check_places(eigenvalues, result)
    assert all(result.converged)
    assert result.orthogonality < 1e-5


def test_places_that_are_not_settled_say_so():
    eigenvalues = np.repeat([1.0, 2.0], 150)
    result = found(eigenvalues, num_largest=20, num_smallest=0, max_steps=24)
    check_places(eigenvalues, result)
    # All residuals are small; the twos are what they say, and the ones are not.
    assert (result.residuals <= result.allowed).all()
    twos = result.eigenvalues > 1.5
    assert 0 < twos.sum() < 20
    np.testing.assert_array_equal(result.settled, twos)
    np.testing.assert_array_equal(result.converged, twos)


# With how much of the products of the pairs themselves their places may be settled.
SIMPLE = {
    "outliers": (with_bulk(*np.geomspace(100, 3, 12), -4, -6), 0.25),
    "power law": (
        100.0 * np.arange(1, 301) ** -1.0 * np.where(BULK > -0.4, 1, -0.2),
        0.25,
    ),
    "bulk": (np.sort(np.random.default_rng(0).normal(size=300)), 0.4),
}


@pytest.mark.parametrize(("eigenvalues", "part"), SIMPLE.values(), ids=SIMPLE)
def test_settling_a_simple_spectrum_costs_little(eigenvalues, part):
    growing = []
    result = found(
        eigenvalues,
        max_steps=300,
        max_basis=300,
        on_step=lambda state: growing.append(state.space.num_expanded),
    )
    assert all(result.converged)
    check_places(eigenvalues, result)
    # No other start is taken into the space of a spectrum without multiplicities.
    assert result.num_steps == len(growing)
    assert 0 < result.num_steps - growing[-1] <= part * growing[-1]


def test_an_end_that_converged_is_settled_before_the_steps_are_spent():
    # The lower end would take far more than 40 steps.
    eigenvalues = np.r_[np.linspace(-1, 0, 292), np.geomspace(100, 5, 8)]
    result = found(eigenvalues, max_steps=40)
    assert result.num_steps == 40
    assert all(result.converged[:5])
    assert not result.converged[6]
    check_places(eigenvalues, result)


@pytest.mark.parametrize("max_basis", [None, 40])
def test_a_run_killed_while_it_looks_ends_with_the_same_bits(max_basis):
    matrix, _ = problems.symmetric(with_bulk(10, 9, 9, 9, 8))
    product, saved = problems.matvec_of(matrix), []
    options = {"num_largest": 4, "num_smallest": 0, "tolerance": 1e-3}
    options |= {"max_steps": 90, "max_basis": max_basis}

    def save(state):
        found = problems.packed(state)
        again = problems.unpacked(curvature.EigenpairsState, found, vector(0))
        assert again.checked == state.checked
        looking = state.chain is not None and len(state.chain.alphas) > 1
        saved.append((looking, state.missing["largest"][1] > 0, found))

    whole = curvature.eigenpairs(product, vector(0), on_step=save, **options)
    assert all(whole.settled)
    kinds = [(looking, found_one) for looking, found_one, _ in saved]
    for place in map(kinds.index, ((True, False), (False, True), (True, True))):
        found = saved[place][2]
        state = problems.unpacked(curvature.EigenpairsState, found, vector(0))
        again = curvature.eigenpairs(product, vector(0), state=state, **options)
        np.testing.assert_array_equal(whole.eigenvalues, again.eigenvalues)
        np.testing.assert_array_equal(whole.residuals, again.residuals)
        np.testing.assert_array_equal(whole.history, again.history)
        assert whole.settled == again.settled


def test_where_another_start_has_no_room_places_stay_open():
    eigenvalues = with_bulk(10, 9, 9, 9, 8)
    options = {"num_largest": 4, "num_smallest": 0, "max_steps": 300}
    crowded = found(eigenvalues, max_basis=8, **options)
    assert (crowded.residuals <= crowded.allowed).all()
    assert not all(crowded.settled)
    check_places(eigenvalues, crowded)
    wide = found(eigenvalues, max_basis=16, **options)
    assert all(wide.converged)


@pytest.fixture
def grown():
    """A space and a chain in its complement, of a matrix of three equal eigenvalues."""
    eigenvalues = np.r_[np.linspace(-1, 1, 9), 3.0, 3.0, 3.0]
    matrix, vectors = problems.symmetric(eigenvalues)
    product = problems.matvec_of(matrix)
    space = Krylov(curvature.Basis(problems.unflatten(np.zeros(12))))
    rng = np.random.default_rng(0)
    space.add_start(problems.unflatten(rng.normal(size=12)))
    for _ in range(4):
        space.expand(product)
    chain = Chain.start(space, problems.unflatten(rng.normal(size=12)), 0)
    q = [problems.flatten(chain.last)]
    for _ in range(3):
        chain.step(space, product, "step")
        q.append(problems.flatten(chain.last))
    return matrix, vectors, space, chain, np.stack(q)


def rows(space):
    return np.stack(
        [problems.flatten(space.basis.row(i)) for i in range(space.basis.size)]
    )


@pytest.mark.usefixtures("x64")
def test_the_chain_is_lanczos_in_the_complement(grown):
    matrix, _, space, chain, q = grown
    mine = rows(space)
    np.testing.assert_allclose(mine @ q.T, 0, atol=1e-12)
    np.testing.assert_allclose(q @ q.T, np.eye(4), atol=1e-12)
    projected = q[:3] @ matrix @ q[:3].T
    np.testing.assert_allclose(np.diag(projected), chain.alphas, atol=1e-12)
    np.testing.assert_allclose(np.diag(projected, 1), chain.betas[:2], atol=1e-12)
    np.testing.assert_allclose(
        chain.values(), np.linalg.eigvalsh(projected), atol=1e-12
    )


@pytest.mark.usefixtures("x64")
def test_the_chance_bounds_what_the_fresh_vector_holds_of_a_copy(grown):
    _, vectors, space, chain, q = grown
    # The copy of 3 in the complement of the space, and of that the part in the chain.
    copies, mine = vectors[:, 9:], rows(space)
    seen = copies.T @ mine.T
    _, _, others = np.linalg.svd(seen.T)
    for u in (copies @ others.T)[:, 1:].T:
        np.testing.assert_allclose(mine @ u, 0, atol=1e-10)
        inside = (q @ u) / (q[0] @ u)
        largest = (inside**2).max()
        assert (q[0] @ u) ** 2 <= 1 / largest
    chance = places.chance_overlooked(chain, 3.0, 7)
    expected = min(1, np.sqrt(2 * 7 / (np.pi * largest)))
    assert chance == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("seed", range(20))
def test_rounding_hides_no_copy_of_a_long_chain(seed):
    """Without reorthogonalization, far beyond where vectors stop being orthogonal."""
    rng = np.random.default_rng(seed)
    eigenvalues = np.r_[rng.normal(size=296), 30, 29, 29, 5.0]
    result = found(eigenvalues, seed=seed, num_largest=4, num_smallest=0, max_steps=300)
    check_places(eigenvalues, result)
    assert all(result.converged)


@pytest.mark.parametrize("dimension", [3, 10, 1000])
def test_the_chance_is_above_that_of_the_beta_distribution(dimension):
    held = np.geomspace(1e-8, 1, 50)
    exact = scipy.stats.beta.cdf(held, 0.5, (dimension - 1) / 2)
    assert (exact <= np.sqrt(2 * dimension * held / np.pi) * (1 + 1e-9)).all()


def test_measured_rounding_is_allowed_in_residuals():
    eigenvalues, _ = SIMPLE["outliers"]
    plain = found(eigenvalues, num_smallest=1)
    rough = found(eigenvalues, num_smallest=1, rounding=0.01)
    assert rough.num_steps < plain.num_steps
    assert rough.rounding == 0.01
    allowed = 1e-3 * np.abs(rough.eigenvalues) + 0.01 * rough.scale
    np.testing.assert_allclose(rough.allowed, allowed, rtol=1e-6)
    assert all(rough.converged)
