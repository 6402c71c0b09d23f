"""T5X's trainer by forward gradients: its steps from T5X's own gradients, and refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.curvature.vectors import probes, trees
from training import t5x_training as training

pytestmark = [pytest.mark.t5x, pytest.mark.timeout(600)]

NORMS = ".*norm/scale"
DIRECTIONS, SEED = 3, 7


def flat(tree):
    return traverse_util.flatten_dict(tree, sep="/")


def expected_step(stock, state, batch):
    """State and metrics after a step: T5X's own gradient, along our directions alone."""
    from t5x import trainer as t5x_trainer

    grads, metrics, _ = t5x_trainer.accumulate_grads_microbatched(
        stock._model,
        state,
        batch,
        stock._get_step_rng(state.step),
        stock._num_microbatches,
    )
    pick = state._optimizer.optimizer_def.chosen.pick
    true, step = pick(grads), state.step
    total = jax.tree.map(jnp.zeros_like, true)
    for number in range(DIRECTIONS):
        key = jax.random.fold_in(jax.random.fold_in(probes.as_key(SEED), step), number)
        v = probes.random_like(key, true, "normal")
        total = trees.axpy(trees.inner(true, v) / DIRECTIONS, v, total)
    return t5x_trainer.apply_grads(
        state,
        total,
        metrics,
        stock._learning_rate_fn(state.step),
        stock._weight_metrics_computer,
    )


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """States and metrics of the same steps, by T5X's gradients and by forward mode."""
    from t5x import trainer as t5x_trainer

    folder = tmp_path_factory.mktemp("steps")
    named = {
        "pattern": NORMS,
        "weight_metrics_computer": t5x_trainer.WeightMetricsComputer(),
    }
    stock = training.trainer(folder / "stock", t5x_trainer.Trainer, **named)
    build = training.forward(num_directions=DIRECTIONS, seed=SEED)
    ours = training.trainer(folder / "ours", build, **named)
    ours.compile_train(next(training.batches()))
    by_reverse = jax.jit(lambda state, batch: expected_step(stock, state, batch))
    first = jax.device_get(stock.train_state)
    wanted, got, found = stock.train_state, ours.train_state, []
    for _, batch in zip(range(2), training.batches(), strict=False):
        wanted, *wanted_metrics = by_reverse(wanted, batch)
        got, *metrics = ours._compiled_train_step(got, batch)
        found.append(jax.device_get((wanted, *wanted_metrics, got, *metrics)))
    stock.close()
    ours.close()
    return first, found


def test_parameters_move_as_by_the_true_gradient_along_the_directions(steps):
    first, found = steps
    for wanted, _, got, _ in found:
        assert int(got.step) == int(wanted.step)
        pairs = zip(*map(jax.tree.leaves, (got, wanted)), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-7)
    moved = jax.tree.map(np.array_equal, first.params, found[-1][2].params)
    still = {path for path, same in flat(moved.unfreeze()).items() if same}
    assert still == {path for path in flat(moved) if not path.endswith("norm/scale")}


def test_metrics_are_t5x_s_and_know_of_no_other_gradient(steps):
    for _, wanted, _, got in steps[1]:
        assert got.keys() == wanted.keys()
        for tag in wanted:
            for one, other in zip(
                *map(jax.tree.leaves, (got[tag], wanted[tag])), strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=2e-4, err_msg=tag)
        gradients = {tag for tag in got if tag.startswith("weight_gradient_rms/")}
        assert gradients
        assert all(tag.endswith("norm/scale") for tag in gradients)


def test_the_optimizer_has_a_state_for_the_chosen_parameters_alone(steps):
    first = steps[0]
    states = flat(first.param_states.unfreeze())
    assert len(states) == 7  # of 3 + 4 norms
    assert all(path.endswith("norm/scale") for path in states)
    assert len(flat(first.state_dict()["target"])) == len(flat(first.params)) > 20


def test_the_preconditioned_hessian_is_that_of_the_parameters_that_move(tmp_path):
    from t5x import models
    from t5x import trainer as t5x_trainer

    from t5x_fwdloss.training.chosen import put

    build = training.probed(
        training.forward(),
        period=2,
        eigenvalue_products=40,
        eigenvalue_matrices=("preconditioned_hessian",),
    )
    ours = training.trainer(tmp_path / "ours", build, pattern=NORMS)
    after = training.trained(ours, steps=2)[-1]
    of_model = training.model(cls=models.EncoderDecoderModel)
    stock = training.trainer(
        tmp_path / "stock", t5x_trainer.Trainer, of_model, pattern=NORMS
    )
    stock.close()
    pick = stock.train_state._optimizer.optimizer_def.chosen.pick
    part, unravel = ravel_pytree(pick(after.params))
    batch = list(itertools.islice(training.batches(), 2))[-1]

    def gradient(x):
        grads, *_ = t5x_trainer.accumulate_grads_microbatched(
            stock._model,
            stock.train_state.replace_params(put(unravel(x), after.params)),
            batch,
            stock._get_step_rng(1),
            stock._num_microbatches,
        )
        return ravel_pytree(pick(grads))[0]

    hessian = jax.jit(jax.jacfwd(gradient))(part)
    # Adafactor's step along a small gradient, at its third step: a norm scale is a
    # vector, so its second moments are not factored, and decay by 1 - 3 ** -0.8.
    roots = [
        np.full_like(x, max(np.sqrt(np.mean(np.square(x))), 1e-3))
        / np.sqrt((1 - 3**-0.8) * state.v)
        for x, state in zip(
            jax.tree.leaves(pick(after.params)),
            jax.tree.leaves(after.param_states, is_leaf=lambda x: hasattr(x, "v_row")),
            strict=True,
        )
    ]
    root = np.sqrt(np.concatenate(roots))
    largest = np.linalg.eigvalsh(root[:, None] * hessian * root)[-1]
    events = training.events(tmp_path / "ours")
    name = "preconditioned_hessian"
    found = events[f"curvature/largest_eigenvalue_of_{name}"][2]
    assert largest > 0
    assert found == pytest.approx(largest, rel=1e-3)
    threshold = events[f"curvature/threshold_of_{name}"][2]
    assert threshold == pytest.approx(2 / training.rate(1), rel=1e-5)


@pytest.mark.parametrize("setting", ["num_directions", "seed", "distribution"])
def test_other_settings_are_refused_by_their_names(setting):
    bad = {"num_directions": 0, "seed": -1, "distribution": "uniform"}[setting]
    name = setting.removeprefix("num_").upper()
    with pytest.raises(ValueError, match=f"FORWARD_GRADIENT_{name} must be .*: got"):
        training.forward(**{setting: bad})


def test_other_trainers_than_t5x_s_are_refused(tmp_path):
    from t5x import trainer as t5x_trainer

    class Own(t5x_trainer.Trainer):
        _partitioned_train_step = None

    sentence = (
        "gradient in T5X's own step: trainer_cls must be t5x.trainer.Trainer or a"
    )
    for other in (t5x_trainer.BaseTrainer, dict):
        with pytest.raises(TypeError, match=sentence):
            training.forward(other)
    with pytest.raises(
        TypeError, match="what trainer_cls returns must be t5x.trainer."
    ):
        training.trainer(tmp_path, training.forward(lambda **_: {}))
    with pytest.raises(TypeError, match="got Own, which has a _partitioned_train_step"):
        training.trainer(tmp_path, training.forward(Own))


def test_a_pattern_without_parameters_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="FORWARD_GRADIENT_PARAMETERS chooses .* 'scale' matches none of 2., such",
    ):
        training.trainer(tmp_path, training.forward(), pattern="scale")
    with pytest.raises(
        ValueError,
        match="FORWARD_GRADIENT_PARAMETERS must be .* regular expression: go",
    ):
        training.trainer(tmp_path, training.forward(), pattern="(scale")


def test_losses_without_forward_mode_are_refused_with_the_ones_to_choose(tmp_path):
    from t5x import models

    from t5x_fwdloss import losses

    class OwnLoss(models.EncoderDecoderModel):
        def loss_fn(self, params, batch, dropout_rng):
            logits = self._compute_logits(params, batch, dropout_rng)
            found = losses.compute_weighted_cross_entropy(
                logits, batch["decoder_target_tokens"], impl="custom_vjp"
            )
            return found[0], {}

    needs = "A forward gradient needs a loss that has forward mode: got"
    for model, got in (
        (
            training.model("custom_vjp"),
            "LOSS_IMPL = 'custom_vjp'; choose 'autodiff' or",
        ),
        (
            training.model(cls=models.EncoderDecoderModel),
            "T5X's own loss, .*; add --gin",
        ),
    ):
        with pytest.raises(ValueError, match=f"{needs} {got}"):
            training.trainer(tmp_path, training.forward(), model)
    found = training.trainer(tmp_path, training.forward(), training.model(cls=OwnLoss))
    with pytest.raises(
        ValueError, match=f"{needs} that of OwnLoss, in which jax.custom"
    ):
        found.compile_train(next(training.batches()))
    found.close()
