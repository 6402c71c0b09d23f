"""Hutchinson's trace: exact cases, the variance formula, stopping, resuming."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.estimators import hutchinson

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
EIGENVALUES = np.array([-4, -2.5, -1, -0.1, 0, 0.2, 0.7, 1, 2, 3, 5, 9.0])


def params():
    return problems.unflatten(np.zeros(problems.SIZE))


@pytest.mark.usefixtures("x64")
def test_the_mean_over_all_sign_vectors_is_the_trace():
    matrix, _ = problems.symmetric(EIGENVALUES[:6])
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=6)))
    samples = [z @ matrix @ z for z in signs]
    tree = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
    product = problems.matvec_of(matrix)
    pushed = [
        float(
            curvature.inner(
                v := {"a": jnp.asarray(z[:4].reshape(2, 2)), "b": jnp.asarray(z[4:])},
                product(v),
            )
        )
        for z in signs
    ]
    np.testing.assert_allclose(pushed, samples, atol=1e-12)
    assert np.mean(pushed) == pytest.approx(EIGENVALUES[:6].sum(), abs=1e-12)
    # The estimator draws such vectors, and each of its samples is one of these.
    estimate = curvature.hutchinson_trace(product, tree, 0, num_probes=8)
    for sample in estimate.samples:
        assert np.abs(np.array(pushed) - sample).min() < 1e-12


@pytest.mark.usefixtures("x64")
def test_samples_are_the_quadratic_forms_of_the_probes():
    matrix, _ = problems.symmetric(EIGENVALUES)
    estimate = curvature.hutchinson_trace(
        problems.matvec_of(matrix), params(), 3, num_probes=5, kind="normal"
    )
    for i, sample in enumerate(estimate.samples):
        v = curvature.random_like(curvature.probe_key(3, i), params(), "normal")
        z = problems.flatten(v)
        assert sample == pytest.approx(z @ matrix @ z, rel=1e-12)
    assert estimate.mean == pytest.approx(estimate.samples.mean())
    expected = estimate.samples.std(ddof=1) / np.sqrt(5)
    assert estimate.standard_error == pytest.approx(expected)
    skewness = scipy.stats.skew(estimate.samples, bias=False)
    assert estimate.skewness == pytest.approx(skewness)
    quantile = scipy.stats.t.ppf(0.975, 4)
    sides = np.full(2, quantile)
    sides[int(skewness > 0)] += abs(skewness) * (1 + 2 * quantile**2) / (6 * 5**0.5)
    np.testing.assert_allclose(
        estimate.interval,
        estimate.mean + (1 + 3 / 5) * expected * sides * [-1, 1],
    )
    assert estimate.num_products == estimate.num_probes == 5


def test_a_diagonal_matrix_has_no_variance_under_signs():
    product = problems.matvec_of(np.diag(EIGENVALUES))
    estimate = curvature.hutchinson_trace(product, params(), 0, num_probes=4)
    np.testing.assert_allclose(estimate.samples, EIGENVALUES.sum(), atol=12 * 9 * EPS)


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
def test_the_variance_is_the_one_of_the_formula(kind):
    matrix, _ = problems.symmetric(EIGENVALUES)
    off = matrix - np.diag(np.diag(matrix))
    variance = 2 * ((off if kind == "rademacher" else matrix) ** 2).sum()
    many = curvature.hutchinson_trace(
        jax.jit(jax.vmap(problems.matvec_of(matrix))),
        params(),
        0,
        num_probes=4000,
        kind=kind,
        block_size=250,
    )
    # The sample variance of 4000 draws: standard error sqrt((kurtosis - 1) / n).
    spread = 5 * np.sqrt((scipy.stats.kurtosis(many.samples) + 2) / 4000)
    assert many.samples.var(ddof=1) == pytest.approx(variance, rel=spread)
    assert abs(many.mean - EIGENVALUES.sum()) < 5 * np.sqrt(variance / 4000)


def test_blocks_of_probes_give_the_samples_of_single_probes():
    matrix, _ = problems.symmetric(EIGENVALUES)
    product = problems.matvec_of(matrix)
    single = curvature.hutchinson_trace(product, params(), 1, num_probes=10)
    traces = []

    def counted(stacked):
        traces.append(1)
        return jax.vmap(product)(stacked)

    block = curvature.hutchinson_trace(
        jax.jit(counted), params(), 1, num_probes=10, block_size=4
    )
    np.testing.assert_allclose(block.samples, single.samples, atol=200 * EPS)
    assert len(traces) == 1


def test_it_stops_at_the_relative_error_asked_for():
    matrix, _ = problems.symmetric(EIGENVALUES + 6)
    product = problems.matvec_of(matrix)
    loose, tight = (
        curvature.hutchinson_trace(
            product, params(), 0, num_probes=500, relative_error=error
        )
        for error in (0.1, 0.03)
    )
    assert loose.converged
    assert tight.converged
    assert 8 <= loose.num_probes < tight.num_probes < 500
    low, high = tight.interval
    assert (high - low) / 2 <= 0.03 * tight.mean
    capped = curvature.hutchinson_trace(
        product, params(), 0, num_probes=10, relative_error=1e-4
    )
    assert capped.converged is False


def test_a_run_goes_on_from_its_samples():
    matrix, _ = problems.symmetric(EIGENVALUES)
    product, seen = problems.matvec_of(matrix), []
    whole = curvature.hutchinson_trace(
        product,
        params(),
        2,
        num_probes=9,
        on_step=lambda state: seen.append(problems.packed(state)),
    )
    state = problems.unpacked(curvature.HutchinsonState, seen[3], params())
    assert state.num_products == 4
    again = curvature.hutchinson_trace(product, params(), 2, num_probes=9, state=state)
    np.testing.assert_array_equal(whole.samples, again.samples)


DOMINATED = np.r_[1000.0, np.full(99, 0.01)]
SPECTRA = {
    "one dominates": DOMINATED,
    "flat": np.linspace(1.0, 1.1, 100),
    "power law": 1000 * np.arange(1, 101) ** -2.0,
    "two signs": np.r_[100.0, -80.0, np.random.default_rng(0).normal(size=98)],
}


def drawn(eigenvalues, kind, num_probes, count, seed=0):
    """Samples of many estimates, without the engine: `[count, num_probes]`."""
    rng = np.random.default_rng(seed)
    _, vectors = problems.symmetric(eigenvalues, seed)
    shape = (count, num_probes, len(eigenvalues))
    normal = rng.normal(size=shape)
    z = np.sign(normal) if kind == "rademacher" else normal
    return ((z @ vectors) ** 2) @ eigenvalues


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
@pytest.mark.parametrize("name", SPECTRA)
def test_intervals_of_skewed_samples_cover(name, kind):
    truth = SPECTRA[name].sum()
    inside = 0
    for samples in drawn(SPECTRA[name], kind, 16, 1000):
        low, high = hutchinson.summarize(samples, num_products=16).interval
        inside += low <= truth <= high
    # 950 expected, with a standard deviation of 7. Without the term for skewness, the
    # spectrum of one eigenvalue has about 905.
    assert inside >= 926


def test_few_skewed_samples_are_said_to_be_few():
    def flagged(eigenvalues, num_probes):
        samples = drawn(eigenvalues, "normal", num_probes, 200)
        found = [hutchinson.summarize(x, num_products=num_probes) for x in samples]
        return np.mean([estimate.too_skewed for estimate in found])

    assert flagged(DOMINATED, 8) > 0.6
    assert flagged(SPECTRA["flat"], 8) < 0.3
    assert flagged(DOMINATED, 16) == 0.0


def test_a_single_probe_claims_no_error():
    product = problems.matvec_of(np.eye(12))
    estimate = curvature.hutchinson_trace(product, params(), 0, num_probes=1)
    assert np.isnan(estimate.standard_error)
    assert estimate.interval == (-np.inf, np.inf)


def test_bad_counts_are_refused():
    product = problems.matvec_of(np.eye(12))
    with pytest.raises(ValueError, match="must be at least 1: got 0 and 1"):
        curvature.hutchinson_trace(product, params(), 0, num_probes=0)
    with pytest.raises(ValueError, match=r"between 0 and 1: got 1\.5"):
        curvature.hutchinson_trace(product, params(), 0, confidence=1.5)


@pytest.mark.parametrize("block_size", [1, 2])
def test_nan_names_probe_and_block(block_size):
    def broken(v):
        nan = jnp.nan * v["encoder"]["layers_0"]["wi"]["kernel"]
        return {**v, "encoder": {"layers_0": {"wi": {"kernel": nan}}}}

    match = "Hutchinson probe 0 must be finite: .* 'encoder/layers_0/wi/kernel'"
    with pytest.raises(curvature.NonFiniteError, match=match):
        curvature.hutchinson_trace(broken, params(), 0, block_size=block_size)
