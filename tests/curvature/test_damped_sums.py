"""Effective dimension and log-determinant: exact for each probe within its two bounds."""

import dataclasses

import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.estimators import damped_sums
from t5x_fwdloss.curvature.krylov.lanczos import lanczos

from . import problems

pytestmark = pytest.mark.usefixtures("x64")
EIGENVALUES = np.array([0, 0, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.7, 1, 3, 20, 90.0])
MATRIX, VECTORS = problems.symmetric(EIGENVALUES)
SUMS = {
    "dimension": (damped_sums.effective_dimension, lambda x, a: x / (x + a)),
    "determinant": (damped_sums.log_determinant, lambda x, a: np.log(x + a)),
}


def like():
    return problems.unflatten(np.zeros(problems.SIZE))


def sampled(num_steps, num_probes=4, matrix=MATRIX):
    product = problems.matvec_of(matrix)
    return curvature.slq(product, like(), 0, num_probes=num_probes, num_steps=num_steps)


def of_probes(function, num_probes):
    """z^T f(A) z for each probe, from the eigenvectors."""
    found = []
    for index in range(num_probes):
        z = problems.flatten(
            curvature.random_like(curvature.probe_key(0, index), like())
        )
        found.append(((VECTORS.T @ z) ** 2 * function(EIGENVALUES)).sum())
    return np.array(found)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("num_steps", [1, 2, 4, 6])
def test_the_truth_of_each_probe_lies_between_the_quadratures(name, damping, num_steps):
    estimate, function = SUMS[name]
    truth = of_probes(lambda x: function(x, damping), 4)
    samples = sampled(num_steps)
    for index, value in enumerate(truth):
        one = dataclasses.replace(
            samples,
            nodes=samples.nodes[index : index + 1],
            weights=samples.weights[index : index + 1],
        )
        found = estimate(one, damping)
        assert found.half_gap > 0
        assert abs(found.value - value) <= found.half_gap + 1e-9
        assert np.isnan(found.standard_error)


@pytest.mark.parametrize("name", SUMS)
def test_the_estimate_is_the_mean_over_probes_with_its_standard_error(name):
    estimate, function = SUMS[name]
    truth = of_probes(lambda x: function(x, 0.1), 30)
    found = estimate(sampled(9, num_probes=30), 0.1)
    assert found.half_gap < 1e-3
    assert found.value == pytest.approx(truth.mean(), abs=found.half_gap + 1e-9)
    error = truth.std(ddof=1) / np.sqrt(30)
    assert found.standard_error == pytest.approx(error, rel=1e-3)
    whole = function(EIGENVALUES, 0.1).sum()
    assert found.value == pytest.approx(whole, abs=4 * found.standard_error)


@pytest.mark.parametrize("name", SUMS)
def test_a_whole_krylov_space_leaves_no_gap(name):
    estimate, function = SUMS[name]
    found = estimate(sampled(50), 0.01)
    assert found.half_gap == 0.0
    truth = of_probes(lambda x: function(x, 0.01), 4)
    assert found.value == pytest.approx(truth.mean(), rel=1e-8)


def test_a_larger_bound_of_the_spectrum_narrows_the_gap():
    shifted = sampled(4, matrix=MATRIX + 0.5 * np.eye(problems.SIZE))
    wide = damped_sums.log_determinant(shifted, 0.1)
    narrow = damped_sums.log_determinant(shifted, 0.1, low=0.5)
    assert 0 < narrow.half_gap < 0.5 * wide.half_gap
    truth = of_probes(lambda x: np.log(x + 0.6), 4).mean()
    assert abs(narrow.value - truth) <= narrow.half_gap


def test_the_quadratures_are_those_of_lanczos_itself():
    z = problems.unflatten(np.random.default_rng(2).normal(size=problems.SIZE))
    result = lanczos(problems.matvec_of(MATRIX), z, num_steps=7)
    nodes, weights = curvature.estimators.slq.quadrature(result)
    alphas, betas = damped_sums.jacobi(nodes, weights)
    np.testing.assert_allclose(alphas, result.alphas, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(betas, result.betas[:-1], rtol=1e-9, atol=1e-12)
    fixed, shares = damped_sums.radau(nodes, weights, -0.1)
    assert fixed[0] == pytest.approx(-0.1, abs=1e-12)
    for degree in range(13):  # 2k - 2, one less than the Gauss quadrature
        moment = weights @ nodes**degree
        assert shares @ fixed**degree == pytest.approx(moment, rel=1e-9)
    # Of degree 13, zero at its nodes alone.
    last = lambda x: (x + 0.1) * np.prod((x[:, None] - fixed[1:]) ** 2, axis=1)
    assert weights @ last(nodes) > 1e6 * abs(shares @ last(fixed))


def test_a_damping_within_rounding_of_zero_is_refused():
    with pytest.raises(
        ValueError, match="must be above .* by rounding, 0.01: got 0.005"
    ):
        damped_sums.effective_dimension(sampled(4), 0.005, level=0.01)
