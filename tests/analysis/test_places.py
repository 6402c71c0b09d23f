"""Eigenvalues, their places and traces of given matrices, as `results.json` says them."""

import json

import numpy as np
import pytest
import scipy.stats

from t5x_fwdloss.analysis import Eigenpairs, Trace
from t5x_fwdloss.analysis.measurements import Context

from . import runs, toy

SIZE = (toy.FEATURES + 1) * toy.CLASSES
EPS = float(np.finfo(np.float32).eps)


def matrix_of(eigenvalues):
    rng = np.random.default_rng(0)
    vectors, _ = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))
    return (vectors * eigenvalues) @ vectors.T


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """What a run writes of a matrix with the given eigenvalues."""

    def run(eigenvalues, measurement):
        product = toy.product_with(matrix_of(eigenvalues).astype(np.float32))
        monkeypatch.setattr(Context, "product", lambda *_: product)
        assert runs.run(tmp_path / "run", measurements=[measurement]) == 0
        document = json.loads((tmp_path / "run" / "results.json").read_text())
        return document["measurements"][0]

    return run


def values_of(found, end):
    return [x for name, x in found["results"].items() if name.startswith(f"{end}_")]


def test_multiplicities_are_listed_in_their_places(measured):
    found = measured(
        np.repeat([1.0, 2.0, 7.0], [4, 9, 3]),
        Eigenpairs(num_largest=5, num_smallest=2),
    )
    largest, smallest = values_of(found, "largest"), values_of(found, "smallest")
    np.testing.assert_allclose(
        [x["value"] for x in largest], [7, 7, 7, 2, 2], rtol=1e-5
    )
    np.testing.assert_allclose([x["value"] for x in smallest], [1, 1], rtol=1e-5)
    assert all(x["converged"] for x in largest + smallest)
    assert found["converged"]
    assert not any("settled" in note for note in found["notes"])


def test_places_left_open_are_not_converged_and_named(measured):
    found = measured(
        np.repeat([1.0, 2.0, 7.0], [4, 9, 3]),
        Eigenpairs(num_largest=3, num_smallest=0, max_steps=3),
    )
    values = [x["value"] for x in values_of(found, "largest")]
    np.testing.assert_allclose(values, [7, 2, 1], rtol=1e-5)
    converged = [x["converged"] for x in values_of(found, "largest")]
    assert converged == [True, False, False]
    assert not found["converged"]
    (note,) = [note for note in found["notes"] if "settled" in note]
    assert note.startswith(
        "Places that are not settled after 3 steps: largest_2, largest_3."
    )
    assert not any("Not converged" in note for note in found["notes"])


def test_the_small_end_is_converged_by_its_own_magnitude(measured, tmp_path):
    eigenvalues = np.r_[1000.0, 300, 90, 30, 9, np.linspace(-0.2, 0.2, 10), -0.5]
    settings = {"num_largest": 2, "num_smallest": 2, "tolerance": 1e-2}
    found = measured(eigenvalues, Eigenpairs(**settings, max_steps=7))
    with np.load(tmp_path / "run" / "hessian_eigenpairs.npz") as arrays:
        allowed = arrays["allowed"]
    ends = values_of(found, "largest") + values_of(found, "smallest")
    values = np.array([x["value"] for x in ends])
    level = 10 * EPS * np.sqrt(7) * 1000
    np.testing.assert_allclose(allowed, 1e-2 * np.abs(values) + level, rtol=1e-3)
    for x, bound in zip(ends, allowed, strict=True):
        assert not x["converged"] or x["error"] <= bound
    # The second smallest is not there yet. Its residual is below 1e-2 of the largest.
    assert ends[3]["error"] < 1e-2 * 1000
    assert not ends[3]["converged"]
    assert "smallest_2" in found["notes"][0]


def test_a_dominated_trace_has_an_interval_with_a_longer_side(measured, tmp_path):
    eigenvalues = np.r_[1000.0, np.full(SIZE - 1, 0.01)]
    settings = {"num_probes": 8, "block_size": 1, "kind": "normal"}
    found = measured(eigenvalues, Trace(**settings))
    with np.load(tmp_path / "run" / "hessian_trace.npz") as arrays:
        skewness = scipy.stats.skew(arrays["samples"], bias=False)
    assert skewness > 1
    trace = found["results"]["trace"]
    low, high = trace["interval"]
    quantile = 2.3646242516  # Student's, seven degrees of freedom
    longer = quantile + skewness * (1 + 2 * quantile**2) / (6 * 8**0.5)
    assert trace["value"] - low == pytest.approx(1.375 * quantile * trace["error"])
    assert high - trace["value"] == pytest.approx(1.375 * longer * trace["error"])
    assert low <= eigenvalues.sum() <= high
    (note,) = found["notes"]
    assert f"may still be too short: trace (skewness {skewness:.1f})" in note
