"""SIGTERM at any step: the run saves and leaves, and ends with the same numbers later."""

import functools
import signal

import numpy as np
import pytest
import stops

from t5x_fwdloss.analysis import (
    Diagonal,
    Eigenpairs,
    GroupTraces,
    LossComparison,
    SpectralDensity,
    Trace,
    preemption,
)

from . import runs

MEASUREMENTS = [
    Eigenpairs(num_largest=1, num_smallest=0, max_steps=6),
    SpectralDensity(num_probes=2, num_steps=3),
    Trace(num_probes=4, block_size=2),
    Trace(name="xtrace", num_probes=2, estimator="xtrace"),
    GroupTraces(num_probes=2, block_size=1),
    Diagonal(num_probes=2, block_size=1),
    LossComparison(num_rounds=0),
]


def arrays(folder):
    return {
        f"{path.name}/{name}": found[name]
        for path in sorted(folder.glob("*.npz"))
        for found in [np.load(path)]
        for name in found.files
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert runs.run(folder, measurements=MEASUREMENTS) == 0
    return arrays(folder)


def test_a_run_that_is_told_to_leave_saves_and_goes_on_later(
    undisturbed, tmp_path, monkeypatch, caplog
):
    before = signal.getsignal(signal.SIGTERM)
    # Fewer steps a start than the eigenpairs need, which end because they are saved, and
    # sometimes as many as the comparison, which keeps nothing.
    for number in range(40):
        with monkeypatch.context() as patch:
            stops.signal_at(2 + number % 3, patch.setattr)
            # Nothing is due: what is found later was saved on leaving.
            status = runs.run(tmp_path, measurements=MEASUREMENTS)
        assert signal.getsignal(signal.SIGTERM) == before
        if status == 0:
            break
        assert status == preemption.STATUS == 143
        assert "start the same command again to resume" in caplog.text
        assert not (tmp_path / "results.json").exists()
    assert status == 0
    assert number > 5
    found = arrays(tmp_path)
    assert set(found) == set(undisturbed)
    for name, value in undisturbed.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(("is_primary", "times"), [(True, [30, 60, 100]), (False, [])])
def test_a_state_is_saved_when_its_time_has_come(
    tmp_path, monkeypatch, is_primary, times
):
    now, saved = 0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    context = runs.context(tmp_path, save_seconds=30, is_primary=is_primary)
    for now in (10, 20, 30, 40, 60, 70, 80, 100):
        context.step(functools.partial(saved.append, now))
    assert saved == times


@pytest.mark.parametrize(("seconds", "number"), [(0, 6), (runs.NEVER, 0)])
def test_a_run_saves_as_often_as_it_is_told(tmp_path, monkeypatch, seconds, number):
    saved = []
    monkeypatch.setattr(
        "t5x_fwdloss.analysis.store.saved_state.SavedState.save",
        lambda *args: saved.append(args),
    )
    runs.run(tmp_path, measurements=MEASUREMENTS[:1], save_seconds=seconds)
    assert len(saved) == number


def test_a_second_signal_is_not_held_back():
    with preemption.listening():
        signal.raise_signal(signal.SIGTERM)
        assert preemption.told()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not preemption.told()
