"""Probes in the standalone training: the same numbers of the run, and those of its steps."""

import jax
import numpy as np
import optax
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from t5x_fwdloss import tasks
from t5x_fwdloss.standalone import checkpoints, data, schedules, train

from . import subjects

SETTINGS = {"loss_impl": "custom_jvp", "loss_normalizing_factor": 100.0}
DATASET = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 12, "targets": 24}, 8)
SCHEDULE = schedules.rsqrt_schedule(0.1, 4)


def run(model_dir, **changes):
    arguments = {
        "model": subjects.model(SETTINGS, dropout_rate=0.1),
        "optimizer": optax.adam(SCHEDULE),
        "dataset": DATASET,
        "total_steps": 6,
        "eval_period": 6,
        "num_eval_batches": 1,
        "checkpoint_period": 1,
        "train_split": "test",
    }
    return train.train(**{**arguments, **changes}, model_dir=str(model_dir))


def params_at(folder, step):
    model = subjects.model(SETTINGS)
    like = jax.eval_shape(
        model.get_initial_params, jax.random.key(0), subjects.packed_batch()
    )
    return checkpoints.restore_params(str(folder / f"checkpoint_{step}"), like)[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder and result of the run without probes and of the one with them."""
    folders = [tmp_path_factory.mktemp(name) for name in ("plain", "probed")]
    plain, probed = folders
    first = run(plain)
    return (
        (plain, first),
        (probed, run(probed, curvature_period=3, learning_rate=SCHEDULE)),
    )


@pytest.fixture(scope="module")
def events(runs):
    return read(runs[1][0])


def read(folder):
    """The numbers of the probes: tag to step to value."""
    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: {
            x.step: float(tf.make_ndarray(x.tensor_proto)) for x in found.Tensors(tag)
        }
        for tag in found.Tags()["tensors"]
        if tag.startswith("curvature/")
    }


def test_a_probed_run_ends_with_the_same_numbers(runs):
    (plain, wanted), (probed, got) = runs
    assert got == wanted
    for step in (3, 6):
        subjects.assert_same_trees(params_at(probed, step), params_at(plain, step))


def reverse_mode(old, new, update, batch, key):
    """Both losses, the gradient, and the Hessian times the update."""
    model = subjects.model(SETTINGS, dropout_rate=0.1)
    loss = lambda params: model.loss_fn(params, batch, key)[0]
    gradient, product = jax.jvp(jax.grad(loss), (old,), (update,))
    return loss(old), loss(new), gradient, product


def test_the_numbers_are_those_of_reverse_mode_between_two_checkpoints(runs, events):
    folder, measured = runs[0][0], jax.jit(reverse_mode)
    for step in (3, 6):
        old, new = params_at(folder, step - 1), params_at(folder, step)
        batch = next(
            data.batches(
                DATASET, "test", shuffle=True, num_epochs=None, skip_batches=step - 1
            )
        )
        update = jax.tree.map(np.subtract, new, old)
        key = jax.random.fold_in(jax.random.key(0), step)
        before, after, *trees = jax.device_get(measured(old, new, update, batch, key))
        inner = lambda a, b: np.vdot(*(np.float64(x).ravel() for x in (a, b)))
        slope, curvature = (
            sum(jax.tree.leaves(jax.tree.map(inner, tree, update))) for tree in trees
        )
        rate = float(SCHEDULE(step - 1))
        expected = {
            "loss": float(before),
            "slope": slope,
            "curvature": curvature,
            "predicted_change": slope + curvature / 2,
            "actual_change": float(after - before),
            "directional_sharpness": -curvature / (rate * slope),
        }
        if slope < 0 < curvature:
            expected["multiple_of_least_loss"] = -slope / curvature
            expected["multiple_of_return"] = -2 * slope / curvature
        got = {name: events[f"curvature/{name}"][step] for name in expected}
        assert got == pytest.approx(expected, rel=1e-4)
        critical = events["curvature/critical_multiple"][step]
        assert events["curvature/critical_sharpness"][step] == pytest.approx(
            2 / (rate * critical)
        )
        # Found to 10 %: the loss is back at its first value between the two.
        along = lambda m, a=old, d=update: jax.tree.map(lambda x, y: x + m * y, a, d)
        below, above = (
            float(measured(along(m * critical), new, update, batch, key)[0])
            for m in (1 / 1.1, 1.1)
        )
        assert below < before < above
        assert 3 <= events["curvature/forward_passes"][step] <= 10
    assert list(events["curvature/probe_seconds"]) == [3, 6]


def test_a_loss_without_forward_mode_is_refused(tmp_path):
    model = subjects.model({**SETTINGS, "loss_impl": "custom_vjp"})
    with pytest.raises(
        ValueError,
        match="forward mode: got LOSS_IMPL = 'custom_vjp'; choose 'autodiff' or 'custom_",
    ):
        run(tmp_path, model=model, curvature_period=1)
    assert not list(tmp_path.iterdir())


def test_another_learning_rate_than_the_optimizers_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"must be the learning rate of OPTIMIZER, .* gives 0.3, .* 0.01",
    ):
        run(tmp_path, curvature_period=1, learning_rate=0.3)
    assert not list(tmp_path.iterdir())
