"""When a run is probed, what it writes, what a probe costs, and numbers that are not finite."""

import math

import numpy as np
import pytest

from t5x_fwdloss.training.along_update import AlongUpdate, scalars
from t5x_fwdloss.training.probes import Probes
from t5x_fwdloss.training.quantity import ProbedStep

FINITE = AlongUpdate(*map(np.float32, (5.0, -2.0, 1.0, 3.25, 8.0, 7)))


def step(learning_rate):
    return ProbedStep((), (), (), (), learning_rate, lambda: None)


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def written():
    return {}


class Given:
    """A quantity that returns what the test says."""

    found = FINITE

    def prepare(self, compiled):
        """Compiles nothing."""

    def measure(self, step):
        found = self.found() if callable(self.found) else self.found
        return scalars(found, step.learning_rate)


@pytest.fixture
def quantity():
    return Given()


@pytest.fixture
def probes(clock, written, quantity):
    return Probes(3, written.__setitem__, [quantity], clock)


def test_every_third_step_is_due(probes):
    assert [step for step in range(1, 10) if probes.is_due(step)] == [3, 6, 9]


def test_numbers_go_out_with_their_tags_at_their_step(probes, clock, written):
    with probes.training():
        clock.passes(1)
        probes.run(6, step(0.5))
    assert written[6] == {
        "curvature/loss": 5.0,
        "curvature/slope": -2.0,
        "curvature/curvature": 1.0,
        "curvature/predicted_change": -1.5,
        "curvature/actual_change": -1.75,
        "curvature/multiple_of_least_loss": 2.0,
        "curvature/multiple_of_return": 4.0,
        "curvature/directional_sharpness": 1.0,
        "curvature/critical_multiple": 8.0,
        "curvature/critical_sharpness": 0.5,
        "curvature/forward_passes": 7.0,
        "curvature/probe_seconds": 0.0,
        "curvature/share_of_time": 0.0,
    }


def test_the_cost_is_a_share_of_training_time_without_what_lies_between(
    probes, clock, written, quantity
):
    def measured(number, seconds):
        quantity.found = lambda: clock.passes(seconds) or FINITE
        probes.run(number, step(None))

    with probes.training():
        clock.passes(6)
        measured(3, 2)
        clock.passes(5)
    clock.passes(1000)  # an evaluation
    with probes.training():
        clock.passes(4)
        measured(6, 1)
    costs = [
        (
            written[step]["curvature/probe_seconds"],
            written[step]["curvature/share_of_time"],
        )
        for step in (3, 6)
    ]
    assert costs == [(2, 2 / 8), (1, 1 / 10)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_logged_and_named_and_not_written(
    clock, written, caplog, value
):
    broken, whole = Given(), Given()
    broken.found = AlongUpdate(5.0, -2.0, value, 3.0, 1.0, 5)
    whole.measure = lambda _: {"other": 7.0}
    probes = Probes(3, written.__setitem__, [broken, whole], clock)
    with probes.training():
        clock.passes(1)
        probes.run(3, step(0.1))
    assert set(written[3]) == {
        f"curvature/{name}" for name in ("probe_seconds", "share_of_time", "other")
    }
    (record,) = [x for x in caplog.records if x.levelname == "ERROR"]
    assert record.getMessage() == (
        f"The curvature probe of step 3 must give finite numbers: got curvature {value}, "
        f"predicted_change {value}; what was measured with them is not written, and "
        "training goes on."
    )
