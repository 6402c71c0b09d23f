"""The model: T5X's loss and metrics on the standalone network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import losses

from . import subjects

BATCH = subjects.packed_batch()
SETTINGS = {"label_smoothing": 0.1, "z_loss": 1e-2}


def textbook(logits, batch, label_smoothing=0.0, z_loss=0.0):
    """Sum over tokens of weight * (cross entropy of the smoothed row + z term)."""
    logits = np.asarray(logits, np.float64)
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    vocab = logits.shape[-1]
    log_z = np.log(np.exp(logits).sum(-1))
    off = label_smoothing / (vocab - 1)
    rows = np.full(logits.shape, off)
    np.put_along_axis(rows, targets[..., None], 1 - label_smoothing, -1)
    floor = -(rows * np.log(np.maximum(rows, 1e-300))).sum(-1)
    loss = (rows * (log_z[..., None] - logits)).sum(-1) - floor + z_loss * log_z**2
    return (weights * loss).sum()


@pytest.mark.parametrize("factor", [None, 7.0, "NUM_REAL_TARGET_TOKENS"])
@pytest.mark.parametrize("impl", list(losses.IMPLEMENTATIONS))
def test_loss_is_the_textbook_sum_over_the_factor(impl, factor):
    model = subjects.model(
        {**SETTINGS, "loss_impl": impl, "loss_normalizing_factor": factor}
    )
    params = model.get_initial_params(jax.random.key(0), BATCH)
    loss, metrics = jax.jit(model.loss_fn, static_argnums=2)(params, BATCH, None)
    expected = textbook(model._compute_logits(params, BATCH), BATCH, **SETTINGS)
    count = BATCH["decoder_loss_weights"].sum()
    divisor = {None: 1.0, 7.0: 7.0}.get(factor, count)
    tolerance = 64 * float(jnp.finfo(jnp.float32).eps)
    np.testing.assert_allclose(loss, expected / divisor, rtol=tolerance)
    np.testing.assert_allclose(metrics["loss"].compute(), loss, rtol=tolerance)


def test_accuracy_counts_weighted_tokens_only():
    model = subjects.model()
    params = model.get_initial_params(jax.random.key(0), BATCH)
    logits = model._compute_logits(params, BATCH)
    right = np.asarray(logits.argmax(-1))
    half = np.where(np.arange(right.shape[1]) % 2 == 0, right, (right + 1) % 384)
    metrics = model._compute_metrics(
        logits, jnp.asarray(half), jnp.asarray(BATCH["decoder_loss_weights"]), 1.0
    )
    weights = BATCH["decoder_loss_weights"]
    expected = weights[:, ::2].sum() / weights.sum()
    np.testing.assert_allclose(metrics["accuracy"].compute(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"loss_impl": "nonsense"}, "custom_jvp: got 'nonsense'"),
        ({"loss_chunk_length": 0}, "at least 1: got 0"),
        ({"label_smoothing": 1.0}, r"\[0, 1\): got 1.0"),
        ({"z_loss": -1.0}, "finite and not negative: got -1.0"),
        ({"loss_normalizing_factor": "tokens"}, "SEQUENCE: got 'tokens'"),
    ],
)
def test_loss_settings_are_refused_when_the_model_is_made(setting, message):
    with pytest.raises(ValueError, match=message):
        subjects.model(setting)


def test_metrics_have_t5x_names():
    model = subjects.model({"z_loss": 1e-3})
    params = model.get_initial_params(jax.random.key(0), BATCH)
    _, metrics = model.loss_fn(params, BATCH, None)
    assert {
        "accuracy",
        "loss",
        "z_loss",
        "cross_ent_loss",
        "loss_per_nonpadding_target_token",
        "loss_per_all_target_tokens",
        "non_padding_fraction/loss_weights",
    } <= set(metrics)


def test_chunked_loss_gives_the_same_numbers():
    whole, chunked = (
        subjects.model({**SETTINGS, "loss_impl": "custom_jvp", "loss_chunk_length": c})
        for c in (None, 5)
    )
    params = whole.get_initial_params(jax.random.key(0), BATCH)
    one, other = (m.loss_fn(params, BATCH, None) for m in (whole, chunked))
    np.testing.assert_allclose(one[0], other[0], rtol=1e-6)
    assert set(one[1]) == set(other[1])
    for name in one[1]:
        np.testing.assert_allclose(
            one[1][name].compute(), other[1][name].compute(), rtol=1e-6
        )
