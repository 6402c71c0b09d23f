"""The training script: it learns, resumes to the bit, and refuses what cannot be."""

import shutil

import jax
import numpy as np
import optax
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from t5x_fwdloss import tasks
from t5x_fwdloss.analysis.objective.finite import NonFiniteLossError
from t5x_fwdloss.analysis.store import files, lock
from t5x_fwdloss.standalone import checkpoints, data, schedules, train

from . import subjects

# The test split: the smallest; training reads it from its shuffled beginning.
DATASET = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 12, "targets": 24}, 8)
SETTINGS = {"loss_impl": "custom_jvp", "loss_normalizing_factor": 100.0}


def run(model_dir, total_steps=6, learning_rate=0.02, **changes):
    arguments = {
        "model": subjects.model(SETTINGS, dropout_rate=0.1),
        "optimizer": optax.adam(learning_rate),
        "dataset": DATASET,
        "total_steps": total_steps,
        "eval_period": 3,
        "num_eval_batches": 2,
        "checkpoint_period": 4,
        "train_split": "test",
        "config_text": "# gin",
    }
    return train.train(**{**arguments, **changes}, model_dir=str(model_dir))


def params_at(path):
    model = subjects.model(SETTINGS)
    like = jax.eval_shape(
        model.get_initial_params, jax.random.key(0), subjects.packed_batch()
    )
    return checkpoints.restore_params(str(path), like)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, run(folder)


def test_loss_goes_down_and_its_numbers_are_written(trained):
    folder, metrics = trained
    events = EventAccumulator(str(folder))
    events.Reload()
    losses = [
        float(tf.make_ndarray(events.Tensors(tag)[i].tensor_proto))
        for tag in ("train/loss", "validation/loss")
        for i in range(2)
    ]
    assert losses[0] > losses[1]
    assert losses[2] > losses[3]
    assert [x.step for x in events.Tensors("validation/accuracy")] == [3, 6]
    assert losses[3] == pytest.approx(metrics["loss"], rel=1e-6)
    assert 0.05 < metrics["accuracy"] < 1
    assert (folder / "config.gin").read_text() == "# gin"


def test_checkpoints_lie_at_the_period_and_at_the_end(trained):
    folder, _ = trained
    names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    assert names == ["checkpoint_4", "checkpoint_6"]
    assert params_at(folder)[0] == 6


def test_a_resumed_run_ends_with_the_same_numbers(trained, tmp_path):
    folder, metrics = trained
    run(tmp_path, total_steps=4)
    resumed = run(tmp_path, total_steps=6)
    assert resumed == metrics
    subjects.assert_same_trees(params_at(tmp_path), params_at(folder))
    assert run(tmp_path, total_steps=6) == metrics  # nothing left to do
    with pytest.raises(ValueError, match=r"got 5, and .* holds checkpoint_6"):
        run(tmp_path, total_steps=5)


def test_a_folder_with_another_models_checkpoint_is_refused(trained):
    folder, _ = trained
    with pytest.raises(
        ValueError, match="must be those of MODEL: .* checkpoint has none"
    ):
        run(folder, total_steps=8, model=subjects.model(num_decoder_layers=2))
    with pytest.raises(ValueError, match="optimizer's state of .* of OPTIMIZER: "):
        run(folder, total_steps=8, optimizer=optax.sgd(0.1, momentum=0.9))


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"step 2 gives (nan|inf)"):
        run(tmp_path, learning_rate=1e30, checkpoint_period=2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("checkpoint")]


def breaking(learning_rate, *, params_at=None, state_at=None):
    """SGD whose update, or whose own state, becomes NaN at a step; its loss is finite."""

    def init(_):
        return {"count": np.zeros((), np.int32), "mean": np.float32(0)}

    def update(grads, state, _=None):
        count = state["count"] + 1
        spoil = lambda at, x: (
            x if at is None else jax.numpy.where(count == at, np.nan, x)
        )
        updates = jax.tree.map(lambda g: spoil(params_at, -learning_rate * g), grads)
        return updates, {"count": count, "mean": spoil(state_at, state["mean"])}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("params_at", "nan in .*kernel|nan in .*embedding|nan in .*scale"),
        ("state_at", "nan in the optimizer's mean"),
    ],
)
def test_what_an_update_breaks_is_not_saved_and_the_run_goes_on(tmp_path, where, words):
    broken = breaking(1e-3, **{where: 2})
    with pytest.raises(
        NonFiniteLossError, match=f"step 2 gives ({words}).*checkpoint_1"
    ):
        run(tmp_path, 2, optimizer=broken, checkpoint_period=1)
    names = [p.name for p in tmp_path.iterdir() if p.name.startswith("checkpoint")]
    assert names == ["checkpoint_1"]
    assert not (tmp_path / ".lock").exists()
    assert np.isfinite(run(tmp_path, 2, optimizer=breaking(1e-3))["loss"])
    assert params_at(tmp_path)[0] == 2


def test_a_checkpoint_that_is_not_finite_is_named_and_the_one_before_it_taken(tmp_path):
    first = run(tmp_path, 2, optimizer=breaking(1e-3), checkpoint_period=1)
    params = params_at(tmp_path)[1]
    manager = checkpoints.open_manager(str(tmp_path))
    params["decoder"]["decoder_norm"]["scale"] = np.full(16, np.inf, np.float32)
    state = breaking(1e-3).init(params)
    checkpoints.save(manager, 3, params, state)
    manager.close()
    with pytest.raises(
        ValueError, match="checkpoint_3 must be finite.*inf in decoder/"
    ):
        run(tmp_path, 4, optimizer=breaking(1e-3))
    shutil.rmtree(tmp_path / "checkpoint_3")
    assert run(tmp_path, 2, optimizer=breaking(1e-3)) == first


def test_a_second_training_in_the_folder_is_refused(tmp_path):
    path = files.user_path(tmp_path)
    with (
        lock.held(path / ".lock", path),
        pytest.raises(ValueError, match="Only one run may write to"),
    ):
        run(tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.name != ".lock"]


@pytest.mark.parametrize(
    ("argument", "macro"),
    [
        ("total_steps", "TRAIN_STEPS"),
        ("eval_period", "EVAL_PERIOD"),
        ("checkpoint_period", "CHECKPOINT_PERIOD"),
    ],
)
def test_counts_below_one_are_refused(argument, macro, tmp_path):
    with pytest.raises(
        ValueError, match=f"{macro} must be a whole number of at least 1: got 0"
    ):
        run(tmp_path, **{argument: 0})


def test_a_vocabulary_too_small_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size .* 259: got 128"):
        run(tmp_path, model=subjects.model(vocab_size=128))
    assert not list(tmp_path.iterdir())


def test_the_schedule_warms_up_and_decays_with_the_root_of_the_step():
    schedule = schedules.rsqrt_schedule(2.0, warmup_steps=4)
    steps = [0, 1, 4, 16, 100]
    expected = [0.0, 0.25, 1.0, 0.5, 0.2]
    np.testing.assert_allclose([schedule(step) for step in steps], expected, rtol=1e-6)
    with pytest.raises(
        ValueError, match="WARMUP_STEPS must be a whole number of at least 1: got 0"
    ):
        schedules.rsqrt_schedule(2.0, warmup_steps=0)


def test_the_mean_of_metrics_weighs_tokens():
    model = subjects.model()
    batch = subjects.packed_batch()
    params = model.get_initial_params(jax.random.key(0), batch)
    half = dict(batch)
    weights = batch["decoder_loss_weights"] * (np.arange(2)[:, None] == 0)
    half["decoder_loss_weights"] = weights
    metrics = [model.loss_fn(params, x, None)[1] for x in (batch, half)]
    counts = [x["decoder_loss_weights"].sum() for x in (batch, half)]
    each = [float(m["accuracy"].compute()) for m in metrics]
    expected = np.dot(each, counts) / sum(counts)
    assert train.mean(metrics)["accuracy"] == pytest.approx(expected, rel=1e-6)
    assert train.mean([]) == {}
