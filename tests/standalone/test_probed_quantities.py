"""What the standalone training's probes measure where asked, by value from its events."""

import jax
import numpy as np
import optax
import pytest
import scipy.sparse.linalg
from jax.flatten_util import ravel_pytree

from t5x_fwdloss import curvature, tasks
from t5x_fwdloss.analysis import optimizer
from t5x_fwdloss.standalone import checkpoints, data

from . import subjects
from .test_probing import DATASET, params_at, read, run

RATE, PIECES, STEPS = 0.01, 4, (2, 4)
OPTIMIZER = optax.adam(RATE)
# A mean over the batch, of which a piece has a part.
SETTINGS = {
    "loss_impl": "custom_jvp",
    "loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS",
}
ASKED = {
    "eigenvalue_products": 30,
    "eigenvalue_matrices": ("hessian", "preconditioned_hessian"),
    "noise_pieces": PIECES,
    "probe_mixture": tasks.TASK_NAME,
}


def model():
    return subjects.model(SETTINGS, dropout_rate=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("run")
    run(
        found,
        model=model(),
        optimizer=OPTIMIZER,
        total_steps=4,
        eval_period=100,
        curvature_period=2,
        learning_rate=RATE,
        **ASKED,
    )
    return found


@pytest.fixture(scope="module")
def events(folder):
    return read(folder)


def given(step):
    """The batch and the dropout key of a step."""
    batches = data.batches(
        DATASET, "test", shuffle=True, num_epochs=None, skip_batches=step - 1
    )
    return next(batches), jax.random.fold_in(jax.random.key(0), step)


def loss(params, batch, key):
    return model().loss_fn(params, batch, key)[0]


def preconditioner(folder, step, params):
    """Adam's, from the state in the checkpoint after the step."""
    path, like = str(folder / f"checkpoint_{step}"), OPTIMIZER.init(params)
    state = checkpoints.restore_optimizer(path, like)
    return optimizer.of_update(OPTIMIZER.update, state, params, learning_rate=RATE)


@pytest.mark.parametrize("step", STEPS)
def test_the_largest_eigenvalues_are_those_of_arpack(folder, events, step):
    params, (batch, key) = params_at(folder, step), given(step)
    flat, unravel = ravel_pytree(params)

    @jax.jit
    def product(v):
        gradient = jax.grad(lambda params: loss(params, batch, key))
        return ravel_pytree(jax.jvp(gradient, (params,), (unravel(v),))[1])[0]

    def largest(root):
        operator = scipy.sparse.linalg.LinearOperator(
            (len(flat), len(flat)),
            lambda v: root * product(root * v.ravel()),
            dtype=np.float32,
        )
        (value,) = scipy.sparse.linalg.eigsh(
            operator, 1, which="LA", return_eigenvectors=False
        )
        return float(value)

    diagonal = preconditioner(folder, step, params).diagonal
    roots = {
        "hessian": np.float32(1),
        "preconditioned_hessian": np.sqrt(ravel_pytree(diagonal)[0]),
    }
    for matrix, root in roots.items():
        found = events[f"curvature/largest_eigenvalue_of_{matrix}"][step]
        residual = events[f"curvature/residual_of_{matrix}"][step]
        assert found == pytest.approx(largest(root), rel=5e-3), matrix
        assert 0 <= residual < 0.1 * found


@pytest.mark.parametrize("step", STEPS)
def test_adam_s_threshold_is_beside_the_preconditioned_eigenvalue(events, step):
    # (2 + 2 beta) / ((1 - beta) eta) at beta = 0.9.
    threshold = events["curvature/threshold_of_preconditioned_hessian"][step]
    assert threshold == pytest.approx(38 / RATE, rel=1e-3)


@pytest.mark.parametrize("step", STEPS)
def test_the_noise_scale_is_that_of_the_pieces(folder, events, step):
    params, (batch, key) = params_at(folder, step - 1), given(step)
    gradient = jax.jit(jax.grad(loss))
    size = DATASET.batch_size // PIECES
    cut = lambda at: jax.tree.map(lambda x: x[at : at + size], batch)
    pieces = [
        np.float64(ravel_pytree(gradient(params, cut(at), key))[0])
        for at in range(0, DATASET.batch_size, size)
    ]
    small = np.mean([g @ g for g in pieces])
    mean = np.mean(pieces, axis=0)
    big = mean @ mean
    variance = (small - big) / (1 / size - 1 / DATASET.batch_size)
    square = (DATASET.batch_size * big - size * small) / (DATASET.batch_size - size)
    got = events["curvature/gradient_variance"][step]
    assert got == pytest.approx(variance, rel=1e-3)
    got = events["curvature/squared_gradient"][step]
    assert got == pytest.approx(square, rel=1e-3, abs=1e-3 * big)
    if step == STEPS[0]:  # no average before it
        expected = variance / square
        found = events["curvature/noise_scale_in_sequences"].get(step)
        assert found == (pytest.approx(expected, rel=2e-3) if square > 0 else None)
    if (scale := events["curvature/noise_scale_in_sequences"].get(step)) is not None:
        weights = np.asarray(batch["decoder_loss_weights"])
        tokens = weights.sum() / weights.any(axis=1).sum()
        got = events["curvature/noise_scale_in_tokens"][step]
        assert got == pytest.approx(scale * tokens, rel=1e-6)


def test_few_products_give_the_ritz_value_of_their_space_with_its_residual(tmp_path):
    run(
        tmp_path,
        model=model(),
        optimizer=OPTIMIZER,
        total_steps=1,
        curvature_period=1,
        eigenvalue_products=3,
    )
    params, (batch, key) = params_at(tmp_path, 1), given(1)

    @jax.jit
    def product(v):
        gradient = jax.grad(lambda params: loss(params, batch, key))
        return jax.jvp(gradient, (params,), (v,))[1]

    flat = lambda tree: np.float64(ravel_pytree(tree)[0])
    # The first probe of a run begins at this vector.
    found = [curvature.random_like(0, params, "normal")]
    for _ in range(3):
        found.append(product(found[-1]))
    basis, _ = np.linalg.qr(
        np.stack([flat(v) / np.linalg.norm(flat(v)) for v in found]).T
    )
    unravel = ravel_pytree(params)[1]
    images = np.stack([flat(product(unravel(np.float32(v)))) for v in basis.T[:3]]).T
    values, vectors = np.linalg.eigh(basis[:, :3].T @ images)
    residual = images @ vectors[:, -1] - values[-1] * (basis[:, :3] @ vectors[:, -1])
    events = read(tmp_path)
    got = [
        events[f"curvature/{x}_of_hessian"][1]
        for x in ("largest_eigenvalue", "residual")
    ]
    assert got == pytest.approx([values[-1], np.linalg.norm(residual)], rel=1e-2)
    assert np.linalg.norm(residual) > 0.02 * values[-1]


@pytest.mark.parametrize("step", STEPS)
def test_other_data_are_measured_along_the_update_without_dropout(folder, events, step):
    (batch,) = data.fixed_batches(DATASET, "test", 1)
    old, new = (params_at(folder, at) for at in (step - 1, step))
    before, after = (float(loss(params, batch, None)) for params in (old, new))
    tag = f"curvature/{tasks.TASK_NAME}"
    assert events[f"{tag}/loss"][step] == pytest.approx(before, rel=1e-5)
    change = events[f"{tag}/actual_change"][step]
    assert change == pytest.approx(after - before, rel=1e-3, abs=1e-5)


def test_what_the_options_need_is_refused_in_a_sentence(tmp_path):
    for changes, sentence in (
        ({"noise_pieces": 3}, "CURVATURE_NOISE_PIECES must divide BATCH_SIZE: got 3"),
        (
            {"noise_pieces": 1},
            "CURVATURE_NOISE_PIECES must be .* of at least 2 or None: got 1",
        ),
        ({"probe_mixture": "no_task"}, "PROBE_MIXTURE must be a task .*no_task"),
        (
            {"eigenvalue_matrices": ("fisher",)},
            "CURVATURE_EIGENVALUE_MATRICES.0. must be one of .*: got 'fisher'",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(tmp_path, curvature_period=2, **changes)
    assert not list(tmp_path.iterdir())
