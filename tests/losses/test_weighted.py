"""Weights, shapes and settings of `compute_weighted_cross_entropy`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.losses import (
    IMPLEMENTATIONS,
    LossSettings,
    compute_weighted_cross_entropy,
    cross_entropy_with_logits,
)

LOGITS = jax.random.normal(jax.random.key(0), (2, 3, 5))
TARGETS = jax.random.randint(jax.random.key(1), (2, 3), 0, 5)
WEIGHTS = jnp.array([[1.0, 0.5, 0.0], [0.0, 2.0, 1.0]])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_weight_sum_without_weights_is_the_number_of_tokens(impl):
    assert compute_weighted_cross_entropy(LOGITS, TARGETS, impl=impl)[2] == 6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_inputs_may_be_numpy_arrays(impl):
    arrays = [np.asarray(array) for array in (TARGETS, WEIGHTS)]
    from_numpy = compute_weighted_cross_entropy(LOGITS, *arrays, impl=impl)
    from_jax = compute_weighted_cross_entropy(LOGITS, TARGETS, WEIGHTS, impl=impl)
    np.testing.assert_array_equal(from_numpy, from_jax)


@pytest.mark.parametrize("kind", [bool, jnp.int32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_weights_may_have_any_dtype(impl, kind):
    weights = (WEIGHTS > 0).astype(kind)
    loss, _, weight_sum = compute_weighted_cross_entropy(
        LOGITS, TARGETS, weights, impl=impl
    )
    expected = compute_weighted_cross_entropy(
        LOGITS, TARGETS, (WEIGHTS > 0).astype(jnp.float32), impl=impl
    )[0]
    np.testing.assert_array_equal(loss, expected)
    assert weight_sum == 4


BROKEN = {
    "nan": lambda row: jnp.full_like(row, jnp.nan),
    "one nan": lambda row: row.at[1].set(jnp.nan),
    "one inf": lambda row: row.at[1].set(jnp.inf),
    "nothing but -inf": lambda row: jnp.full_like(row, -jnp.inf),
    "a class at -inf": lambda row: row.at[1].set(-jnp.inf),
}


@pytest.mark.parametrize("impl", ["autodiff", "custom_jvp"])
@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_token_of_weight_zero_without_numbers_adds_nothing(broken, impl):
    logits = LOGITS.at[0, 2].set(broken(LOGITS[0, 2]))
    assert WEIGHTS[0, 2] == 0

    def loss(logits):
        return compute_weighted_cross_entropy(
            logits, TARGETS, WEIGHTS, 0.1, 0.01, impl=impl
        )[0]

    def derivatives(logits):
        push = lambda f: jax.jvp(f, (logits,), (LOGITS,))
        return push(loss), push(jax.grad(loss))

    derivatives = jax.jit(derivatives)
    expected = derivatives(LOGITS.at[0, 2].set(0.0))
    jax.tree.map(np.testing.assert_array_equal, derivatives(logits), expected)


def masked_label():
    """A token of weight zero whose label is masked, and one whose classes all are."""
    logits = LOGITS.at[0, 2, TARGETS[0, 2]].set(-jnp.inf).at[1, 0].set(-jnp.inf)
    return jnp.where(jnp.isfinite(logits), LOGITS, 0.0), logits


def test_a_token_of_weight_zero_adds_nothing_though_its_own_loss_is_infinite():
    clean, logits = masked_label()

    def loss(logits):
        return compute_weighted_cross_entropy(
            logits, TARGETS, WEIGHTS, 0.1, 0.01, impl="custom_jvp"
        )[0]

    def derivatives(logits):
        push = lambda f: jax.jvp(f, (logits,), (LOGITS,))
        return (
            push(loss),
            push(jax.grad(loss)),
            jax.grad(lambda x: jax.jvp(loss, (x,), (LOGITS,))[1])(logits),
        )

    derivatives = jax.jit(derivatives)
    results, expected = derivatives(logits), derivatives(clean)
    jax.tree.map(np.testing.assert_array_equal, results, expected)
    gradient = results[1][0]
    np.testing.assert_array_equal(gradient[0, 2], np.zeros(5))


def test_a_token_of_weight_zero_has_its_loss_as_derivative_in_the_weight():
    def loss(weights):
        return compute_weighted_cross_entropy(
            LOGITS, TARGETS, weights, impl="custom_jvp"
        )[0]

    assert jax.grad(loss)(WEIGHTS)[0, 2] > 0


def test_custom_jvp_gives_one_number_in_training_and_in_evaluation():
    logits = (8 * LOGITS).astype(jnp.bfloat16)
    loss = lambda x: compute_weighted_cross_entropy(x, TARGETS, impl="custom_jvp")[0]
    trained, _ = jax.value_and_grad(loss)(logits)
    assert loss(logits).dtype == jnp.float32
    np.testing.assert_array_equal(loss(logits), trained)
    np.testing.assert_array_equal(trained, loss(logits.astype(jnp.float32)))


def test_gradients_of_bfloat16_logits_sum_to_zero_within_their_last_digit():
    logits = (3 * jax.random.normal(jax.random.key(2), (64, 501))).astype(jnp.bfloat16)
    targets = jax.random.randint(jax.random.key(3), (64,), 0, 501)

    def loss(logits):
        return compute_weighted_cross_entropy(logits, targets, impl="custom_jvp")[0]

    gradient = jax.jit(jax.grad(loss))(logits)
    sums = jnp.sum(gradient.astype(jnp.float32), axis=-1)
    assert jnp.max(jnp.abs(sums)) < float(jnp.finfo(jnp.bfloat16).eps) / 2


BAD_SETTINGS = {
    "one of custom_vjp, autodiff, custom_jvp: got 'jvp'": {"impl": "jvp"},
    "whole number of at least 1: got 0": {"chunk_length": 0},
    "whole number of at least 1: got 2.5": {"chunk_length": 2.5},
    "whole number of at least 1: got True": {"chunk_length": True},
    r"number in \[0, 1\): got 1.0": {"label_smoothing": 1.0},
    r"number in \[0, 1\): got -0.1": {"label_smoothing": -0.1},
    r"number in \[0, 1\): got nan": {"label_smoothing": float("nan")},
    r"number in \[0, 1\): got '0.1'": {"label_smoothing": "0.1"},
    "finite and not negative: got -1.0": {"z_loss": -1.0},
    "finite and not negative: got inf": {"z_loss": float("inf")},
    "finite and not negative: got nan": {"z_loss": float("nan")},
    "finite and not negative: got 'a'": {"z_loss": "a"},
    "finite and not negative: got None": {"z_loss": None},
    r"finite and not negative: got \[1\]": {"z_loss": [1]},
    r"finite and not negative: got \[1, \[2\]\]": {"z_loss": [1, [2]]},
    r"custom_jvp: got \['jvp'\]": {"impl": ["jvp"]},
    "AVERAGE_PER_SEQUENCE: got 'tokens'": {"loss_normalizing_factor": "tokens"},
    r"AVERAGE_PER_SEQUENCE: got \[1\]": {"loss_normalizing_factor": [1]},
    "AVERAGE_PER_SEQUENCE: got nan": {"loss_normalizing_factor": float("nan")},
    "AVERAGE_PER_SEQUENCE: got True": {"loss_normalizing_factor": True},
}


@pytest.mark.parametrize("message", BAD_SETTINGS)
def test_settings_are_refused_with_a_sentence(message):
    with pytest.raises(ValueError, match=message):
        LossSettings(**{"impl": "custom_jvp", **BAD_SETTINGS[message]})


def test_settings_that_are_fine_pass():
    LossSettings("custom_vjp", np.int64(3), 0.5, np.float32(1e-4), 7)
    LossSettings("autodiff", z_loss=jnp.bfloat16(0.5))
    LossSettings("autodiff", loss_normalizing_factor="average_per_sequence")
    LossSettings("autodiff", loss_normalizing_factor=jnp.float32(3))
    jax.jit(lambda z_loss: LossSettings("autodiff", None, 0.0, z_loss).z_loss)(0.1)


BAD_ARRAYS = {
    "targets must have one axis fewer": (LOGITS, TARGETS[0], None),
    "targets must .*got targets \\(2, 2\\) for tokens \\(2, 3\\)": (
        LOGITS,
        TARGETS[:, :2],
        None,
    ),
    "targets must be whole numbers: got 0.5": (LOGITS, WEIGHTS, None),
    "weights must have the shape .*got weights \\(2,\\) for targets \\(2, 3\\)": (
        LOGITS,
        TARGETS,
        WEIGHTS[:, 0],
    ),
    "sum of the weights must not be negative: got -1.5": (
        LOGITS,
        TARGETS,
        WEIGHTS - 1,
    ),
}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_arrays_that_do_not_fit_are_refused_with_a_sentence(message):
    with pytest.raises(ValueError, match="(?i)" + message):
        compute_weighted_cross_entropy(*BAD_ARRAYS[message])


def test_an_unknown_name_is_refused_by_the_dense_function_too():
    with pytest.raises(ValueError, match="got 'softmax'"):
        cross_entropy_with_logits(LOGITS, jnp.zeros_like(LOGITS), 0.0, impl="softmax")
