"""What a reader is told that the loss is divided by, and the loss that it makes."""

import json

import jax
import numpy as np
import oracles
import pytest

from t5x_fwdloss.analysis import DirectionalDerivatives

from . import runs, toy

SIZE = 12  # sequences


def token_losses():
    """The loss of every token, in float64."""
    params, whole = toy.parameters(dtype=np.float64), toy.examples(SIZE)
    x = whole["features"].astype(float)
    logits = x @ np.asarray(params["dense"]["kernel"]) + params["dense"]["bias"]
    loss, _ = oracles.token_loss(logits, whole["decoder_target_tokens"], 0.0, 0.0)
    return np.asarray(loss)


CASES = {
    None: ("nat", "not divided by anything"),
    7.0: ("nat/constant", "the sum over all tokens, divided by the constant"),
    "NUM_REAL_TARGET_TOKENS": ("nat/token", "divided by their total weight"),
    "NUM_TOTAL_TARGET_TOKENS": (
        "nat/position",
        "divided by the number of target positions, padding included",
    ),
    "AVERAGE_PER_SEQUENCE": (
        "nat/token",
        "the mean over tokens within each sequence, averaged over",
    ),
}


@pytest.mark.parametrize("factor", CASES)
def test_a_loss_is_divided_by_what_its_words_say(tmp_path, factor):
    weights = toy.examples(SIZE)["decoder_loss_weights"].astype(float)
    with jax.enable_x64(True):
        losses = weights * token_losses()
    lengths, total = weights.sum(axis=1), losses.sum()
    assert len(set(lengths)) > 1  # or a mean of means is the mean
    total, normalizer = {
        None: (total, 1),
        7.0: (total, 7),
        "NUM_REAL_TARGET_TOKENS": (total, lengths.sum()),
        "NUM_TOTAL_TARGET_TOKENS": (total, weights.size),
        "AVERAGE_PER_SEQUENCE": ((losses.sum(axis=1) / lengths).sum(), len(weights)),
    }[factor]
    measured = DirectionalDerivatives(num_random=0, num_points=0)
    objective = runs.objective(factor=factor)
    assert runs.run(tmp_path, objective=objective, measurements=[measured]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    loss = document["measurements"][0]["results"]["loss"]
    assert loss["value"] == pytest.approx(total / normalizer, rel=1e-5)
    unit, words = CASES[factor]
    found = document["normalizer"]
    assert loss["unit"] == found["unit"] == unit
    assert found["W"] == pytest.approx(normalizer, rel=1e-6)
    assert words in found["words"]
    assert f"W = {normalizer:g}" in found["words"]
    page = (tmp_path / "report.html").read_text()
    assert f"The loss is {found['words']}." in page
