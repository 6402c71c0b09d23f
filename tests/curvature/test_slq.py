"""Spectral densities: the quadrature's exact degree, known masses, smoothing, resuming."""

import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.estimators import smoothing

from . import problems

EIGENVALUES = np.array([-4, -2.5, -1, -0.1, 0, 0.2, 0.7, 1, 2, 3, 5, 9.0])
MATRIX, VECTORS = problems.symmetric(EIGENVALUES)


def params():
    return problems.unflatten(np.zeros(problems.SIZE))


def probe(key, index):
    return problems.flatten(
        curvature.random_like(curvature.probe_key(key, index), params())
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("num_steps", [1, 2, 4, 6])
def test_quadrature_is_exact_up_to_degree_2k_minus_1(num_steps):
    samples = curvature.slq(
        problems.matvec_of(MATRIX), params(), 0, num_probes=2, num_steps=num_steps
    )
    for index in range(2):
        z = probe(0, index)
        nodes, weights = samples.nodes[index], samples.weights[index]
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        for degree in range(2 * num_steps + 1):
            got = weights @ nodes**degree
            expected = z @ np.linalg.matrix_power(MATRIX, degree) @ z / (z @ z)
            if degree < 2 * num_steps:
                assert got == pytest.approx(expected, rel=1e-10, abs=1e-10)
            else:
                assert got != pytest.approx(expected, rel=1e-8)


@pytest.mark.usefixtures("x64")
def test_a_whole_krylov_space_holds_the_probes_spectral_measure():
    samples = curvature.slq(
        problems.matvec_of(MATRIX), params(), 0, num_probes=3, num_steps=50
    )
    assert samples.num_exhausted == 3
    assert samples.num_products == 36
    for index in range(3):
        np.testing.assert_allclose(samples.nodes[index], EIGENVALUES, atol=1e-10)
        z = probe(0, index)
        np.testing.assert_allclose(
            samples.weights[index], (VECTORS.T @ z) ** 2 / 12, atol=1e-10
        )


@pytest.mark.parametrize(
    ("eigenvalues", "points", "masses"),
    [
        (np.ones(12), [1.0], [1.0]),
        (np.zeros(12), [0.0], [1.0]),
        (np.repeat([2.0, 5.0], [9, 3]), [2.0, 5.0], [0.75, 0.25]),
    ],
    ids=["identity", "zero", "two clusters"],
)
def test_masses_of_known_clusters_are_found(eigenvalues, points, masses):
    matrix, _ = problems.symmetric(eigenvalues)
    samples = curvature.slq(
        problems.matvec_of(matrix), params(), 0, num_probes=30, num_steps=12
    )
    assert samples.num_exhausted == 30
    for point, expected in zip(points, masses, strict=True):
        found, error = curvature.mass(samples, point - 0.1, point + 0.1)
        assert found == pytest.approx(expected, abs=5 * error + 1e-6)
        assert error < 0.05


@pytest.mark.usefixtures("x64")
def test_spectral_sums_are_traces_and_squared_norms():
    samples = curvature.slq(
        problems.matvec_of(MATRIX), params(), 2, num_probes=4, num_steps=3
    )
    product = problems.matvec_of(MATRIX)
    trace = curvature.spectral_sum(samples, lambda x: x)
    plain = curvature.hutchinson_trace(product, params(), 2, num_probes=4)
    np.testing.assert_allclose(trace.samples, plain.samples, rtol=1e-10)
    square = curvature.spectral_sum(samples, np.square)
    sums = curvature.probe_estimates(product, params(), 2, num_probes=4)
    np.testing.assert_allclose(square.samples, sums.square_norm.samples, rtol=1e-10)


def test_a_group_has_the_density_of_its_block():
    mask = curvature.group_mask(params(), "decoder/.*")
    samples = curvature.slq(
        curvature.restricted(problems.matvec_of(MATRIX), mask),
        params(),
        0,
        num_probes=2,
        num_steps=50,
        mask=mask,
    )
    assert samples.dimension == 6
    expected = np.linalg.eigvalsh(MATRIX[:6, :6])
    np.testing.assert_allclose(samples.nodes[0], expected, atol=1e-4)


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 13])
def test_a_killed_run_ends_with_the_same_bits(stop):
    product, saved, steps = problems.matvec_of(MATRIX), {}, []

    def save(state):
        steps.append(1)
        if len(steps) == stop:
            saved["state"] = problems.packed(state)

    options = {"num_probes": 3, "num_steps": 6}
    whole = curvature.slq(product, params(), 1, on_step=save, **options)
    state = problems.unpacked(curvature.SlqState, saved["state"], params())
    calls = []

    def counted(v):
        calls.append(1)
        return product(v)

    again = curvature.slq(counted, params(), 1, state=state, **options)
    assert len(calls) == 18 - stop  # no step is taken twice
    for one, other in zip(whole.nodes, again.nodes, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(whole.weights, again.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert whole.num_products == again.num_products


def known():
    """Two probes of made-up quadratures."""
    return curvature.SpectralSamples(
        nodes=[np.array([-1.0, 2.0]), np.array([-1.0, 0.5, 2.0])],
        weights=[np.array([0.25, 0.75]), np.array([0.5, 0.0, 0.5])],
        dimension=100,
        num_products=5,
        num_exhausted=0,
    )


def test_a_density_is_the_mean_of_its_gaussians():
    found = curvature.density(known(), np.array([0.0, 2.0]), width=0.5)
    gauss = lambda x: np.exp(-0.5 * (x / 0.5) ** 2) / (0.5 * np.sqrt(2 * np.pi))
    at_zero = [
        0.25 * gauss(1) + 0.75 * gauss(2),
        0.5 * gauss(1) + 0.5 * gauss(2),
    ]
    assert found.mean[0] == pytest.approx(np.mean(at_zero))
    assert found.standard_error[0] == pytest.approx(
        np.std(at_zero, ddof=1) / np.sqrt(2)
    )
    half = 12.7062047364 * found.standard_error[0]  # Student's t, one degree, 95 %
    assert found.high[0] == pytest.approx(found.mean[0] + half)
    assert found.low[0] == max(found.mean[0] - half, 0)
    np.testing.assert_allclose(np.exp(found.log_mean), found.mean)


@pytest.mark.parametrize("width", [None, 0.01, 0.3])
def test_a_density_integrates_to_one(width):
    found = curvature.density(
        known(), smoothing.default_grid(known(), width or 0.03, 5000), width=width
    )
    assert np.trapezoid(found.mean, found.grid) == pytest.approx(1, abs=1e-4)


def test_the_log_density_does_not_underflow():
    found = curvature.density(known(), np.array([100.0]), width=0.1)
    assert found.mean[0] == 0.0
    expected = -0.5 * (98 / 0.1) ** 2 + np.log(0.625 / (0.1 * np.sqrt(2 * np.pi)))
    assert found.log_mean[0] == pytest.approx(expected, rel=1e-9)


def test_magnitudes_are_seen_on_a_logarithmic_axis():
    logs = curvature.log_magnitudes(known(), 1e-10)
    np.testing.assert_allclose(
        logs.nodes[1], [np.log10(0.5), 0, np.log10(2)], atol=1e-9
    )
    np.testing.assert_array_equal(logs.weights[1], [0.0, 0.5, 0.5])
    zero = curvature.SpectralSamples([np.zeros(1)], [np.ones(1)], 3, 1, 1)
    np.testing.assert_allclose(curvature.log_magnitudes(zero, 1e-4).nodes[0], -4)
    with pytest.raises(ValueError, match=r"epsilon must be positive: got 0"):
        curvature.log_magnitudes(known(), 0.0)


def test_a_single_point_spectrum_still_has_a_width():
    zero = curvature.SpectralSamples([np.zeros(1)], [np.ones(1)], 3, 1, 1)
    found = curvature.density(zero)
    assert np.isfinite(found.mean).all()
    assert np.trapezoid(found.mean, found.grid) == pytest.approx(1, abs=1e-3)
    assert np.isnan(found.standard_error).all()


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match=r"width must be positive: got -1\.0"):
        curvature.density(known(), width=-1.0)
    none = curvature.SpectralSamples([], [], 3, 0, 0)
    with pytest.raises(ValueError, match="at least one probe: got none"):
        curvature.density(none)
    with pytest.raises(ValueError, match="must be at least 1: got 0 and 60"):
        curvature.slq(problems.matvec_of(MATRIX), params(), 0, num_probes=0)


NULL_SPACES = {
    "rank 40 of 400": (np.r_[np.zeros(360), np.linspace(187.0, 693.0, 40)], 0, 0.9),
    "zero": (np.zeros(400), 0, 1),
    "positive": (np.linspace(1.0, 2.0, 400), 0, 0),
    "two signs": (np.r_[np.zeros(200), -np.ones(80), np.full(120, 3.0)], 0.2, 0.5),
    "negative": (-np.r_[np.zeros(100), np.full(300, 1e-6)], 0.75, 0.25),
}


@pytest.mark.parametrize(
    ("eigenvalues", "negative", "zero"), NULL_SPACES.values(), ids=NULL_SPACES
)
def test_rounding_in_the_null_space_is_zero_and_not_negative(
    eigenvalues, negative, zero
):
    matrix, _ = problems.symmetric(eigenvalues)
    like = problems.unflatten(np.zeros(400), shapes={"kernel": (20, 20)})
    samples = curvature.slq(
        problems.matvec_of(matrix), like, 0, num_probes=6, num_steps=44
    )
    eps = float(np.finfo(np.float32).eps)
    level = curvature.zero_level(samples, eps)
    scale = np.abs(eigenvalues).max()
    assert level <= 10 * eps * np.sqrt(44) * scale * (1 + 1e-4)
    parts = curvature.signs(samples, level)
    for (found, error), expected in zip(parts, (negative, zero), strict=True):
        assert found == pytest.approx(expected, abs=4 * error + 1e-6)
        assert error < 0.05
    # A measured rounding error of the products takes the place of a smaller one.
    assert curvature.zero_level(samples, eps, 0.5) == pytest.approx(
        0.5 * scale, rel=1e-5
    )


def test_signs_are_taken_beyond_the_level_only():
    found, zero = curvature.signs(known(), 1.0)
    assert (found[0], zero[0]) == (0.0, pytest.approx((0.25 + 0.5) / 2))
    found, zero = curvature.signs(known(), 0.9)
    assert (found[0], zero[0]) == (pytest.approx((0.25 + 0.5) / 2), 0.0)
    assert found[1] == pytest.approx(0.125)
