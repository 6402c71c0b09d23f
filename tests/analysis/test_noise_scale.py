"""The gradient noise scale: unbiased, with errors that cover, or refused."""

import json

import jax
import numpy as np
import pytest

from t5x_fwdloss.analysis import GradientNoiseScale
from t5x_fwdloss.analysis.measurements.noise_scale import estimates

from . import runs, toy


def rows_of(gradients, weights, matrix):
    """What the estimates are given, for written-out gradients of shares."""
    mean = gradients.sum(axis=0)
    e = gradients - weights[:, None] * mean
    weighted, image = weights @ e, matrix @ mean
    moved = e @ matrix
    return np.stack(
        [
            (e * moved).sum(axis=1),
            moved @ weighted,
            e @ image,
            np.full(len(weights), mean @ image),
        ],
        axis=1,
    )


def test_equal_batches_give_the_formula_of_two_batch_sizes():
    rng = np.random.default_rng(0)
    m, b = 6, 16.0
    means = rng.normal(size=(m, 5)) + 1
    weights = np.full(m, 1 / m)
    found = estimates(weights, rows_of(means / m, weights, np.eye(5)), b)[0]
    small, large = (means**2).sum(axis=1).mean(), (means.mean(axis=0) ** 2).sum()
    variance = (small - large) / (1 / b - 1 / (m * b))
    square = (m * b * large - b * small) / (m * b - b)
    np.testing.assert_allclose(found, (variance, square), rtol=1e-12)


@pytest.mark.parametrize("equal", [True, False])
def test_both_parts_are_unbiased_and_the_jackknife_has_the_size_of_their_error(equal):
    rng = np.random.default_rng(1)
    draws, m, b, dim = 4000, 8, 3, 4
    truth, root = np.array([1.0, -0.5, 0.2, 0.0]), np.diag([1.0, 0.5, 2.0, 0.1])
    matrix = np.diag([2.0, 1.0, 0.5, -0.3])
    found = []
    for _ in range(draws):
        # Tokens in each sequence, by which batches are normalized.
        tokens = np.ones((m, b)) if equal else rng.integers(4, 9, (m, b)).astype(float)
        noise = rng.normal(size=(m, b, dim)) @ root
        sums = (tokens[..., None] * (truth + noise)).sum(axis=1)
        weights = tokens.sum(axis=1) / tokens.sum()
        found.append(
            estimates(weights, rows_of(sums / tokens.sum(), weights, matrix), float(b))
        )
    found = np.stack(found)
    # Of the mean of a batch: weights that differ make it vary more.
    factor = 1.0 if equal else np.mean([4, 5, 6, 7, 8]) ** -2 * 38.0
    expected = np.trace(matrix @ root @ root) * factor, truth @ matrix @ truth
    for number, value in enumerate(expected):
        values, without = found[:, 0, number], found[:, 1:, number]
        error = values.std() / np.sqrt(draws)
        bias = 0.0 if equal else 0.02 * abs(value)  # a ratio's, of second order
        assert values.mean() == pytest.approx(value, abs=4 * error + bias)
        scatter = without - without.mean(axis=1, keepdims=True)
        jackknife = (m - 1) / m * (scatter**2).sum(axis=1)
        assert jackknife.mean() == pytest.approx(values.var(), rel=0.3)


def results(path, batches, params=None, **settings):
    status = runs.run(
        path,
        objective=runs.objective(batches),
        params=params or toy.parameters(),
        measurements=[GradientNoiseScale(**settings)],
    )
    assert status == 0
    (entry,) = json.loads((path / "results.json").read_text())["measurements"]
    return entry


def test_two_batches_have_a_value_and_no_error(tmp_path):
    entry = results(tmp_path, toy.batches(6))
    for number in entry["results"].values():
        assert number["error"] is None
        assert number["error_kind"] == "unknown: the jackknife needs three batches"


def test_batches_of_padding_are_none(tmp_path):
    batches = toy.batches(3)
    empty = {k: np.zeros_like(x) for k, x in batches[0].items()}
    plain = results(tmp_path / "plain", batches)
    with_padding = results(tmp_path / "padded", [*batches[:2], empty, *batches[2:]])
    assert plain["results"].keys() == with_padding["results"].keys()
    for name, number in plain["results"].items():
        found = with_padding["results"][name]
        assert found["value"] == pytest.approx(number["value"], rel=1e-4)
        assert found["error"] == pytest.approx(number["error"], rel=1e-3)


@pytest.mark.parametrize("size", [12, 6])
def test_fewer_than_two_batches_are_refused_before_anything_is_compiled(size, tmp_path):
    batches = toy.batches(size)
    for batch in batches[1:]:
        batch["decoder_loss_weights"][:] = 0.0
    objective = runs.objective(batches)
    with pytest.raises(ValueError, match="at least two batches .* got 1; raise NUM_BA"):
        runs.run(tmp_path, objective=objective, measurements=[GradientNoiseScale()])
    assert not objective.num_traces
    assert not list(tmp_path.iterdir())


def test_a_denominator_that_may_be_zero_leaves_a_note_and_no_scale(tmp_path):
    # Every label once: where all classes are about as likely, the mean gradient is small.
    first = toy.batches(6)[0]
    batches = [
        first
        | {"decoder_target_tokens": (first["decoder_target_tokens"] + i) % toy.CLASSES}
        for i in range(toy.CLASSES)
    ]
    small = jax.tree.map(lambda x: 0.03 * x, toy.parameters())
    entry = results(tmp_path, batches, small, with_hessian=False)
    assert entry["results"]["squared_gradient"]["value"] <= 0
    assert not [name for name in entry["results"] if "noise_scale" in name]
    (note,) = [x for x in entry["notes"] if "left out" in x]
    assert "squared_gradient is not positive" in note
    assert entry["results"]["gradient_variance"]["value"] > 0
