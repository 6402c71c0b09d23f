"""What T5X's optimizers multiply a gradient by, against their own updates."""

import inspect
import types

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moving_parameters import draw, wide

pytestmark = pytest.mark.t5x


def adafactor_of(**settings):
    from t5x import adafactor

    row, column, batch = (
        getattr(adafactor.FactorDim, n) for n in ("ROW", "COLUMN", "BATCH")
    )
    factor_map = adafactor.HParamMap(
        ((".*heads", (row, batch, column)), (".*", adafactor.HEURISTIC_RULE))
    )
    return adafactor.Adafactor(
        decay_rate=0.8,
        min_dim_size_to_factor=4,
        factor_map=factor_map,
        **settings,
    )


def after(definition, steps, rate=1e-3):
    """The optimizer after real steps, the gradients of which are large."""
    optimizer = definition.create(draw(0))
    step = jax.jit(lambda o, g: o.apply_gradient(g, learning_rate=rate))
    gradients = [draw(seed) for seed in range(1, 6)]
    for number in range(steps):
        optimizer = step(optimizer, gradients[number % 5])
    return optimizer


def really(optimizer, gradient, rate=1.0):
    """What a small gradient moves the parameters by: central differences, float64."""
    size = 1e-7
    with jax.enable_x64(True):
        optimizer, gradient = wide(optimizer), wide(gradient)
        scaled = lambda s: jax.tree.map(lambda x: s * x, gradient)
        move = jax.jit(lambda o, g: o.apply_gradient(g, learning_rate=rate).target)
        up, down = (move(optimizer, scaled(s)) for s in (size, -size))
        return jax.tree.map(lambda x, y: (x - y) / (2 * size), up, down)


@pytest.mark.parametrize("steps", [1, 10, 1000])
@pytest.mark.parametrize(
    ("settings", "threshold"),
    [
        ({}, 2.0),
        ({"beta1": 0.9, "multiply_by_parameter_scale": False}, 38.0),
        ({"weight_decay_rate": 1e-3, "clipping_threshold": None}, 2.0),
        ({"beta1": 0.9, "dtype_momentum": jnp.bfloat16}, 38.0),
    ],
    ids=["default", "momentum", "decay", "narrow momentum"],
)
def test_adafactors_step_is_the_diagonal_times_a_small_gradient(
    settings, threshold, steps
):
    from t5x_fwdloss.t5x_host import optimizer as host

    optimizer = after(adafactor_of(**settings), steps)
    found = host.of_t5x(optimizer, learning_rate=0.5)
    share = 0.1 if "beta1" in settings else 1.0
    gradient = draw(7)
    expected = really(optimizer, gradient)
    for d, g, u in zip(
        *map(jax.tree.leaves, (found.diagonal, gradient, expected)), strict=True
    ):
        np.testing.assert_allclose(
            -share * d * g, u, rtol=1e-5, atol=1e-6 * np.abs(u).max()
        )
    assert found.threshold == pytest.approx(threshold)
    assert (found.optimizer, found.learning_rate) == ("Adafactor", 0.5)
    # The token that was never seen: what epsilon leaves, in float32, as on a TPU.
    assert np.isfinite(np.asarray(found.diagonal["decoder"]["embedding"])).all()


def test_both_ways_to_adafactors_diagonal_agree():
    from t5x_fwdloss.analysis import optimizer as optimizer_lib
    from t5x_fwdloss.t5x_host import optimizer as host

    optimizer = after(adafactor_of(), 10)
    definition = optimizer.optimizer_def

    def update(gradient, state, params):
        hyper_params = definition.update_hyper_params(learning_rate=1.0)
        new, state = definition.apply_gradient(hyper_params, params, state, gradient)
        return jax.tree.map(jnp.subtract, new, params), state

    first = host.of_t5x(optimizer).diagonal
    second = optimizer_lib.of_update(
        update, optimizer.state, optimizer.target, learning_rate=1.0
    ).diagonal
    for x, y in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_an_optimizer_of_some_parameters_leaves_out_the_others():
    from t5x import optimizers

    from t5x_fwdloss.t5x_host import optimizer as host

    only = flax.traverse_util.ModelParamTraversal(lambda path, _: "encoder" in path)
    definition = optimizers.MultiOptimizer(((only, adafactor_of()),))
    optimizer = definition.create(draw(0))
    optimizer = optimizer.apply_gradient(draw(1), learning_rate=1.0)
    found = host.of_t5x(optimizer)
    trained = flax.traverse_util.flatten_dict(found.trained, sep="/")
    assert trained == {name: "encoder" in name for name in trained}


def test_adam_of_optax_is_seen_through_t5xs_wrapper():
    from t5x import optimizers

    from t5x_fwdloss.t5x_host import optimizer as host

    found = host.of_t5x(after(optimizers.adam(learning_rate=2e-3), 10))
    assert found.optimizer == "Adam"
    assert found.learning_rate == pytest.approx(2e-3, rel=3e-5)
    assert found.threshold == pytest.approx(38.0, rel=1e-5)


def load(monkeypatch, restore, learning_rate=None):
    """The preconditioner of what a restorer restores."""
    from t5x_fwdloss.t5x_host import optimizer as host

    class Restorer:
        """Takes what T5X's takes."""

        def __init__(self, *_):
            self.restore = restore

    monkeypatch.setattr(host.checkpoint, "Restorer", Restorer)
    unchecked = inspect.unwrap(host.load)  # of the check of its arguments' types
    return unchecked(None, None, None, learning_rate=learning_rate)


def test_a_schedule_is_asked_for_the_checkpoints_step(monkeypatch):
    def restore():
        """An optimizer after three steps, which says that it were seventy."""
        state = types.SimpleNamespace(_optimizer=after(adafactor_of(), 3))
        return types.SimpleNamespace(state=state, step=70)

    found = load(monkeypatch, restore, lambda step: step / 100)
    assert found.learning_rate == pytest.approx(0.7)


def test_a_state_that_cannot_be_restored_is_told_what_needed_it(monkeypatch):
    def restore():
        raise ValueError("The checkpoint /c could not be read: KeyError: 'v_row'.")

    sentence = "Preconditioned .* with its state in the checkpoint: The .*'v_row'"
    with pytest.raises(ValueError, match=sentence):
        load(monkeypatch, restore)
