"""T5X's trainer with probes: the same parameters, and numbers by value from its events."""

import json
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from training import t5x_training as training

pytestmark = [pytest.mark.t5x, pytest.mark.timeout(600)]

FAST = "--xla_backend_optimization_level=0"  # machine code need not be fast

CRITICAL = ("multiple", "sharpness")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The state after each step without and with probes, and the folder of the events."""
    from t5x import trainer as t5x_trainer

    folder = tmp_path_factory.mktemp("runs")
    stock = training.trained(training.trainer(folder / "stock", t5x_trainer.Trainer))
    ours = training.trained(
        training.trainer(folder / "probed", training.probed_in_all())
    )
    return stock, ours, folder


@pytest.fixture(scope="module")
def events(runs):
    return training.events(runs[2] / "probed")


def assert_same_trees(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_probes_change_no_parameter_in_any_bit(runs):
    stock, ours, _ = runs
    assert len(stock) == training.STEPS + 1
    assert_same_trees(stock, ours)
    first, last = (jax.tree.leaves(x.params)[0] for x in (stock[0], stock[-1]))
    assert not np.array_equal(first, last)


@pytest.fixture(scope="module")
def stock(runs):
    """T5X's own model and trainer, of its own loss, for reverse mode."""
    from t5x import models
    from t5x import trainer as t5x_trainer

    model = training.model(cls=models.EncoderDecoderModel)
    found = training.trainer(runs[2] / "stock_loss", t5x_trainer.Trainer, model)
    found.close()
    return found


def step_gradient(stock, params, batch, step):
    """The gradient that T5X's step takes, and the loss that it reports."""
    from t5x import trainer as t5x_trainer

    found, metrics, _ = t5x_trainer.accumulate_grads_microbatched(
        stock._model,
        stock.train_state.replace_params(params),
        batch,
        stock._get_step_rng(step),
        stock._num_microbatches,
    )
    return found, metrics["loss"].total


@pytest.fixture(scope="module")
def reverse_mode(runs, stock):
    """A step's numbers by T5X's own gradients of its own loss, and a plain bisection."""

    @jax.jit
    def measured(old, new, batch, step, multiple):
        gradient = lambda params: step_gradient(stock, params, batch, step)
        update = jax.tree.map(lambda a, b: a - b, new, old)
        (grads, loss), (products, _) = jax.jvp(gradient, (old,), (update,))
        far = jax.tree.map(lambda a, b: a + multiple * b, old, update)
        return update, grads, products, loss, gradient(far)[1]

    def of_step(step):
        old, new = (state.params for state in runs[0][step - 1 : step + 1])
        batch = list(training.batches())[step - 1]
        loss_at = lambda m: float(measured(old, new, batch, step - 1, m)[-1])
        update, *trees, loss, after = measured(old, new, batch, step - 1, 1.0)
        inner = lambda a, b: np.vdot(*(np.float64(x).ravel() for x in (a, b)))
        sums = [sum(jax.tree.leaves(jax.tree.map(inner, t, update))) for t in trees]
        lower, upper = 1.0, 1000.0
        while upper > 1.001 * lower:
            middle = np.sqrt(lower * upper)
            rises = loss_at(middle) > loss
            lower, upper = (lower, middle) if rises else (middle, upper)
        return float(loss), float(after), *map(float, sums), lower

    return of_step


@pytest.mark.parametrize("step", [3, 6])
def test_event_files_hold_what_t5x_s_own_gradients_give(events, reverse_mode, step):
    loss, after, slope, curvature, critical = reverse_mode(step)
    rate = training.rate(step - 1)
    expected = {
        "loss": loss,
        "slope": slope,
        "curvature": curvature,
        "predicted_change": slope + curvature / 2,
        "actual_change": after - loss,
        "multiple_of_least_loss": -slope / curvature,
        "multiple_of_return": -2 * slope / curvature,
        "directional_sharpness": -curvature / (rate * slope),
    }
    got = {name: events[f"curvature/{name}"][step] for name in expected}
    assert got == pytest.approx(expected, rel=1e-4)
    found = {name: events[f"curvature/critical_{name}"][step] for name in CRITICAL}
    assert found["multiple"] == pytest.approx(critical, rel=0.1)
    assert found["sharpness"] == pytest.approx(2 / (rate * critical), rel=0.1)
    assert 3 <= events["curvature/forward_passes"][step] <= 10
    # The loss that T5X reports of this step.
    assert got["loss"] == pytest.approx(events["loss"][step], rel=1e-6)


@pytest.mark.parametrize("step", [3, 6])
def test_the_largest_eigenvalues_are_those_of_arpack(events, runs, stock, step):
    import scipy.sparse.linalg
    from jax.flatten_util import ravel_pytree

    from t5x_fwdloss.t5x_host import optimizer

    state, batch = runs[0][step], list(training.batches())[step - 1]
    flat, unravel = ravel_pytree(state.params)

    @jax.jit
    def product(v):
        gradient = lambda p: step_gradient(stock, p, batch, step - 1)[0]
        return ravel_pytree(jax.jvp(gradient, (state.params,), (unravel(v),))[1])[0]

    def largest(matvec):
        shape = (len(flat), len(flat))
        operator = scipy.sparse.linalg.LinearOperator(shape, matvec, dtype=np.float32)
        values = scipy.sparse.linalg.eigsh(
            operator, 1, which="LA", return_eigenvectors=False
        )
        return float(values[0])

    rate = training.rate(step - 1)
    found = optimizer.of_t5x(state._optimizer, rate)
    root = np.sqrt(ravel_pytree(found.diagonal)[0])
    expected = {
        "hessian": largest(lambda v: product(v.ravel())),
        "preconditioned_hessian": largest(lambda v: root * product(root * v.ravel())),
    }
    for matrix, value in expected.items():
        got = events[f"curvature/largest_eigenvalue_of_{matrix}"][step]
        assert got == pytest.approx(value, rel=1e-3), matrix
        assert 0 <= events[f"curvature/residual_of_{matrix}"][step] < 0.05 * value
    got = events["curvature/threshold_of_preconditioned_hessian"][step]
    assert got == pytest.approx(2 / rate, rel=1e-5)  # Adafactor without momentum


@pytest.mark.parametrize("step", [3, 6])
def test_the_noise_scale_is_that_of_the_microbatches(events, runs, stock, step):
    params, batch = runs[0][step - 1].params, list(training.batches())[step - 1]
    key = jax.random.split(stock._get_step_rng(step - 1))[1]
    of_piece = jax.jit(
        jax.grad(lambda p, piece: stock._model.loss_fn(p, piece, key)[0])
    )
    square = lambda tree: sum(
        float(np.sum(np.float64(x) ** 2)) for x in jax.tree.leaves(tree)
    )
    halves = [jax.tree.map(lambda x, at=at: x[at : at + 4], batch) for at in (0, 4)]
    small = np.mean([square(of_piece(params, half)) for half in halves]) * 4
    gradient = jax.jit(step_gradient, static_argnums=0)
    whole = square(gradient(stock, params, batch, step - 1)[0])
    variance = (small - whole) / (1 / 4 - 1 / 8)
    unbiased = (8 * whole - 4 * small) / (8 - 4)
    assert events["curvature/gradient_variance"][step] == pytest.approx(
        variance, rel=1e-3
    )
    got = events["curvature/squared_gradient"][step]
    assert got == pytest.approx(unbiased, rel=1e-3, abs=1e-3 * whole)
    if step == 3:  # no average before it
        assert unbiased > 0.01 * whole
        scale = events["curvature/noise_scale_in_sequences"][step]
        assert scale == pytest.approx(variance / unbiased, rel=1e-2)
        tokens = batch["decoder_loss_weights"].sum() / 8
        got = events["curvature/noise_scale_in_tokens"][step]
        assert got == pytest.approx(scale * tokens, rel=1e-6)


@pytest.mark.parametrize("step", [3, 6])
def test_other_data_are_measured_along_the_same_update(events, runs, stock, step):
    import seqio

    task = seqio.get_mixture_or_task(training.TASK)
    examples = task.get_dataset(training.LENGTHS, "train", shuffle=False, seed=0)
    converted = seqio.EncDecFeatureConverter(pack=False)(examples, training.LENGTHS)
    batch = next(converted.batch(training.BATCH).as_numpy_iterator())
    old, new = (runs[0][at].params for at in (step - 1, step))
    update = jax.tree.map(np.subtract, new, old)
    loss = jax.jit(lambda p: stock._model.loss_fn(p, batch, None)[0])
    slope, product = jax.jit(lambda: jax.jvp(jax.grad(loss), (old,), (update,)))()
    inner = lambda a: sum(
        float(np.vdot(np.float64(x), np.float64(y)))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(update), strict=True)
    )
    expected = {
        "loss": float(loss(old)),
        "slope": inner(slope),
        "curvature": inner(product),
        "actual_change": float(loss(new)) - float(loss(old)),
    }
    tag = f"curvature/{training.TASK}"
    got = {name: events[f"{tag}/{name}"][step] for name in expected}
    assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)
    critical = events[f"{tag}/critical_multiple"].get(step)
    if critical is not None:
        rate = training.rate(step - 1)
        assert events[f"{tag}/critical_sharpness"][step] == pytest.approx(
            2 / (rate * critical), rel=1e-5
        )


def test_only_probed_steps_have_numbers_and_each_tells_its_cost(events):
    for name in ("slope", "probe_seconds", "share_of_time"):
        assert list(events[f"curvature/{name}"]) == [3, 6]
    assert all(0 < x < 1 for x in events["curvature/share_of_time"].values())
    assert all(x > 0 for x in events["curvature/probe_seconds"].values())


MESHES = {"eight devices": (1, 8), "two processes of two devices": (2, 2)}


@pytest.mark.parametrize("mesh", MESHES)
def test_other_meshes_train_the_same_and_give_the_same_numbers(
    events, tmp_path, repository, mesh
):
    processes, devices = MESHES[mesh]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = [str(repository), str(repository / "tests")]
    flags = f"--xla_force_host_platform_device_count={devices} {FAST}"
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "training.t5x_training", str(tmp_path)),
                *((address, str(processes), str(index)) if processes > 1 else ()),
            ],
            env={
                **os.environ,
                "XLA_FLAGS": flags,
                "PYTHONPATH": os.pathsep.join(paths),
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        done = [process.communicate(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, done, strict=True):
        assert process.returncode == 0, errors[-3000:]
    reports = [json.loads(output.splitlines()[-1]) for output, _ in done]
    for report in reports:
        assert (report["processes"], report["devices"]) == (
            processes,
            processes * devices,
        )
        assert report["moved"]
        assert report["same"]
    of_time = ("seconds", "share_of_time")
    few = ("eigenvalue", "residual") if processes > 1 else ()
    for tag, values in events.items():
        assert tag in reports[0]["events"]
        if not tag.endswith(of_time) and not any(part in tag for part in few):
            got = {int(step): x for step, x in reports[0]["events"][tag].items()}
            # A residual is a difference of nearly equal vectors.
            scale = events["curvature/largest_eigenvalue_of_hessian"]
            apart = 1e-3 * max(scale.values()) if "residual" in tag else 0
            assert got == pytest.approx(values, rel=2e-4, abs=apart), tag


def test_a_probe_of_nan_is_named_and_training_goes_on(tmp_path, caplog):
    found = training.trainer(tmp_path, training.probed(period=2))
    spoiled = jax.tree.map(lambda x: x * np.nan, found.train_state.params)
    found.train_state = found.train_state.replace_params(spoiled)
    assert len(training.trained(found)) == training.STEPS + 1
    said = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(said) == 3
    assert (
        "probe of step 2 must give finite numbers: got loss nan, slope nan" in said[0]
    )
    assert "curvature/slope" not in training.events(tmp_path)


def test_a_trainer_with_a_loop_of_its_own_is_told_that_it_is_not_probed(
    tmp_path, caplog
):
    from t5x import trainer as t5x_trainer

    class Own(t5x_trainer.Trainer):
        def train(self, batch_iter, num_steps, start_step=None):
            for _ in range(num_steps):
                state = self.train_state
                self.train_state, _ = self._partitioned_train_step(
                    state, next(batch_iter)
                )

    found = training.trainer(tmp_path, training.probed(Own))
    found.train(training.batches(), 2, start_step=0)
    found.close()
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "Own.train must take its steps from _compiled_train_step" in said
    assert "took 0 of 2" in said
