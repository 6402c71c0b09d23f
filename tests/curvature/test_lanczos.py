"""Lanczos against its defining identities, known spectra and matfree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matfree import decomp

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.krylov.space import Krylov

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
# What two passes leave of an overlap, in units of rounding.
ORTHOGONAL = 8
GENERAL = np.array([-4.0, -2.5, -1.0, -0.1, 0.0, 0.2, 0.7, 1.0, 2.0, 3.0, 5.0, 9.0])


def start(seed=0):
    return problems.unflatten(np.random.default_rng(seed).normal(size=problems.SIZE))


def run(eigenvalues, num_steps, **options):
    matrix, _ = problems.symmetric(eigenvalues)
    result = curvature.lanczos(
        problems.matvec_of(matrix), start(), num_steps=num_steps, **options
    )
    return matrix, result


def rows(basis):
    return np.stack([problems.flatten(basis.row(i)) for i in range(basis.size)])


def tridiagonal(result):
    k = len(result.alphas)
    off = result.betas[: k - 1]
    return np.diag(result.alphas) + np.diag(off, 1) + np.diag(off, -1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_steps", [1, 5, 11, 12])
def test_recurrence_and_orthonormality_hold(num_steps):
    matrix, result = run(GENERAL, num_steps)
    q = rows(result.basis)
    k = num_steps
    assert len(result.alphas) == k
    eps = float(np.finfo(np.float64).eps)
    np.testing.assert_allclose(q @ q.T, np.eye(len(q)), atol=ORTHOGONAL * eps, rtol=0)
    rest = np.zeros((k, problems.SIZE))
    if k < problems.SIZE:
        rest[-1] = result.betas[-1] * q[k]
    np.testing.assert_allclose(
        q[:k] @ matrix, tridiagonal(result) @ q[:k] + rest, atol=1e-11
    )
    np.testing.assert_allclose(q[0] * result.start_norm, problems.flatten(start()))


@pytest.mark.usefixtures("x64")
def test_matfree_finds_the_same_tridiagonal_matrix():
    matrix, result = run(GENERAL, 7)
    decompose = decomp.tridiag_sym(7, reortho="full")
    flat = jnp.asarray(problems.flatten(start()))
    dense = jnp.asarray(matrix)
    # matfree relies on implicit promotion.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        other = decompose(lambda v: dense @ v, flat)
    np.testing.assert_allclose(tridiagonal(result), other.J_small, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("degree", [1, 8, 9, 10])
def test_moments_are_exact_up_to_degree_2k_minus_1(degree):
    matrix, result = run(GENERAL, 5)
    nodes, vectors = np.linalg.eigh(tridiagonal(result))
    v = problems.flatten(start())
    got = result.start_norm**2 * (vectors[0] ** 2 @ nodes**degree)
    expected = v @ np.linalg.matrix_power(matrix, degree) @ v
    if degree <= 9:
        assert got == pytest.approx(expected, rel=1e-11)
    else:
        assert got != pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("num_steps", [2, 4, 8, 12, 40])
def test_ritz_values_stay_inside_the_spectrum(num_steps):
    _, result = run(GENERAL, num_steps)
    ritz = np.linalg.eigvalsh(tridiagonal(result))
    slack = 50 * EPS * 9.0
    assert ritz.min() >= -4.0 - slack
    assert ritz.max() <= 9.0 + slack


def test_never_more_steps_than_dimensions():
    _, result = run(GENERAL, 40)
    assert len(result.alphas) == problems.SIZE
    assert result.exhausted
    np.testing.assert_allclose(
        np.linalg.eigvalsh(tridiagonal(result)), GENERAL, atol=100 * EPS * 9.0
    )


@pytest.mark.parametrize(
    ("eigenvalues", "distinct"),
    [
        (np.ones(12), 1),
        (np.zeros(12), 1),
        (np.full(12, 1e-8), 1),
        (np.full(12, -1e8), 1),
        (np.repeat([2.0, 5.0], 6), 2),
        (np.r_[np.zeros(10), 3.0, -2.0], 3),
        (np.r_[np.full(9, 1.0), 2.0, 2.0, 100.0], 3),
    ],
    ids=["identity", "zero", "tiny", "huge", "two", "rank2", "repeated"],
)
def test_an_invariant_space_stops_the_run_at_any_scale(eigenvalues, distinct):
    _, result = run(eigenvalues, 12)
    assert result.exhausted
    assert len(result.alphas) == distinct
    assert result.betas[-1] == 0.0
    ritz = np.linalg.eigvalsh(tridiagonal(result))
    scale = np.abs(eigenvalues).max()
    np.testing.assert_allclose(
        ritz, np.unique(eigenvalues), atol=50 * EPS * max(scale, 1e-30)
    )


def test_clusters_keep_the_basis_orthogonal():
    # One eigenvalue converges at once and then tempts the basis to hold it twice.
    eigenvalues = np.r_[1e4, 1 + 1e-3 * np.arange(11)]
    _, result = run(eigenvalues, 12)
    q = rows(result.basis)
    assert np.abs(q @ q.T - np.eye(len(q))).max() <= ORTHOGONAL * EPS


def test_what_cancellation_leaves_is_orthogonalized_again():
    # Nearly all of A q_0 lies along q_1: one pass leaves 1e5 eps of it in the rest.
    _, q = problems.symmetric(np.ones(12), seed=4)
    small, _ = problems.symmetric(GENERAL, seed=5)
    matrix = 1e5 * (np.outer(q[:, 0], q[:, 1]) + np.outer(q[:, 1], q[:, 0])) + small
    space = Krylov(curvature.Basis(start()))
    for i in range(2):
        assert space.add_start(problems.unflatten(q[:, i]))
    length = space.expand(problems.matvec_of(matrix))
    assert 1 < length < 10
    gram = space.basis.gram()
    assert np.abs(gram - np.eye(3)).max() <= ORTHOGONAL * EPS


def test_orthogonality_holds_over_many_steps():
    rng = np.random.default_rng(0)
    shapes = {"kernel": (20, 15)}
    eigenvalues = np.r_[rng.normal(size=294), 50.0, 60.0, 80.0, 100.0, -30.0, -40.0]
    matrix, _ = problems.symmetric(eigenvalues)
    vector = problems.unflatten(rng.normal(size=300), shapes=shapes)
    result = curvature.lanczos(problems.matvec_of(matrix), vector, num_steps=80)
    gram = result.basis.gram()
    assert np.abs(gram - np.eye(len(gram))).max() <= ORTHOGONAL * EPS
    ritz = np.linalg.eigvalsh(tridiagonal(result))
    np.testing.assert_allclose(ritz[-4:], [50, 60, 80, 100], rtol=20 * EPS)
    # No ghosts: each outlier is found once.
    assert (ritz > 40).sum() == 4


def test_the_product_is_called_once_a_step():
    matrix, _ = problems.symmetric(GENERAL)
    product, calls = problems.matvec_of(matrix), []

    def counted(v):
        calls.append(1)
        return product(v)

    curvature.lanczos(counted, start(), num_steps=6)
    assert len(calls) == 6


def test_a_product_that_returns_its_argument_is_not_overwritten():
    vector = start()
    before = problems.flatten(vector)
    curvature.lanczos(lambda v: v, vector, num_steps=3)
    np.testing.assert_array_equal(problems.flatten(vector), before)


def test_nan_in_a_product_names_step_and_block():
    matrix, _ = problems.symmetric(GENERAL)
    product, calls = problems.matvec_of(matrix), []

    def broken(v):
        calls.append(1)
        w = product(v)
        if len(calls) == 3:
            w["decoder"]["layers_0"]["bias"] *= jnp.nan
        return w

    match = "Lanczos step 3 must be finite: .* in 'decoder/layers_0/bias'"
    with pytest.raises(curvature.NonFiniteError, match=match):
        curvature.lanczos(broken, start(), num_steps=6)


def test_a_zero_start_and_no_steps_are_refused():
    matrix, _ = problems.symmetric(GENERAL)
    zero = problems.unflatten(np.zeros(12))
    with pytest.raises(ValueError, match="start vector must not be zero"):
        curvature.lanczos(problems.matvec_of(matrix), zero, num_steps=3)
    with pytest.raises(ValueError, match="num_steps must be at least 1: got 0"):
        curvature.lanczos(problems.matvec_of(matrix), start(), num_steps=0)


def test_a_basis_on_the_host_gives_the_same_numbers():
    _, here = run(GENERAL, 11)
    _, there = run(GENERAL, 11, basis_on_host=True)
    np.testing.assert_array_equal(here.alphas, there.alphas)
    np.testing.assert_array_equal(here.betas, there.betas)
    kinds = [
        leaf.sharding.memory_kind
        for vector in there.basis.vectors
        for leaf in jax.tree.leaves(vector)
    ]
    new = 2 * len(jax.tree.leaves(start()))
    assert set(kinds[:-new]) == {"pinned_host"}
    assert "pinned_host" not in kinds[-new:]


@pytest.mark.parametrize("stop", [1, 4, 8, 9, 11])
def test_a_run_goes_on_from_its_saved_state_to_the_bit(stop):
    matrix, whole = run(GENERAL, 12)
    saved = {}

    def save(space):
        if space.num_expanded == stop:
            saved["space"] = problems.packed(space)

    run(GENERAL, 12, on_step=save)
    space = problems.unpacked(curvature.Krylov, saved["space"], start())
    again = curvature.lanczos(
        problems.matvec_of(matrix), start(), num_steps=12, space=space
    )
    np.testing.assert_array_equal(whole.alphas, again.alphas)
    np.testing.assert_array_equal(whole.betas, again.betas)
    np.testing.assert_array_equal(rows(whole.basis), rows(again.basis))


def test_a_longer_run_compiles_nothing_new():
    # A shape that no other test has, so that the first run has to compile.
    shapes = {"kernel": (3, 19)}
    matrix, _ = problems.symmetric(np.linspace(-1, 2, 57))
    product = problems.matvec_of(matrix)
    one, other = np.random.default_rng(0).normal(size=(2, 57))
    options = {"num_largest": 2, "num_smallest": 2, "max_steps": 57}
    compiled = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        vector = problems.unflatten(one, shapes=shapes)
        short = curvature.eigenpairs(product, vector, tolerance=5e-3, **options)
        before = len(compiled)
        assert before > 0
        vector = problems.unflatten(other, shapes=shapes)
        long = curvature.eigenpairs(product, vector, tolerance=1e-9, **options)
        assert len(compiled) == before
        assert short.num_steps < long.num_steps
        assert all(short.settled)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
