"""Fine-tuning by forward gradients in the standalone training."""

import jax
import numpy as np
import optax
import pytest
from flax import traverse_util
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.curvature.vectors import probes, trees
from t5x_fwdloss.standalone import data
from t5x_fwdloss.training.chosen import Chosen, put

from . import subjects
from .test_probing import DATASET, SETTINGS, params_at, read, run

RATE, DIRECTIONS = 0.1, 2
FORWARD = {
    "forward_parameters": ".*norm/scale",
    "forward_directions": DIRECTIONS,
    "optimizer": optax.sgd(RATE, momentum=0.9),
    "eval_period": 100,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run from a checkpoint in one go, and one that was stopped and resumed."""
    first, whole, halves = (
        tmp_path_factory.mktemp(x) for x in ("pre", "whole", "halves")
    )
    run(first, total_steps=2, eval_period=100)  # the first step has a rate of 0
    settings = {**FORWARD, "initial_checkpoint_path": str(first)}
    run(whole, total_steps=2, **settings)
    for total in (1, 2):
        run(halves, total_steps=total, **settings)
    return first, whole, halves


def test_a_step_goes_by_the_true_gradient_along_its_directions(runs):
    first, whole, _ = runs
    old, new = params_at(first, 2), params_at(whole, 1)
    batch = next(data.batches(DATASET, "test", shuffle=True, num_epochs=None))
    key = jax.random.fold_in(jax.random.key(0), 1)
    model = subjects.model(SETTINGS, dropout_rate=0.1)
    loss = lambda params: model.loss_fn(params, batch, key)[0]
    true = Chosen(".*norm/scale").pick(jax.jit(jax.grad(loss))(old))
    own = jax.random.fold_in(key, probes.path_hash("forward gradient"))
    moved = flat(old)
    for number in range(DIRECTIONS):
        v = probes.random_like(jax.random.fold_in(own, number), true, "normal")
        slope = trees.inner(true, v)
        for name, x in flat(v).items():
            moved[name] = moved[name] - RATE * slope * x / DIRECTIONS
    for name, x in flat(new).items():
        if name.endswith("norm/scale"):
            np.testing.assert_allclose(x, moved[name], rtol=1e-4)
            assert not np.array_equal(x, flat(old)[name])
        else:
            np.testing.assert_array_equal(x, flat(old)[name])


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def test_a_resumed_run_ends_with_the_same_numbers(runs):
    _, whole, halves = runs
    subjects.assert_same_trees(params_at(whole, 2), params_at(halves, 2))


def test_the_preconditioned_hessian_is_that_of_the_parameters_that_move(runs, tmp_path):
    settings = {**FORWARD, "initial_checkpoint_path": str(runs[0])}
    run(
        tmp_path,
        total_steps=1,
        curvature_period=1,
        learning_rate=RATE,
        eigenvalue_products=25,
        eigenvalue_matrices=("preconditioned_hessian",),
        **settings,
    )
    new = params_at(tmp_path, 1)
    batch = next(data.batches(DATASET, "test", shuffle=True, num_epochs=None))
    key = jax.random.fold_in(jax.random.key(0), 1)
    model = subjects.model(SETTINGS, dropout_rate=0.1)
    part, unravel = ravel_pytree(Chosen(".*norm/scale").pick(new))
    loss = lambda x: model.loss_fn(put(unravel(x), new), batch, key)[0]
    # Momentum without an average: P is 1 where parameters move, and 0 elsewhere.
    largest = np.linalg.eigvalsh(jax.jit(jax.hessian(loss))(part))[-1]
    events = read(tmp_path)
    found = events["curvature/largest_eigenvalue_of_preconditioned_hessian"][1]
    assert found == pytest.approx(max(largest, 0), rel=1e-2)
    threshold = events["curvature/threshold_of_preconditioned_hessian"][1]
    assert threshold == pytest.approx(3.8 / RATE, rel=1e-3)  # (2 + 2 beta) / eta


def test_what_cannot_be_trained_so_is_refused(tmp_path):
    model = subjects.model({**SETTINGS, "loss_impl": "custom_vjp"})
    with pytest.raises(
        ValueError,
        match="A forward gradient needs .* got LOSS_IMPL = 'custom_vjp'; choose 'autod",
    ):
        run(tmp_path, model=model, forward_parameters=".*")
    with pytest.raises(
        ValueError, match="FORWARD_GRADIENT_PARAMETERS chooses .* 'no' matches none of"
    ):
        run(tmp_path, forward_parameters="no")
    with pytest.raises(
        ValueError, match="FORWARD_GRADIENT_DIRECTIONS must be .* got 0"
    ):
        run(tmp_path, forward_parameters=".*", forward_directions=0)
    assert not list(tmp_path.glob("checkpoint_*"))
