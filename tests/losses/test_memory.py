"""Compiled temporary memory at real vocabularies, in units of one float32 logits array."""

import functools

import jax
import jax.numpy as jnp
import pytest

from t5x_fwdloss.losses import (
    chunked_weighted_cross_entropy,
    compute_weighted_cross_entropy,
)

SMALL_VOCABULARY = (8, 512, 512, 32128)  # batch, length, embed, vocab: T5
LARGE_VOCABULARY = (4, 128, 256, 250112)  # mT5
SETTINGS = {"label_smoothing": 0.1, "z_loss": 1e-4, "loss_normalizing_factor": 3.0}


def whole_loss(hidden, head, labels, weights, *, impl):
    logits = jnp.einsum("bld,dv->blv", hidden.astype(jnp.float32), head)
    return compute_weighted_cross_entropy(
        logits, labels, weights, **SETTINGS, impl=impl
    )[0]


def chunked_loss(hidden, head, labels, weights, *, chunk_length):
    return chunked_weighted_cross_entropy(
        hidden,
        head,
        labels,
        weights,
        **SETTINGS,
        chunk_length=chunk_length,
        impl="custom_jvp",
    ).loss


MODES = {
    "value and gradient": lambda f, x, _: jax.value_and_grad(f, (0, 1))(*x),
    "jvp": lambda f, x, v: jax.jvp(f, x, v),
    "jvp(grad)": lambda f, x, v: jax.jvp(jax.grad(f, (0, 1)), x, v)[1],
}


def temporary_memory(loss, mode, sizes, dtype=jnp.float32):
    batch, length, embed, vocab = sizes
    shape = jax.ShapeDtypeStruct
    x = shape((batch, length, embed), dtype), shape((embed, vocab), jnp.float32)
    labels = shape((batch, length), jnp.int32)
    weights = shape((batch, length), jnp.float32)

    def derivative(x, v, labels, weights):
        return MODES[mode](lambda *x: loss(*x, labels, weights), x, v)

    compiled = jax.jit(derivative).lower(x, x, labels, weights).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    return memory / (4 * batch * length * vocab)


# A thousandth for the arrays of one number per token.
WHOLE = {"value and gradient": 2.001, "jvp": 3.001, "jvp(grad)": 4.02}
BFLOAT16 = {"value and gradient": 0.06, "jvp": 0.08, "jvp(grad)": 0.12}
CHUNKED = {"value and gradient": 0.05, "jvp": 0.095, "jvp(grad)": 0.13}


@pytest.mark.parametrize("mode", MODES)
def test_custom_jvp_keeps_two_three_and_four_logits_arrays(mode):
    loss = functools.partial(whole_loss, impl="custom_jvp")
    assert temporary_memory(loss, mode, SMALL_VOCABULARY) <= WHOLE[mode]


@pytest.mark.parametrize("mode", MODES)
def test_chunks_of_sixteen_keep_a_few_hundredths_of_the_logits(mode):
    loss = functools.partial(chunked_loss, chunk_length=16)
    assert temporary_memory(loss, mode, SMALL_VOCABULARY) <= CHUNKED[mode]


def test_chunks_of_sixteen_keep_less_than_a_fifth_at_a_large_vocabulary():
    loss = functools.partial(chunked_loss, chunk_length=16)
    mode = "value and gradient"
    assert temporary_memory(loss, mode, LARGE_VOCABULARY) <= 0.19


@pytest.mark.parametrize(("mode", "most"), BFLOAT16.items())
def test_hidden_states_in_bfloat16_cost_a_copy_in_float32(mode, most):
    loss = functools.partial(chunked_loss, chunk_length=8)
    assert temporary_memory(loss, mode, SMALL_VOCABULARY, jnp.bfloat16) <= most
