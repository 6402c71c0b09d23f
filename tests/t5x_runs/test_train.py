"""Training with each loss, chosen beside a user's stock configuration."""

import numpy as np
import pytest

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
