"""Training with each loss, and with probes, chosen beside a user's configuration."""

import numpy as np
import pytest

from t5x_runs.conftest import CURVATURE, LOSSES

# The time limit is for the shared runs, on a machine that is busy.
pytestmark = [pytest.mark.t5x, pytest.mark.timeout(900)]


def test_custom_vjp_trains_as_stock_t5x_to_the_last_bit(project, trained):
    assert trained["custom_vjp"].status == 0, trained["custom_vjp"].log[-3000:]
    for tag in ("loss", "accuracy", "z_loss"):
        wanted = project.losses("stock", tag)
        assert len(wanted) == 50
        assert project.losses("custom_vjp", tag) == wanted
    evaluation = ("loss", "training_eval/cmudict_g2p")
    wanted = project.losses("stock", *evaluation)
    assert wanted
    assert project.losses("custom_vjp", *evaluation) == wanted


@pytest.mark.parametrize("name", ["custom_jvp", "autodiff", "chunked"])
def test_other_losses_train_as_stock_t5x_to_1e_5(project, trained, name):
    assert trained[name].status == 0, trained[name].log[-3000:]
    config = (project.path / name / "config.gin").read_text()
    assert "MODEL = @fwdloss_models.with_loss()" in config
    wanted, got = project.losses("stock"), project.losses(name)
    assert got.keys() == wanted.keys()
    np.testing.assert_allclose(
        list(got.values()), list(wanted.values()), rtol=1e-5, atol=0
    )
    assert wanted[50] < 0.8 * wanted[1]  # the run learns: no comparison of constants


def test_the_flag_alone_chooses_the_loss_once_a_losses_file_is_read(project, trained):
    config = (project.path / "autodiff" / "config.gin").read_text()
    assert "LOSS_IMPL = 'autodiff'" in config


def test_a_written_configuration_parses_alone_and_keeps_the_loss(project, trained):
    written = project.path / "custom_vjp" / "config.gin"
    again = project.run(
        "t5x.main", "--run_mode=train", "--dry_run", f"--gin_file={written}"
    )
    assert again.status == 0, again.log[-3000:]
    assert "fwdloss_models.with_loss.model = @models.EncoderDecoderModel()" in again.log
    assert "LOSS_IMPL = 'custom_vjp'" in again.log


def test_a_probed_run_is_its_run_without_probes_in_every_bit(project, trained):
    assert trained["probed"].status == 0, trained["probed"].log[-3000:]
    for where in (("loss",), ("accuracy",), ("loss", "training_eval/cmudict_g2p")):
        wanted = project.losses("custom_jvp", *where)
        assert wanted
        assert project.losses("probed", *where) == wanted
    slopes = project.losses("probed", "curvature/slope")
    assert list(slopes) == [20, 40]  # of 50 steps
    assert all(slope < 0 for slope in slopes.values())
    for name in ("cmudict_g2p/slope", "largest_eigenvalue_of_hessian"):
        assert list(project.losses("probed", f"curvature/{name}")) == [20, 40]
    assert not project.losses("custom_jvp", "curvature/slope")


def test_the_configuration_of_a_probed_run_wraps_the_trainer_once(project, trained):
    written = project.path / "probed" / "config.gin"
    again = project.run(
        "t5x.main", "--run_mode=train", "--dry_run", f"--gin_file={written}"
    )
    assert again.status == 0, again.log[-3000:]
    for text in (written.read_text(), again.log):
        assert "train.trainer_cls = @fwdloss_trainer.with_curvature()" in text
        assert "fwdloss_trainer.with_curvature.trainer_cls = @trainer.Trainer" in text


NO_TRAINER = """
from __gin__ import dynamic_registration
import __main__ as train_script
from t5x import utils
train_script.train.trainer_cls = @utils.DatasetConfig
"""
REFUSED = {
    "period": (
        [f"--gin_file={LOSSES}/custom_jvp.gin", "--gin.CURVATURE_PERIOD='10'"],
        "CURVATURE_PERIOD must be a whole number of at least 1: got '10'",
    ),
    "trainer": (
        [
            f"--gin_file={LOSSES}/custom_jvp.gin",
            "--gin_file=no_trainer.gin",
        ],
        "trainer_cls must be t5x.trainer.Trainer or another t5x.trainer.BaseTrainer: got",
    ),
    "loss": (
        [f"--gin_file={LOSSES}/custom_vjp.gin"],
        "forward mode: got LOSS_IMPL = 'custom_vjp'; choose 'autodiff' or 'custom_jvp'",
    ),
    "stock": (
        [],
        "got T5X's own loss, of EncoderDecoderModel; add --gin_file=t5x_fwdl",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_probed_is_a_sentence_before_training_begins(project, case):
    project.write("no_trainer.gin", NO_TRAINER)
    bad, sentence = REFUSED[case]
    first, more = bad[:1], bad[1:]
    arguments = [*first, f"--gin_file={CURVATURE}", *more]
    done = project.run("t5x.main", *project.train_arguments(f"bad_{case}", *arguments))
    assert done.status == 1
    assert sentence in done.log
    assert not list((project.path / f"bad_{case}").glob("checkpoint_*"))


def test_the_data_of_a_probe_are_read_like_the_training_s(project):
    done = project.run(
        "t5x.main",
        "--dry_run",
        *project.train_arguments(
            "other_data",
            f"--gin_file={LOSSES}/custom_jvp.gin",
            f"--gin_file={CURVATURE}",
            "--gin.PROBE_MIXTURE='cmudict_g2p'",
        ),
    )
    assert done.status == 0, done.log[-3000:]
    for line in (
        "probe/utils.DatasetConfig.batch_size = %BATCH_SIZE",
        "probe/utils.DatasetConfig.task_feature_lengths = %TASK_FEATURE_LENGTHS",
        "probe/utils.DatasetConfig.split = %PROBE_SPLIT",
        "probe/utils.DatasetConfig.shuffle = False",
    ):
        assert line in done.log
    assert "probe/utils.DatasetConfig.mixture_or_task_name" not in done.log


def test_probes_without_a_training_script_are_a_sentence(project):
    done = project.run(
        "t5x.main", "--run_mode=train", "--dry_run", f"--gin_file={CURVATURE}"
    )
    assert done.status == 1
    assert "wrap the trainer_cls of one training script" in done.log
    assert "must bind it: got none" in done.log
