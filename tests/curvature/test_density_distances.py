"""Jensen-Shannon distances of densities: known distances, metric, jackknife."""

import numpy as np
import pytest
import scipy.integrate
import scipy.spatial.distance
import scipy.stats

from t5x_fwdloss.curvature.estimators import density_distances
from t5x_fwdloss.curvature.estimators.slq import SpectralSamples

LEVEL, WIDTH = 1e-3, 0.2


def samples(*probes):
    """Quadratures of nodes and weights, one pair for each probe."""
    nodes, weights = zip(*probes, strict=True)
    return SpectralSamples(
        [np.array(x, float) for x in nodes],
        [np.array(x, float) for x in weights],
        dimension=9,
        num_products=0,
        num_exhausted=0,
    )


def found(*given):
    return density_distances.density_distances(given, LEVEL, WIDTH)


def test_equal_and_far_densities_have_the_distances_zero_and_one():
    one, other = samples(([1e-2], [1.0])), samples(([1e3], [1.0]))
    distances = found(one, one, other, samples(([-1e-2], [1.0]))).distances
    assert distances[0, 1] == pytest.approx(0, abs=1e-6)
    # Not only magnitudes: a negative eigenvalue is far from the positive one.
    np.testing.assert_allclose(distances[[0, 0, 2], [2, 3, 3]], 1, atol=1e-3)
    np.testing.assert_array_equal(distances, distances.T)


@pytest.mark.parametrize("shift", [0.1, 0.3, 1.0])
def test_two_bells_have_their_distance_by_integration(shift):
    # Far above the level the axis is the decimal logarithm.
    pair = samples(([1.0], [1.0])), samples(([10**shift], [1.0]))
    p, q = scipy.stats.norm(0, WIDTH).pdf, scipy.stats.norm(shift, WIDTH).pdf

    def gain(x):
        parts = [(f(x), (p(x) + q(x)) / 2) for f in (p, q)]
        return sum(a * np.log2(a / m) for a, m in parts if a > 0) / 2

    divergence, _ = scipy.integrate.quad(gain, -3, 4, limit=300)
    assert found(*pair).mean == pytest.approx(np.sqrt(divergence), rel=1e-3)


def test_means_and_jackknife_errors_are_those_of_the_pairs():
    rng = np.random.default_rng(0)
    draw = lambda scale: samples(
        *(
            (np.sort(rng.normal(size=4)) * scale, rng.dirichlet(np.ones(4)))
            for _ in "abc"
        )
    )
    given = [draw(scale) for scale in (0.1, 1.0, 30.0)]
    result = found(*given)

    def distances(probes):
        rows = []
        for x in given:
            bells = [
                w
                @ scipy.stats.norm.pdf(
                    result.grid,
                    np.arcsinh(nodes / (2 * LEVEL))[:, None] / np.log(10),
                    WIDTH,
                )
                for nodes, w in ((x.nodes[i], x.weights[i]) for i in probes)
            ]
            rows.append(np.mean(bells, axis=0))
        js = scipy.spatial.distance.jensenshannon
        return np.array([[js(p, q, base=2) for q in rows] for p in rows]), rows

    expected, rows = distances(range(3))
    np.testing.assert_allclose(result.densities, rows, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.distances, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(result.of_each, expected.sum(axis=1) / 2, rtol=1e-6)
    assert result.mean == pytest.approx(
        expected[np.triu_indices(3, 1)].mean(), rel=1e-6
    )
    without = [distances(x)[0].sum(axis=1) / 2 for x in ([1, 2], [0, 2], [0, 1])]
    error = np.sqrt(2 / 3 * np.sum((np.array(without) - np.mean(without, 0)) ** 2, 0))
    np.testing.assert_allclose(result.of_each_error, error, rtol=1e-5)
    means = np.mean(without, axis=1)
    assert result.mean_error == pytest.approx(np.sqrt(2 * means.var()), rel=1e-5)


def test_a_single_probe_has_no_error():
    result = found(samples(([1.0], [1.0])), samples(([2.0], [1.0])))
    assert np.isnan(result.mean_error)
    assert np.isnan(result.of_each_error).all()
