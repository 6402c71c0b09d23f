"""Fine-tuning by forward mode: one gin file beside a user's, from a stock checkpoint."""

import pathlib

import numpy as np
import pytest

from t5x_runs.conftest import CURVATURE, FORWARD, LOSSES

# The time limit is for the shared runs, on a machine that is busy.
pytestmark = [pytest.mark.t5x, pytest.mark.timeout(900)]

# A user's fine-tuning from the last checkpoint of the stock run.
TUNE = """
from __gin__ import dynamic_registration
include 'my_run.gin'
import __main__ as train_script
from t5x import utils
TRAIN_STEPS = 54
train_script.train:
  eval_period = 2
  stats_period = 2
utils.SaveCheckpointConfig.period = 2
utils.CheckpointConfig.restore = @utils.RestoreCheckpointConfig()
utils.RestoreCheckpointConfig:
  path = %CHECKPOINT
  mode = 'specific'
  dtype = 'float32'
"""


def arguments(project, checkpoint, model_dir, *more, loss="custom_jvp"):
    project.write("my_tune.gin", TUNE)
    return [
        "--run_mode=train",
        "--gin_file=my_tune.gin",
        f"--gin_file={LOSSES}/{loss}.gin",
        f"--gin_file={FORWARD}",
        f"--gin.CHECKPOINT='{checkpoint}'",
        f"--gin.MODEL_DIR='{project.path / model_dir}'",
        "--gin.FORWARD_GRADIENT_PARAMETERS='.*norm/scale'",
        *more,
    ]


@pytest.fixture(scope="module")
def tuned(project, checkpoint):
    """Four steps with probes; then the configuration that T5X wrote, for two more."""
    settings = [f"--gin_file={CURVATURE}", "--gin.CURVATURE_PERIOD=2"]
    first = project.run("t5x.main", *arguments(project, checkpoint, "tuned", *settings))
    written = project.path / "tuned" / "config.gin"
    project.write("written.gin", written.read_text())
    again = project.run(
        "t5x.main",
        "--run_mode=train",
        "--gin_file=written.gin",
        "--gin.TRAIN_STEPS=56",
    )
    return first, again


def leaves(path):
    """The arrays of a T5X checkpoint: path to value."""
    import orbax.checkpoint as ocp
    from flax import traverse_util

    found = ocp.PyTreeCheckpointer().restore(str(path / "state"))
    return traverse_util.flatten_dict(found, sep="/")


def test_chosen_parameters_alone_move_and_are_saved_with_a_state(
    project, checkpoint, tuned
):
    for done in tuned:
        assert done.status == 0, done.log[-3000:]
    old = leaves(pathlib.Path(checkpoint))
    new = leaves(project.path / "tuned" / "checkpoint_56")
    params = {path for path in old if path.startswith("target/")}
    assert params == {path for path in new if path.startswith("target/")}
    for path in params:
        moved = not np.array_equal(old[path], new[path])
        assert moved == path.endswith("norm/scale"), path
    states = {path for path in new if "param_states" in path}
    assert states == {p for p in old if "param_states" in p and "norm/scale/" in p}


def test_the_second_moment_of_the_checkpoint_is_restored_and_the_run_resumes(
    project, checkpoint, tuned
):
    name = "state/param_states/decoder/decoder_norm/scale/v"
    old, middle, new = (
        leaves(path)[name]
        for path in (
            pathlib.Path(checkpoint),
            *sorted((project.path / "tuned").glob("checkpoint_5[26]")),
        )
    )
    # Adafactor's decay at step t is 1 - t^-0.8: what was there counts still.
    assert np.all(middle > 0.8 * old)
    assert not np.array_equal(middle, new)
    assert list(project.losses("tuned")) == [52, 54, 56]
    assert all(np.isfinite(list(project.losses("tuned").values())))


def test_probes_see_the_updates_of_forward_gradients(project, tuned):
    slopes = project.losses("tuned", "curvature/slope")
    assert list(slopes) == [52, 54, 56]
    assert all(np.isfinite(list(slopes.values())))


def test_the_written_configuration_wraps_the_trainer_twice_and_the_state_once(
    project, tuned
):
    text = (project.path / "tuned" / "config.gin").read_text()
    for line in (
        "train.trainer_cls = @fwdloss_trainer.with_curvature()",
        "with_curvature.trainer_cls = \\\n"
        "    @fwdloss_forward_trainer.with_forward_gradient()",
        "with_forward_gradient.trainer_cls = @trainer.Trainer",
        "train.train_state_initializer_cls = \\\n"
        "    @fwdloss_forward_trainer.with_chosen_parameters()",
    ):
        assert line in text


REFUSED = {
    "directions": (
        ["--gin.FORWARD_GRADIENT_DIRECTIONS=0"],
        "FORWARD_GRADIENT_DIRECTIONS must be a whole number of at least 1: got 0.",
    ),
    "parameters": (
        ["--gin.FORWARD_GRADIENT_PARAMETERS='scale'"],
        "FORWARD_GRADIENT_PARAMETERS chooses what moves: A group must match the whole",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_settings_are_a_sentence_before_training_begins(project, checkpoint, case):
    bad, sentence = REFUSED[case]
    done = project.run("t5x.main", *arguments(project, checkpoint, f"bad_{case}", *bad))
    assert done.status == 1
    assert sentence in done.log
    assert not list((project.path / f"bad_{case}").glob("checkpoint_*"))
