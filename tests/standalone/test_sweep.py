"""A sweep over a training run of the standalone host, through its files."""

import json

import jax
import numpy as np
import optax
import pytest

from t5x_fwdloss import tasks
from t5x_fwdloss.analysis import Eigenpairs, Landscape
from t5x_fwdloss.standalone import analyze, data, train

from . import subjects

DATASET = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 12, "targets": 24}, 8)
SETTINGS = {"loss_impl": "custom_jvp", "loss_normalizing_factor": 100.0}
OPTIMIZER = optax.sgd(0.02)


@pytest.fixture(scope="module", autouse=True)
def machine_code_that_need_not_be_fast():
    """Compiling takes most of the time of these tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train.train(
        model=subjects.model(SETTINGS),
        optimizer=OPTIMIZER,
        dataset=DATASET,
        model_dir=str(folder),
        total_steps=4,
        eval_period=4,
        num_eval_batches=1,
        checkpoint_period=2,
        train_split="test",
        config_text="# gin",
    )
    return folder


def line(model_dir, **settings):
    """The line from a checkpoint to the first one."""
    return Landscape(
        directions=[f"checkpoint:{model_dir / 'checkpoint_2'}"],
        ranges=[(-0.5, 1.5)],
        num_points=5,
        **settings,
    )


def run(path, output_dir, measurements, split="test", **more):
    return analyze.analyze(
        model=subjects.model(SETTINGS),
        dataset=DATASET,
        checkpoint_path=str(path),
        output_dir=str(output_dir),
        measurements=measurements,
        num_batches=1,
        split=split,
        optimizer=OPTIMIZER,
        learning_rate=0.02,
        **more,
    )


def measurements(model_dir):
    return [
        Eigenpairs(preconditioned=True, num_largest=1, num_smallest=0, max_steps=3),
        line(model_dir, other_split="validation"),
    ]


@pytest.fixture(scope="module")
def sweep(model_dir, tmp_path_factory):
    """A sweep that follows a training that has ended."""
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    given = {"checkpoint_steps": "all", "train_steps": 4, "follow": True}
    assert run(model_dir, folder, measurements(model_dir), **given) == 0
    return folder


def measured(folder):
    document = json.loads((folder / "results.json").read_text())
    fields = ("name", "results", "arrays_sha256", "notes")
    return document["fingerprint"], [
        {key: entry[key] for key in fields} for entry in document["measurements"]
    ]


def test_a_sweep_has_the_numbers_of_single_runs(model_dir, sweep, tmp_path):
    # The last, whose functions an earlier step compiled.
    single = tmp_path / "single"
    assert run(model_dir / "checkpoint_4", single, measurements(model_dir)) == 0
    assert measured(sweep / "step_4") == measured(single)
    assert measured(sweep / "step_2") != measured(single)
    document = json.loads((sweep / "sweep.json").read_text())
    assert [x["step"] for x in document["steps"]] == [2, 4]
    assert [x["learning_rate"] for x in document["steps"]] == [0.02, 0.02]
    (neighbor,) = document["neighbors"]
    assert (neighbor["earlier"], neighbor["later"]) == (2, 4)


def test_another_split_has_the_numbers_of_a_run_on_it(model_dir, sweep, tmp_path):
    there = tmp_path / "there"
    path = model_dir / "checkpoint_4"
    assert run(path, there, [line(model_dir)], split="validation") == 0
    _, (_, both) = measured(sweep / "step_4")
    identity, (alone,) = measured(there)
    found = {
        name.removeprefix("on_validation/"): number
        for name, number in both["results"].items()
        if name.startswith("on_validation/")
    }
    # The length, the slope and the curvature of a direction are not those of a split.
    assert set(alone["results"]) - set(found) == {
        f"checkpoint_0/{name}" for name in ("length", "slope", "curvature")
    }
    assert {"loss", "accuracy", "barrier_height", "checkpoint_0/loss"} <= set(found)
    assert found == {name: alone["results"][name] for name in found}
    assert both["results"]["loss"]["value"] != found["loss"]["value"]
    arrays, wanted = (np.load(x / "landscape.npz") for x in (sweep / "step_4", there))
    for name in ("losses", "accuracies", "losses_at_marks"):
        np.testing.assert_array_equal(arrays[f"on_validation/{name}"], wanted[name])
    document = json.loads((sweep / "step_4" / "results.json").read_text())
    other = document["fingerprint"]["other_batches"]
    assert other == {"validation": identity["batches"]}


def test_a_split_that_is_not_there_is_refused(model_dir, tmp_path):
    words = "other_split must be a split .*: got 'nothing'.*train"
    with pytest.raises(ValueError, match=words) as caught:
        run(model_dir, tmp_path / "out", [line(model_dir, other_split="nothing")])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_steps_that_are_not_there_are_named(model_dir, tmp_path):
    with pytest.raises(ValueError, match=r"got 3, and there are 2, 4\."):
        run(
            model_dir,
            tmp_path / "sweep",
            measurements(model_dir),
            checkpoint_steps=[2, 3],
        )
    assert not (tmp_path / "sweep").exists()
