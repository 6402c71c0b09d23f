"""What a run says of batches that are cut into microbatches names what it counts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    LossComparison,
    Objective,
    Trace,
)
from t5x_fwdloss.analysis.objective.finite import NonFiniteLossError

from . import runs, toy

PIECES = 2


def objective(batches=None):
    """Two batches of six examples, each in two pieces of three."""
    model = toy.SoftmaxRegression(factor="NUM_REAL_TARGET_TOKENS")
    batches = toy.batches(6) if batches is None else batches
    return Objective.from_model(model, batches, num_microbatches=PIECES)


def test_results_count_microbatches_as_such(tmp_path):
    measured = [
        DirectionalDerivatives(num_random=0, num_points=0),
        Trace(num_probes=2, block_size=2),
        LossComparison(num_rounds=0),
    ]
    assert runs.run(tmp_path, objective=objective(), measurements=measured) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    sentence = document["products"]["hessian"]
    assert sentence.startswith("4 of 4 microbatches linearized, ")
    assert sentence in (tmp_path / "report.html").read_text()
    # What is about whole batches says so, with their number.
    assert document["num_batches"] == 2
    assert document["batch_shapes"]["decoder_target_tokens"] == [6, toy.LENGTH]
    directions, _, comparison = document["measurements"]
    assert directions["results"]["loss_spread_over_batches"]["count"] == 2
    assert comparison["notes"][0] == (
        "Memory and time are those of one microbatch; the number per batch is 2."
    )


def test_a_measurement_that_is_stopped_names_batch_and_microbatch(tmp_path, capsys):
    class Breaks(Trace):
        def run(self, context):
            """As if the fourth piece alone had a token without a finite derivative."""
            spoilt = toy.batches(6)
            spoilt[1]["features"][4, 0, 0] = np.inf
            context.objective = objective(spoilt)
            context._linear = None
            return super().run(context)

    measured = [Breaks(num_probes=2, block_size=2)]
    assert runs.run(tmp_path, objective=objective(), measurements=measured) == 1
    (failed,) = json.loads((tmp_path / "results.json").read_text())["measurements"]
    sentence = "must be finite: microbatch 1 of batch 1 gives nan in dense/bias"
    assert sentence in failed["reason"]
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize("derivative", ["gradient", "jvp", "value"])
@pytest.mark.parametrize("exchanged", [False, True], ids=["", "another loss"])
def test_every_derivative_names_the_piece_or_the_whole_batch(derivative, exchanged):
    spoilt = toy.batches(6)
    spoilt[1]["features"][0, 0, 0] = np.inf
    found, params = objective(spoilt), toy.parameters()
    if exchanged:
        found = found.with_model(toy.SoftmaxRegression(factor=found.W, impl="autodiff"))
        assert found.batches_hash == objective(spoilt).batches_hash
    ones = jax.tree.map(jnp.ones_like, params)
    calls = {
        "gradient": (lambda: found.gradient(params), "microbatch 0 of batch 1 gives"),
        "jvp": (lambda: found.jvp(params, ones), "microbatch 0 of batch 1 gives"),
        # Summed over the pieces before it is looked at.
        "value": (lambda: found.value(params), "finite: batch 1 gives"),
    }
    call, sentence = calls[derivative]
    with pytest.raises(NonFiniteLossError, match=sentence):
        call()
