"""Identities of cross entropy that hold at any point: drawn values at one fixed shape."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from t5x_fwdloss.losses import token_cross_entropy

TOKENS, VOCAB = 4, 7
logits_arrays = hnp.arrays(
    np.float32, (TOKENS, VOCAB), elements=st.floats(-1e4, 1e4, width=32)
)
label_arrays = hnp.arrays(np.int32, (TOKENS,), elements=st.integers(0, VOCAB - 1))
quick = hypothesis.settings(deadline=None, derandomize=True, max_examples=60)


@functools.partial(jax.jit, static_argnames="label_smoothing")
def loss_and_gradient(logits, labels, label_smoothing=0.0):
    f = lambda x: token_cross_entropy(x, labels, label_smoothing=label_smoothing)[0]
    loss, transpose = jax.vjp(f, logits)
    return loss, transpose(jnp.ones_like(loss))[0]


@quick
@hypothesis.given(logits=logits_arrays, labels=label_arrays)
def test_loss_is_not_negative(logits, labels):
    assert (loss_and_gradient(logits, labels)[0] >= 0).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@quick
@hypothesis.given(logits=logits_arrays, labels=label_arrays)
def test_gradient_of_a_token_sums_to_zero(label_smoothing, logits, labels):
    gradient = loss_and_gradient(logits, labels, label_smoothing)[1]
    tolerance = laws.tolerance(jnp.float32)
    np.testing.assert_allclose(jnp.sum(gradient, axis=-1), 0, atol=tolerance)


@quick
@hypothesis.given(logits=logits_arrays, labels=label_arrays, power=st.integers(0, 12))
def test_loss_does_not_change_when_all_logits_move_together(logits, labels, power):
    # Multiples of 2**-9 within 2**14: adding the constant is exact, and so is the loss.
    logits = np.round(logits * 512) / np.float32(512)
    moved = logits + np.float32(2**power)
    hypothesis.assume((moved - np.float32(2**power) == logits).all())
    for a, b in zip(
        loss_and_gradient(logits, labels), loss_and_gradient(moved, labels), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@quick
@hypothesis.given(logits=logits_arrays, labels=label_arrays)
def test_order_of_the_classes_does_not_matter(logits, labels):
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    loss = loss_and_gradient(logits, labels, 0.1)[0]
    moved = loss_and_gradient(logits[:, order], np.argsort(order)[labels], 0.1)[0]
    scale = laws.scale_of(logits)
    laws.assert_close(moved, loss, scale, jnp.float32)
