"""Preconditioners and thresholds of stability against what the optimizers really do."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from moving_parameters import draw, wide

from t5x_fwdloss.analysis import Eigenpairs, HostInfo, optimizer, run_analysis

from . import toy

OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adam without momentum": optax.adam(1e-3, b1=0.0, eps=1e-2),
    "adamw": optax.adamw(
        optax.linear_schedule(1e-3, 1e-4, 50), eps_root=1e-6, weight_decay=0.1
    ),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "adafactor, momentum": optax.adafactor(
        0.1, min_dim_size_to_factor=4, momentum=0.8, weight_decay_rate=1e-3
    ),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "sgd": optax.sgd(0.1, momentum=0.9),
}


def after(transform, steps):
    """The state after a number of real steps, and parameters."""
    params = draw(0)
    gradients = jax.tree.map(lambda *x: jnp.stack(x), *map(draw, range(1, 6)))

    @jax.jit
    def run(state):
        def step(state, number):
            gradient = jax.tree.map(lambda x: x[number % 5], gradients)
            return transform.update(gradient, state, params)[1], None

        return jax.lax.scan(step, state, jnp.arange(steps))[0]

    return run(transform.init(params)), params


def really(update, state, params, gradient):
    """What a small gradient adds to the change of the parameters: differences, float64.

    Small is beside the root of the second moments, which entries without a past have
    none of: these are asked with a gradient so small that no momentum of others, which
    are rounded, would let it be seen.
    """
    with jax.enable_x64(True):
        state, params, gradient = wide(state), wide(params), wide(gradient)
        compiled = jax.jit(update)

        def difference(size):
            scaled = lambda s: jax.tree.map(lambda x: s * x, gradient)
            up, down = (compiled(scaled(s), state, params)[0] for s in (size, -size))
            return jax.tree.map(lambda x, y: (x - y) / (2 * size), up, down)

        unseen = difference(1e-16)
        rows = unseen["decoder"]["embedding"][3]
        # Beside them the other gradient would not be small: it would be clipped.
        rest = gradient["decoder"]["embedding"].at[3].set(0.0)
        gradient["decoder"]["embedding"] = rest
        seen = difference(1e-7)
        seen["decoder"]["embedding"] = seen["decoder"]["embedding"].at[3].set(rows)
        return seen


@pytest.mark.parametrize("steps", [1, 10, 1000])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_small_gradient_moves_the_parameters_by_the_diagonal(name, steps):
    transform = OPTIMIZERS[name]
    state, params = after(transform, steps)
    found = optimizer.of_update(transform.update, state, params)
    gradient = draw(7)
    gradient["decoder"]["embedding"] = gradient["decoder"]["embedding"].at[3].set(1e-3)
    expected = really(transform.update, state, params, gradient)
    share = 1.0
    if "adam" in name or "clipped" in name:
        b1 = 0.0 if "without" in name else 0.9
        share = (1 - b1) / (1 - b1 ** (steps + 1))
    if "adafactor, momentum" in name:
        share = 0.2
    for d, g, u in zip(
        *map(jax.tree.leaves, (found.diagonal, gradient, expected)), strict=True
    ):
        step = -found.learning_rate * share * d * g
        # A token that was never seen has 1e-30 alone, of which (5e-18)^2 is 2.5e-5.
        unseen = np.asarray(np.abs(d) > 1e10)
        np.testing.assert_allclose(step[unseen], u[unseen], rtol=3e-5)
        np.testing.assert_allclose(
            step[~unseen], u[~unseen], rtol=1e-5, atol=1e-7 * np.abs(u[~unseen]).max()
        )


def test_adams_diagonal_is_that_of_the_corrected_second_moment():
    state, params = after(optax.adam(1e-3, eps=1e-3), 40)
    found = optimizer.of_update(optax.adam(1e-3, eps=1e-3).update, state, params)
    assert found.learning_rate == pytest.approx(1e-3, rel=3e-5)
    assert found.threshold == pytest.approx(38.0, rel=1e-5)
    for d, nu in zip(*map(jax.tree.leaves, (found.diagonal, state[0].nu)), strict=True):
        corrected = 0.999 * np.asarray(nu, np.float64) / (1 - 0.999**41)
        np.testing.assert_allclose(d, 1 / (np.sqrt(corrected) + 1e-3), rtol=3e-5)


@pytest.mark.parametrize(
    ("transform", "rate"),
    [
        (optax.sgd(0.1), 0.1),
        (optax.sgd(0.1, momentum=0.9), 0.1),
        (optax.sgd(0.1, momentum=0.7, nesterov=True), 0.1),
        (optax.chain(optax.ema(0.9, debias=False), optax.scale(-0.1)), 0.1),
    ],
    ids=["plain", "heavy ball", "nesterov", "averaged"],
)
def test_steps_diverge_just_above_the_threshold_and_not_below(transform, rate):
    params = {"x": jnp.ones(3)}
    found = optimizer.of_update(transform.update, transform.init(params), params)
    assert found.learning_rate == pytest.approx(rate, rel=1e-6)
    for factor, diverges in ((0.99, False), (1.01, True)):
        eigenvalue = factor * found.threshold / found.learning_rate
        diagonal = found.diagonal["x"]

        def step(carry, _, eigenvalue=eigenvalue / diagonal):
            params, state = carry
            gradient = {"x": eigenvalue * params["x"]}
            update, state = transform.update(gradient, state, params)
            return (optax.apply_updates(params, update), state), None

        (end, _), _ = jax.lax.scan(
            step, (params, transform.init(params)), None, length=3000
        )
        size = float(jnp.abs(end["x"]).max())
        assert (not size < 1e6) == diverges, (factor, size)


def test_what_is_not_trained_is_known():
    transform = optax.multi_transform(
        {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()},
        {"encoder": "trained", "decoder": "frozen"},
    )
    state, params = after(transform, 3)
    found = optimizer.of_update(transform.update, state, params)
    assert jax.tree.leaves(found.trained) == [False, False, True, True, True]
    assert found.threshold == pytest.approx(38.0, rel=1e-5)


def test_a_leaf_is_trained_where_any_of_it_is():
    transform = optax.chain(
        optax.adam(1e-3),
        optax.stateless(
            lambda g, _: {"x": g["x"] * jnp.array([0.0, 1.0]), "y": g["y"]}
        ),
    )
    params = {"x": jnp.ones(2), "y": jnp.ones(2)}
    found = optimizer.of_update(transform.update, transform.init(params), params)
    assert found.trained == {"x": True, "y": True}
    np.testing.assert_array_equal(found.diagonal["x"] > 0, [False, True])


def test_two_momenta_have_no_threshold():
    transform = optax.multi_transform(
        {"slow": optax.sgd(0.1, momentum=0.9), "fast": optax.sgd(0.1, momentum=0.5)},
        {"encoder": "slow", "decoder": "fast"},
    )
    state, params = after(transform, 3)
    assert optimizer.of_update(transform.update, state, params).threshold is None


@pytest.mark.parametrize(
    ("rate", "step", "expected"),
    [
        (optax.linear_schedule(1.0, 0.0, 100), 70, 0.3),
        (optax.linear_schedule(1.0, 0.0, 100), None, 1.0),
        (0.5, 70, 0.5),
        (None, 70, None),
    ],
)
def test_a_schedule_gives_the_learning_rate_at_the_step(rate, step, expected):
    found = optimizer.at_step(rate, step)
    assert found == (expected and pytest.approx(expected, rel=1e-6))


def test_an_injected_learning_rate_is_read_from_the_state():
    transform = optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.02)
    state, params = after(transform, 3)
    found = optimizer.of_update(transform.update, state, params)
    assert found.learning_rate == pytest.approx(0.02)
    assert found.optimizer == "RMSProp"


@pytest.mark.parametrize(
    ("transform", "steps"),
    [
        # Before the first step, all entries of their second moments are the same.
        (optax.rmsprop(0.02), 0),
        (optax.rmsprop(0.02), 3),
        (optax.adagrad(0.02), 0),
        (
            optax.multi_transform(
                {"slow": optax.adam(0.02), "fast": optax.adam(0.04)},
                {"encoder": "slow", "decoder": "fast"},
            ),
            3,
        ),
    ],
    ids=["fresh rmsprop", "rmsprop", "fresh adagrad", "two rates"],
)
def test_a_rate_that_cannot_be_told_apart_stays_in_the_diagonal(transform, steps):
    state, params = after(transform, steps)
    found = optimizer.of_update(transform.update, state, params)
    assert found.learning_rate is None
    assert found.includes_learning_rate
    gradient = draw(7)
    expected = really(transform.update, state, params, gradient)
    step = -found.diagonal["encoder"]["kernel"] * gradient["encoder"]["kernel"]
    share = 0.1 / (1 - 0.9**4) if found.optimizer == "Adam" else 1.0
    np.testing.assert_allclose(share * step, expected["encoder"]["kernel"], rtol=1e-5)


def test_an_update_that_ignores_small_gradients_is_refused():
    state, params = after(optax.lion(1e-3), 2)
    with pytest.raises(
        ValueError, match="must be a smooth function of small gradients"
    ):
        optimizer.of_update(optax.lion(1e-3).update, state, params)


def test_an_update_with_an_infinite_derivative_is_refused():
    transform = optax.stateless(lambda g, _: jax.tree.map(lambda x: x / 0.0, g))
    params = {"x": jnp.ones(2)}
    with pytest.raises(ValueError, match="the squares of its derivatives sum to "):
        optimizer.of_update(transform.update, transform.init(params), params)


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (optax.adamw(1e-3), "Adam"),
        (optax.adafactor(1e-3, momentum=0.9), "Adafactor"),
        (optax.rmsprop(1e-3, momentum=0.9), "RMSProp"),
        (optax.adagrad(1e-3), "Adagrad"),
        (optax.sgd(1e-3, momentum=0.9), "SGD with momentum"),
        (optax.sgd(1e-3), "SGD"),
    ],
)
def test_the_optimizer_is_named_by_its_state(transform, name):
    assert optimizer.name_of(transform.init({"x": jnp.ones(2)})) == name


@pytest.fixture
def trained():
    """A softmax regression after ten real steps of Adam."""
    from t5x_fwdloss.analysis import Objective

    objective = Objective.from_model(toy.SoftmaxRegression(factor=1.0), toy.batches())
    params, transform = toy.parameters(), optax.adam(0.05, b1=0.8, eps=1e-4)
    state = transform.init(params)
    moments = np.zeros(16)
    for _ in range(10):
        gradient = objective.gradient(params)
        flat = np.asarray(ravel_pytree(gradient)[0], np.float64)
        moments = 0.999 * moments + 0.001 * flat**2
        change, state = transform.update(gradient, state, params)
        params = optax.apply_updates(params, change)
    host = HostInfo(
        load_preconditioner=lambda: optimizer.of_update(transform.update, state, params)
    )
    return objective, params, host, 0.999 * moments / (1 - 0.999**11)


def test_results_hold_the_preconditioned_eigenvalues_and_their_threshold(
    trained, tmp_path
):
    objective, params, host, moment = trained
    measurement = Eigenpairs(preconditioned=True, num_largest=2, tolerance=1e-5)
    run_analysis(
        objective, params, measurements=[measurement], output_dir=tmp_path, host=host
    )
    found = json.loads((tmp_path / "results.json").read_text())["measurements"][0]
    dense = toy.dense_hessian(params, toy.examples(), 1.0)
    root = (np.sqrt(moment) + 1e-4) ** -0.5
    values = np.linalg.eigvalsh(root[:, None] * dense * root)
    numbers = found["results"]
    assert numbers["largest_1"]["value"] == pytest.approx(values[-1], rel=1e-4)
    assert numbers["smallest_1"]["value"] == pytest.approx(
        values[0], abs=1e-4 * values[-1]
    )
    assert numbers["learning_rate"]["value"] == pytest.approx(0.05, rel=3e-5)
    threshold = numbers["stability_threshold"]["value"]
    assert threshold == pytest.approx((2 + 2 * 0.8) / ((1 - 0.8) * 0.05), rel=1e-4)
    assert any(
        "below 18 / η, at its learning rate η = 0.05" in n for n in found["notes"]
    )


def test_a_group_that_is_not_trained_is_refused_before_anything_is_measured(
    trained, tmp_path
):
    objective, params, _, _ = trained
    transform = optax.multi_transform(
        {"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()},
        {"dense": {"kernel": "trained", "bias": "frozen"}},
    )
    host = HostInfo(
        load_preconditioner=lambda: optimizer.of_update(
            transform.update, transform.init(params), params
        )
    )
    whole = Eigenpairs(preconditioned=True, num_largest=1, num_smallest=0)
    run_analysis(
        objective,
        params,
        measurements=[whole],
        output_dir=tmp_path / "whole",
        host=host,
    )
    found = json.loads((tmp_path / "whole" / "results.json").read_text())
    # Before the first step Adam divides by epsilon alone.
    dense = toy.dense_hessian(params, toy.examples(), 1.0)[4:, 4:]
    expected = np.linalg.eigvalsh(dense)[-1] / 1e-8
    measured = found["measurements"][0]
    assert measured["results"]["largest_1"]["value"] == pytest.approx(
        expected, rel=1e-4
    )
    assert any("trains 12 of 16 parameters" in note for note in measured["notes"])
    frozen = Eigenpairs(preconditioned=True, group="dense/bias")
    with pytest.raises(
        ValueError, match="'dense/bias' holds none, and it trains dense/k"
    ):
        run_analysis(
            objective,
            params,
            measurements=[frozen],
            output_dir=tmp_path / "b",
            host=host,
        )
    assert not (tmp_path / "b").exists()
