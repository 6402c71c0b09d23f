"""What cannot be probed in T5X's trainer is refused with a sentence, before training."""

import pathlib

import pytest

from training import t5x_training as training

pytestmark = [pytest.mark.t5x, pytest.mark.timeout(600)]


def test_what_the_options_need_is_refused_in_a_sentence(tmp_path):
    training.register()
    alone = training.probed(noise_scale=True)
    with pytest.raises(
        ValueError, match=r"at least two microbatches or two shards.*got 1"
    ):
        training.trainer(tmp_path, alone, microbatches=1)
    for name, lengths, said in (
        ("no_such_task", training.LENGTHS, "must be a registered SeqIO task"),
        (training.TASK, {"inputs": 6}, "targets"),
    ):
        build = training.probed(
            probe_mixture=name,
            probe_dataset=lambda mixture_or_task_name, lengths=lengths: (
                training.dataset(mixture_or_task_name, lengths)
            ),
        )
        with pytest.raises(ValueError, match=f"PROBE_MIXTURE must be .*{said}"):
            training.trainer(tmp_path, build)
    for setting, value in (
        ("eigenvalue_products", -1),
        ("eigenvalue_matrices", ("fisher",)),
        ("probe_mixture", ""),
    ):
        with pytest.raises(ValueError, match="must be"):
            training.probed(**{setting: value})


@pytest.mark.parametrize("period", [0, -3])
def test_a_period_below_one_is_refused(period):
    with pytest.raises(
        ValueError, match="CURVATURE_PERIOD must be a whole number of at least 1: got"
    ):
        training.probed(period=period)


class NoTrainer:
    """Takes T5X's keywords and is no trainer."""

    def __init__(self, **_):
        """Nothing is kept."""


@pytest.mark.parametrize("trainer_cls", [NoTrainer, pathlib.Path])
def test_what_is_no_trainer_is_refused(trainer_cls):
    with pytest.raises(TypeError, match=r"trainer_cls must be t5x.trainer.Trainer or"):
        training.probed(trainer_cls)


def test_a_function_that_returns_no_trainer_is_refused(tmp_path):
    build = training.probed(lambda **named: NoTrainer(**named))
    with pytest.raises(
        TypeError, match=r"what trainer_cls returns must be t5x.trainer"
    ):
        training.trainer(tmp_path, build)


def test_losses_without_forward_mode_are_refused_with_the_ones_to_choose(tmp_path):
    from t5x import models

    from t5x_fwdloss import losses

    sentence = "needs a loss that has forward mode: got "
    own = training.model("custom_vjp")
    stock = training.model(cls=models.EncoderDecoderModel)
    for model, got in (
        (own, "LOSS_IMPL = 'custom_vjp'; choose 'autodiff' or 'custom_jvp'"),
        (
            stock,
            "T5X's own loss, .*; add --gin_file=t5x_fwdloss/configs/losses/custom_j",
        ),
    ):
        with pytest.raises(ValueError, match=f"{sentence}{got}"):
            training.trainer(tmp_path, training.probed(), model)

    class OwnLoss(models.EncoderDecoderModel):
        impl = "custom_vjp"

        def loss_fn(self, params, batch, dropout_rng):
            logits = self._compute_logits(params, batch, dropout_rng)
            found = losses.compute_weighted_cross_entropy(
                logits, batch["decoder_target_tokens"], impl=self.impl
            )
            return found[0], {}

    found = training.trainer(tmp_path, training.probed(), training.model(cls=OwnLoss))
    with pytest.raises(
        ValueError, match=f"{sentence}that of OwnLoss, in which jax.cust"
    ):
        found.compile_train(next(training.batches()))
    OwnLoss.impl = "autodiff"
    found.compile_train(next(training.batches()))
    found.close()
