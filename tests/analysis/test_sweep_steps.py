"""Which checkpoints a sweep measures, waits for, and refuses; its threshold."""

import json
import re
import signal
import threading
import time

import jax
import pytest

from t5x_fwdloss.analysis import Eigenpairs
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.analysis.report.tables import spaced
from t5x_fwdloss.analysis.sweep import page as sweep_page
from t5x_fwdloss.analysis.sweep import steps as checkpoint_steps

from . import runs, sweeps

OVER = {"follow": False, "train_steps": None}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("all", [5, 10, 15, 20]),
        ("every 10", [10, 20]),
        ([15, 5, 15], [5, 15]),
        ((20,), [20]),
    ],
)
def test_the_chosen_steps(chosen, expected):
    assert checkpoint_steps.select(chosen, [5, 10, 15, 20], "here") == expected


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ([], "CHECKPOINT_STEPS must be a list that is not empty"),
        ("some", "CHECKPOINT_STEPS must be 'all' or 'every N'"),
        ("every 0", "CHECKPOINT_STEPS must be 'all' or 'every N'"),
        (7, "CHECKPOINT_STEPS must be"),
        ([-1], r"CHECKPOINT_STEPS\[0\] must be a whole number of at least 0"),
        ([100, 150], r"got 150, and there are 100, 200, 300\."),
        ("every 70", r"got 'every 70', and there are 100, 200, 300\."),
    ],
)
def test_steps_that_are_refused(tmp_path, chosen, words):
    model_dir = sweeps.model_folder(tmp_path / "model")
    with pytest.raises(ValueError, match=words) as caught:
        checkpoint_steps.check(model_dir, chosen, output_dir=tmp_path / "out", **OVER)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model/checkpoint_100", "CHECKPOINT_PATH must be a model folder"),
        ("empty", "holds none"),
        ("nowhere", "does not exist"),
    ],
)
def test_a_path_that_is_no_model_folder_is_refused(tmp_path, path, words):
    sweeps.model_folder(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    given = {"output_dir": tmp_path / "out"} | OVER
    with pytest.raises(ValueError, match=words):
        checkpoint_steps.check(tmp_path / path, "all", **given)


def test_follow_needs_the_end_of_the_training(tmp_path):
    given = {"follow": True, "output_dir": tmp_path}
    with pytest.raises(ValueError, match="--follow must have TRAIN_STEPS"):
        checkpoint_steps.check(tmp_path / "m", "all", train_steps=None, **given)
    with pytest.raises(ValueError, match="got 30, and TRAIN_STEPS = 20"):
        checkpoint_steps.check(tmp_path / "m", [10, 30], train_steps=20, **given)
    with pytest.raises(ValueError, match="--follow must have CHECKPOINT_STEPS"):
        checkpoint_steps.check(tmp_path / "m", None, train_steps=20, **given)


def test_the_folder_of_another_sweep_or_run_is_refused(tmp_path):
    model_dir = sweeps.model_folder(tmp_path / "model", (1,))
    assert sweeps.run(model_dir, tmp_path / "out", measurements=sweeps.FEW) == 0
    with pytest.raises(ValueError, match="another one, which differs in seed"):
        sweeps.run(model_dir, tmp_path / "out", measurements=sweeps.FEW, seed=9)
    with pytest.raises(ValueError, match="output folder must be new or empty"):
        runs.run(tmp_path / "out", measurements=sweeps.FEW)
    assert runs.run(tmp_path / "single", measurements=sweeps.FEW) == 0
    with pytest.raises(ValueError, match=r"config.gin.*and no sweep\.json"):
        sweeps.run(model_dir, tmp_path / "single", measurements=sweeps.FEW)


def test_a_sweep_follows_a_running_training(tmp_path):
    model_dir, out = tmp_path / "model", tmp_path / "out"
    model_dir.mkdir()
    unfinished = model_dir / "checkpoint_3.orbax-checkpoint-tmp-17"

    def done(step):
        return (out / f"step_{step}" / "results.json").exists()

    def train():
        for step in (1, 2):
            (model_dir / f"checkpoint_{step}").mkdir()
            while not done(step):
                time.sleep(0.05)
        (model_dir / "checkpoint_1").rmdir()  # as a training that keeps few does
        (model_dir / "checkpoint_4").mkdir()  # beyond the end
        unfinished.mkdir()
        time.sleep(1.5)
        waited.append(not done(3))
        unfinished.rename(model_dir / "checkpoint_3")

    waited = []
    training = threading.Thread(target=train)
    training.start()
    status = sweeps.run(model_dir, out, measurements=sweeps.FEW, follow_until=3)
    training.join()
    assert status == 0
    assert waited == [True]
    found = sweeps.sweep_json(out)
    assert [(x["step"], x["status"]) for x in found["steps"]] == [
        (step, "finished") for step in (1, 2, 3)
    ]


def test_sigterm_ends_the_waiting(tmp_path, monkeypatch):
    model_dir = sweeps.model_folder(tmp_path / "model", (1,))
    monkeypatch.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    given = {"measurements": sweeps.FEW, "follow_until": 2}
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 143
    assert sweeps.sweep_json(tmp_path / "out")["status"] == "unfinished"


def loaded(optimizer):
    """A loader whose optimizer is gradient descent with a learning rate by step."""

    def load(path):
        params, host = sweeps.load(path)
        preconditioner = Preconditioner(
            jax.tree.map(lambda x: x * 0 + 1.0, params),
            optimizer,
            1 / host.step,
            threshold=2.0,
        )
        fields = {"checkpoint": host.checkpoint, "step": host.step}
        more = {"optimizer": optimizer, "load_preconditioner": lambda: preconditioner}
        return params, runs.host(**fields, **more)

    return load


@pytest.mark.parametrize(
    ("optimizer", "preconditioned", "expected"),
    [
        ("SGD", False, {10: 20.0, 20: 40.0}),
        ("SGD", True, {10: 20.0, 20: 40.0}),
        ("Adam", False, {}),
    ],
)
def test_the_threshold_beside_the_eigenvalues(
    tmp_path, optimizer, preconditioned, expected
):
    model_dir = sweeps.model_folder(tmp_path / "model", (10, 20))
    pairs = Eigenpairs(
        num_largest=1, num_smallest=0, max_steps=6, preconditioned=preconditioned
    )
    given = {"measurements": [pairs], "learning_rate": lambda step: 1 / step}
    out, drawn, again = tmp_path / "out", {}, []
    assert sweeps.run(model_dir, out, drawn=drawn, load=loaded(optimizer), **given) == 0
    document = sweeps.sweep_json(out)
    assert [x["learning_rate"] for x in document["steps"]] == [1 / 10, 1 / 20]
    documents = {
        step: json.loads((out / f"step_{step}" / "results.json").read_text())
        for step in (10, 20)
    }
    (measurement,) = document["measurements"]
    assert sweep_page.thresholds(measurement, document, documents) == expected
    page = (out / "report.html").read_text()
    assert ("stable below" in page) == bool(expected)
    lines = [
        dict(zip(*x.get_data(), strict=True))
        for axis in drawn["sweep-hessian_eigenpairs"].axes
        for x in axis.lines
        if x.get_label() == "threshold"
    ]
    assert lines == [expected] * bool(expected)

    # Where the optimizer is part of the numbers it is read again.
    def load(path):
        again.append(sweeps.step_of(path))
        return loaded(optimizer)(path)

    assert sweeps.run(model_dir, out, load=load, **given) == 0
    assert again == [10, 20] * preconditioned


def test_the_page_has_a_table_beside_every_figure(tmp_path):
    model_dir = sweeps.model_folder(tmp_path / "model", (1, 2))
    assert sweeps.run(model_dir, tmp_path / "out") == 0
    document = sweeps.sweep_json(tmp_path / "out")
    documents = {
        step: json.loads((tmp_path / "out" / f"step_{step}/results.json").read_text())
        for step in (1, 2)
    }
    page = sweep_page.render(document, documents)  # with its figures
    for measurement in document["measurements"]:
        (section,) = re.findall(
            f"<section id='measurement-{measurement['name']}'>.*?</section>", page, re.S
        )
        assert re.search(
            '<svg role="img" aria-label="Figure[^"]+ training step', section
        )
        table = section[section.index("<table>") :]
        for name, curve in measurement["numbers"].items():
            row = re.search(f"<th scope='row'>{spaced(name)}</th>(.*?)</tr>", table)[1]
            for value in curve["values"]:
                whole = curve["unit"] == "1" and value == int(value)
                assert (f"{int(value)}" if whole else f"{value:.6g}") in row
    assert "largest overlap with step before" in page
