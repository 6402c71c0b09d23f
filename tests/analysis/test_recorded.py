"""What is recorded of parameters, of numbers that are not finite, and of convergence."""

import json
import math

import jax.numpy as jnp
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from t5x_fwdloss.analysis import Trace
from t5x_fwdloss.analysis.measurements.rounding import with_rounding
from t5x_fwdloss.analysis.numbers import MeasurementResult, Number
from t5x_fwdloss.analysis.report import events

from . import runs, toy


def test_parameters_are_recorded_as_the_checkpoint_has_them(tmp_path):
    params = toy.parameters(dtype=jnp.bfloat16) | {"count": jnp.ones(2, jnp.int32)}
    measured = [Trace(num_probes=2, block_size=2)]
    assert runs.run(tmp_path, params=params, measurements=measured) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["model"]["parameter_dtypes"] == ["bfloat16"]
    assert document["parameters_left_out"] == ["count"]
    assert document["num_parameters"] == (toy.FEATURES + 1) * toy.CLASSES
    page = (tmp_path / "report.html").read_text()
    assert "<dt>Parameters</dt><dd>16, bfloat16</dd>" in page
    assert "<dt>Left out</dt><dd>count</dd>" in page


def test_events_leave_out_what_is_not_finite(tmp_path):
    numbers = {
        "good": Number(0.5, "nat", math.inf),
        "bad": Number(math.nan, "nat", 0.25),
        "worse": Number(math.inf, "nat"),
    }
    results = [MeasurementResult("m", "M", {}, numbers)]
    events.write(tmp_path, {7: events.scalars(results)})
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["tensors"]) == {"m/good", "m/bad/error"}
    assert [x.step for x in found.Tensors("m/good")] == [7]


@pytest.mark.parametrize(("excess", "converged"), [(0.99, True), (1.01, False)])
def test_a_trace_is_as_precise_as_asked_only_with_its_rounding(
    tmp_path, excess, converged
):
    """Half the interval, rounding included, is compared with what was asked for."""
    measured = Trace(num_probes=8, relative_error=0.5)
    context = runs.context(tmp_path)
    plain = measured.run(context).numbers["trace"]
    low, high = plain.interval
    wanted = measured.relative_error * plain.value
    error = excess * wanted - (high - low) / 2
    assert plain.converged
    assert error > 0

    class Rounding:
        notes = ()

        def include(self, numbers, at):
            return {k: with_rounding(x, error, "bfloat16") for k, x in numbers.items()}

    vars(context)["rounding"] = Rounding()
    assert measured.run(context).numbers["trace"].converged == converged
