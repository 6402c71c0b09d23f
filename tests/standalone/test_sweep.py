"""A sweep over a training run of the standalone host, through its files."""

import json

import optax
import pytest

from t5x_fwdloss import tasks
from t5x_fwdloss.analysis import Eigenpairs, Trace
from t5x_fwdloss.standalone import analyze, data, train

from . import subjects

DATASET = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 12, "targets": 24}, 8)
SETTINGS = {"loss_impl": "custom_jvp", "loss_normalizing_factor": 100.0}
OPTIMIZER = optax.sgd(0.02)


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


def run(path, output_dir, **more):
    pairs = {"num_largest": 1, "num_smallest": 0, "max_steps": 3}
    return analyze.analyze(
        model=subjects.model(SETTINGS),
        dataset=DATASET,
        checkpoint_path=str(path),
        output_dir=str(output_dir),
        measurements=[
            Trace(num_probes=2, block_size=2),
            Eigenpairs(preconditioned=True, **pairs),
        ],
        num_batches=1,
        split="test",
        optimizer=OPTIMIZER,
        learning_rate=0.02,
        **more,
    )


def measured(folder):
    document = json.loads((folder / "results.json").read_text())
    fields = ("name", "results", "arrays_sha256", "notes")
    return document["fingerprint"], [
        {key: entry[key] for key in fields} for entry in document["measurements"]
    ]


def test_a_sweep_has_the_numbers_of_single_runs(model_dir, tmp_path):
    assert run(model_dir, tmp_path / "sweep", checkpoint_steps="all") == 0
    for step in (2, 4):
        single = tmp_path / f"single_{step}"
        assert run(model_dir / f"checkpoint_{step}", single) == 0
        assert measured(tmp_path / "sweep" / f"step_{step}") == measured(single)
    document = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [x["learning_rate"] for x in document["steps"]] == [0.02, 0.02]
    (neighbor,) = document["neighbors"]
    assert (neighbor["earlier"], neighbor["later"]) == (2, 4)


def test_follow_ends_at_the_last_checkpoint(model_dir, tmp_path):
    given = {"checkpoint_steps": "every 4", "train_steps": 4, "follow": True}
    assert run(model_dir, tmp_path / "sweep", **given) == 0
    document = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [x["step"] for x in document["steps"]] == [4]


def test_steps_that_are_not_there_are_named(model_dir, tmp_path):
    with pytest.raises(ValueError, match=r"got 3, and there are 2, 4\."):
        run(model_dir, tmp_path / "sweep", checkpoint_steps=[2, 3])
    assert not (tmp_path / "sweep").exists()
