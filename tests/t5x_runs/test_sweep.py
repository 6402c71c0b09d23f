"""A sweep over the checkpoints of a T5X training run."""

import json

import pytest

pytestmark = [pytest.mark.t5x, pytest.mark.timeout(900)]

EXAMPLE = "--gin_file=t5x_fwdloss/configs/examples/cmudict_analyze.gin"
# Machine code need not be fast: compiling takes most of the time.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def test_a_sweep_measures_every_checkpoint_of_a_training(project, checkpoint):
    model_dir, _, last = checkpoint.rpartition("/checkpoint_")
    done = project.run(
        "t5x_fwdloss.analyze",
        EXAMPLE,
        "--gin_file=my_network.gin",
        "--gin.NUM_BATCHES=1",
        "--gin.BATCH_SIZE=8",
        f"--gin.CHECKPOINT_PATH='{model_dir}'",
        "--gin.CHECKPOINT_STEPS='all'",
        f"--gin.TRAIN_STEPS={last}",
        "--follow",
        f"--gin.ANALYSIS_OUTPUT_DIR='{project.path / 'sweep'}'",
        "--gin.MEASUREMENTS=[@Eigenpairs()]",
        "--gin.Eigenpairs.preconditioned=True",
        "--gin.Eigenpairs.num_largest=1",
        "--gin.Eigenpairs.num_smallest=0",
        "--gin.Eigenpairs.max_steps=2",
        "--gin.LEARNING_RATE_FN=@utils.create_learning_rate_scheduler()",
        **QUICK,
    )
    assert done.status == 0, done.log[-3000:]
    document = json.loads((project.path / "sweep" / "sweep.json").read_text())
    steps = [x["step"] for x in document["steps"]]
    assert len(steps) > 1
    assert steps[-1] == int(last)
    assert len(document["neighbors"]) == len(steps) - 1
    (curves,) = document["measurements"]
    for number, step in enumerate(steps):
        path = project.path / "sweep" / f"step_{step}" / "results.json"
        results = json.loads(path.read_text())
        # Each step has its own checkpoint's parameters and its own optimizer's state.
        assert results["checkpoint"] == f"{model_dir}/checkpoint_{step}"
        (entry,) = results["measurements"]
        for name, expected in entry["results"].items():
            assert curves["numbers"][name]["values"][number] == expected["value"]
    assert len(set(curves["numbers"]["largest_1"]["values"])) == len(steps)
