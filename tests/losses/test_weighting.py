"""Normalizing factors and weights follow T5X's contract."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from t5x_fwdloss.losses import get_loss_normalizing_factor_and_weights

TARGETS = jnp.array([[5, 3, 2, 0], [7, 0, 0, 0], [0, 0, 0, 0]])
BATCH = {"decoder_target_tokens": TARGETS}
IS_REAL = np.asarray(TARGETS > 0, np.float32)


Factor = enum.Enum("Factor", ["NUM_REAL_TARGET_TOKENS"])  # as T5X's own


@pytest.mark.parametrize("factor", [None, 7, 2.5, np.float32(3), jnp.float32(4)])
def test_numbers_and_none_pass_through_with_the_weights_of_the_batch(factor):
    weights = jnp.ones_like(TARGETS)
    batch = {**BATCH, "decoder_loss_weights": weights}
    result, result_weights = get_loss_normalizing_factor_and_weights(factor, batch)
    assert result is factor
    assert result_weights is weights
    assert get_loss_normalizing_factor_and_weights(factor, BATCH)[1] is None


@pytest.mark.parametrize(
    "factor",
    ["NUM_REAL_TARGET_TOKENS", "num_real_target_tokens", Factor.NUM_REAL_TARGET_TOKENS],
)
def test_real_tokens_are_those_above_zero(factor):
    number, weights = get_loss_normalizing_factor_and_weights(factor, BATCH)
    assert number == 4
    np.testing.assert_array_equal(weights, IS_REAL)


def test_real_tokens_are_the_sum_of_given_weights():
    batch = {**BATCH, "decoder_loss_weights": jnp.full(TARGETS.shape, 0.5)}
    number, _ = get_loss_normalizing_factor_and_weights("NUM_REAL_TARGET_TOKENS", batch)
    assert number == 6


def test_total_tokens_count_the_padding():
    number, weights = get_loss_normalizing_factor_and_weights(
        "NUM_TOTAL_TARGET_TOKENS", BATCH
    )
    assert number == 12
    np.testing.assert_array_equal(weights, IS_REAL)


def test_sequences_weigh_one_each_and_empty_ones_nothing():
    number, weights = get_loss_normalizing_factor_and_weights(
        "AVERAGE_PER_SEQUENCE", BATCH
    )
    np.testing.assert_allclose(number, 2, rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(weights, axis=-1), [1, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, bool])
def test_packed_segments_weigh_one_each(dtype):
    segment_ids = np.array([[1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 2, 2]])
    positions = np.array([[0, 1, 0, 0, 1, 0], [0, 1, 2, 3, 0, 1]])
    given = np.array([[1, 2, 3, 0, 0, 4], [1, 0, 1, 1, 0.5, 1]]).astype(dtype)
    batch = {
        "decoder_target_tokens": jnp.ones((2, 6), jnp.int32),
        "decoder_segment_ids": segment_ids,
        "decoder_positions": positions,
        "decoder_loss_weights": given,
    }
    number, weights = jax.jit(
        lambda batch: get_loss_normalizing_factor_and_weights(
            "AVERAGE_PER_SEQUENCE", batch
        )
    )(batch)
    sums = oracles.segment_sums(given.astype(np.float64), segment_ids)
    expected = np.where(sums > 0, given / np.where(sums > 0, sums, 1), 0)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    # Two segments of each row have weight; the third of the first row has none.
    np.testing.assert_allclose(number, 4, rtol=1e-6)


def test_another_word_is_refused():
    message = "must be None, a number or one of NUM_REAL_TARGET_TOKENS, .*: got 'MEAN'"
    with pytest.raises(ValueError, match=message):
        get_loss_normalizing_factor_and_weights("MEAN", BATCH)
