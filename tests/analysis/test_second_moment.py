"""Second moments out of saved optimizer states, against what the optimizer divides by."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_fwdloss.analysis import second_moment

SHAPES = {
    "encoder": {"kernel": (6, 4), "square": (5, 5), "scale": (4,)},
    "decoder": {"heads": (4, 2, 8), "embedding": (9, 4)},
}


def tree(seed):
    rng = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, SHAPES, is_leaf=is_shape)


def state_dict(state):
    return flax.serialization.to_state_dict(state)


def after_steps(optimizer, num=3):
    """The last update and the state behind it, and the gradient."""
    params = tree(0)
    state = optimizer.init(params)
    for seed in range(1, num + 1):
        gradient = tree(seed)
        updates, state = optimizer.update(gradient, state, params)
    return updates, state, gradient, params


@pytest.mark.parametrize("min_dim", [3, 5, 128])
def test_adafactors_update_is_the_gradient_over_its_root(min_dim):
    transform = optax.scale_by_factored_rms(min_dim_size_to_factor=min_dim)
    optimizer = optax.chain(optax.identity(), transform)
    updates, state, gradient, params = after_steps(optimizer)
    moment = second_moment.from_state(state_dict(state), params)
    for u, g, v in zip(*map(jax.tree.leaves, (updates, gradient, moment)), strict=True):
        np.testing.assert_allclose(u, g / np.sqrt(v), rtol=1e-5)


def test_adams_is_taken_as_saved():
    optimizer = optax.chain(optax.clip(10.0), optax.adam(1.0, b1=0.0, eps=0.0))
    updates, state, gradient, params = after_steps(optimizer)
    moment = second_moment.from_state(state_dict(state), params)
    correction = 1 - 0.999**3
    for u, g, v in zip(*map(jax.tree.leaves, (updates, gradient, moment)), strict=True):
        np.testing.assert_allclose(u, -g / np.sqrt(v / correction), rtol=1e-4)


def test_it_is_read_from_a_checkpoint_of_the_standalone_training(tmp_path):
    from t5x_fwdloss.standalone import checkpoints

    _, state, _, params = after_steps(optax.adafactor(0.1, min_dim_size_to_factor=3))
    with checkpoints.open_manager(str(tmp_path)) as manager:
        checkpoints.save(manager, 3, params, state)
    saved = checkpoints.restore_optimizer_state(str(tmp_path))
    found = second_moment.from_state(saved, params)
    expected = second_moment.from_state(state_dict(state), params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_state_without_a_second_moment_is_refused():
    _, state, _, params = after_steps(optax.trace(0.9))
    with pytest.raises(ValueError, match=r"Adafactor's v\): it holds trace/decoder/"):
        second_moment.from_state(state_dict(state), params)


@pytest.mark.t5x
@pytest.mark.parametrize("rules", ["heuristic", "logical"])
def test_t5xs_adafactor_divides_by_it(rules):
    from t5x import adafactor

    from t5x_fwdloss.host import second_moment as host

    params = tree(0)
    factor_map = None
    if rules == "logical":
        row, column, batch = (
            getattr(adafactor.FactorDim, n) for n in ("ROW", "COLUMN", "BATCH")
        )
        factor_map = adafactor.HParamMap(
            ((".*heads", (row, batch, column)), (".*", adafactor.HEURISTIC_RULE))
        )
    else:
        params["decoder"].pop("heads")  # T5X asks for a rule beyond two axes
    optimizer = adafactor.Adafactor(
        learning_rate=1.0,
        decay_rate=0.8,
        clipping_threshold=None,
        multiply_by_parameter_scale=False,
        min_dim_size_to_factor=3,
        factor_map=factor_map,
    )
    state = optimizer.create(params)
    for seed in (1, 2):
        gradient = tree(seed)
        if rules == "heuristic":
            gradient["decoder"].pop("heads")
        before = state.target
        state = state.apply_gradient(gradient, learning_rate=1.0)
    saved = state_dict(state.state_dict())["state"]
    moment = second_moment.from_state(saved, params, host.lacking_axes(optimizer))
    step = jax.tree.map(jnp.subtract, before, state.target)
    for u, g, v in zip(*map(jax.tree.leaves, (step, gradient, moment)), strict=True):
        np.testing.assert_allclose(u, g / np.sqrt(v), rtol=1e-4, atol=1e-5)
