"""Chunks change nothing: lengths, padding, predictions, scores, dtypes, meshes."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from t5x_fwdloss.losses import (
    IMPLEMENTATIONS,
    chunked_weighted_cross_entropy,
    chunked_weighted_token_cross_entropy,
    compute_weighted_cross_entropy,
    weighted_token_cross_entropy,
)

BATCH, EMBED, VOCAB = 2, 4, 11
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01, "loss_normalizing_factor": 3.0}


def example(length=6, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (BATCH, length, EMBED)).astype(dtype)
    head = jax.random.normal(keys[1], (EMBED, VOCAB)).astype(dtype)
    targets = jax.random.randint(keys[2], (BATCH, length), 0, VOCAB)
    weights = jax.random.uniform(keys[3], (BATCH, length))
    return hidden, head, targets, weights


def logits_of(hidden, head):
    return hidden.astype(jnp.float32) @ head.astype(jnp.float32)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("length", "chunk_length"), [(6, 1), (6, 3), (6, 6), (7, 3), (7, 100)]
)
def test_loss_is_that_of_the_whole_logits_for_any_length(impl, chunk_length, length):
    hidden, head, targets, weights = example(length)
    result = chunked_weighted_cross_entropy(
        hidden, head, targets, weights, **OPTIONS, chunk_length=chunk_length, impl=impl
    )
    logits = logits_of(hidden, head)
    expected = compute_weighted_cross_entropy(
        logits, targets, weights, **OPTIONS, impl=impl
    )
    tolerance = laws.tolerance(jnp.float32)
    np.testing.assert_allclose(result[:3], expected, rtol=tolerance)
    np.testing.assert_array_equal(result.predictions, jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_weight_sum_without_weights_does_not_count_the_padding_of_the_last_chunk(impl):
    hidden, head, targets, _ = example(length=7)
    result = chunked_weighted_cross_entropy(
        hidden, head, targets, chunk_length=3, impl=impl
    )
    assert result.weight_sum == BATCH * 7


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_scores_are_those_of_the_whole_logits(impl):
    hidden, head, targets, weights = example(length=7)
    scores = chunked_weighted_token_cross_entropy(
        hidden, head.T, targets, weights, chunk_length=3, impl=impl, tied=True
    )
    expected = weighted_token_cross_entropy(
        logits_of(hidden, head), targets, weights, impl=impl
    )
    laws.assert_close(scores, expected, laws.scale_of(expected), jnp.float32)


@pytest.mark.parametrize("impl", ["autodiff", "custom_jvp"])
@pytest.mark.parametrize("broken", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_token_of_weight_zero_without_numbers_adds_nothing(broken, impl):
    hidden, head, targets, weights = example()
    weights = weights.at[0, 1].set(0.0)

    def loss(hidden, head):
        return chunked_weighted_cross_entropy(
            hidden, head, targets, weights, chunk_length=2, impl=impl
        ).loss

    def derivatives(hidden):
        push = lambda f: jax.jvp(f, (hidden, head), (example()[0], head))
        return push(loss), push(jax.grad(loss, argnums=(0, 1)))

    derivatives = jax.jit(derivatives)
    expected = derivatives(hidden.at[0, 1].set(0.0))
    found = derivatives(hidden.at[0, 1, 0].set(broken))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_gradient_of_a_bfloat16_head_is_summed_over_chunks_in_float32(impl):
    # 64 chunks with like contributions: a bfloat16 sum stops growing long before.
    hidden, head, targets, _ = example(length=64, dtype=jnp.bfloat16)
    hidden = jnp.abs(hidden)
    targets = jnp.zeros_like(targets)

    def loss(head, hidden, **options):
        return chunked_weighted_cross_entropy(
            hidden, head, targets, chunk_length=1, impl=impl, **options
        ).loss

    gradient = jax.jit(jax.grad(loss))(head, hidden)
    wide = [x.astype(jnp.float32) for x in (head, hidden)]
    expected = jax.jit(jax.grad(loss))(*wide)
    assert gradient.dtype == jnp.bfloat16
    relative = 2 * float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(
        gradient.astype(jnp.float32), expected, rtol=relative, atol=1e-3
    )


def test_a_head_of_another_width_is_refused_with_a_sentence():
    hidden, head, targets, _ = example()
    message = (
        r"must be \[embed, vocab\] .*got head \(11, 4\) for hidden states \(2, 6, 4\)"
    )
    with pytest.raises(ValueError, match=message):
        chunked_weighted_cross_entropy(hidden, head.T, targets, chunk_length=2)
    with pytest.raises(ValueError, match=r"must be \[vocab, embed\]"):
        chunked_weighted_cross_entropy(hidden, head, targets, chunk_length=2, tied=True)


def test_a_chunk_length_below_one_is_refused_with_a_sentence():
    hidden, head, targets, _ = example()
    with pytest.raises(ValueError, match="at least 1: got 0"):
        chunked_weighted_cross_entropy(hidden, head, targets, chunk_length=0)


ON_A_MESH = """
import sys, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from t5x_fwdloss.losses import chunked_weighted_cross_entropy

impl, tied = sys.argv[1], sys.argv[2] == "tied"
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
keys = jax.random.split(jax.random.key(0), 3)
hidden = jax.random.normal(keys[0], (4, 7, 8))
head = jax.random.normal(keys[1], (32, 8) if tied else (8, 32))
labels = jax.random.randint(keys[2], (4, 7), 0, 32)

def loss(hidden, head, labels):
    return chunked_weighted_cross_entropy(
        hidden, head, labels, None, 0.1, 0.01, chunk_length=2, impl=impl, tied=tied
    ).loss

def derivatives(hidden, head, labels):
    f = lambda *x: loss(*x, labels)
    gradient = lambda *x: jax.grad(f, (0, 1))(*x)
    x = hidden, head
    return jax.value_and_grad(f, (0, 1))(*x), jax.jvp(gradient, x, x)[1]

expected = derivatives(hidden, head, labels)
spec = ("model", None) if tied else (None, "model")
sharded = put(hidden, "data"), put(head, *spec), put(labels, "data")
compiled = jax.jit(derivatives).lower(*sharded).compile()
for a, b in zip(jax.tree.leaves(compiled(*sharded)), jax.tree.leaves(expected)):
    assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5), (a, b)
assert "all-gather" not in compiled.as_text()
"""


@pytest.mark.parametrize("tied", ["untied", "tied"])
@pytest.mark.parametrize("impl", ["custom_vjp", "custom_jvp"])
def test_a_sharded_vocabulary_is_not_gathered(impl, tied):
    finished = subprocess.run(
        [sys.executable, "-c", ON_A_MESH, impl, tied],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]


# Vocabulary and lengths at which XLA's CPU compiler fuses a chunk into one kernel.
@pytest.mark.parametrize("moving", ["hidden", "head", "both"])
@pytest.mark.parametrize("chunk_length", [7, 20])
@pytest.mark.parametrize("impl", ["autodiff", "custom_jvp"])
def test_second_derivatives_where_the_other_argument_is_held(
    impl, chunk_length, moving
):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    hidden, head = normal(2, 20, 4), normal(4, 384)
    targets = jnp.asarray(rng.integers(0, 384, (2, 20)))
    args = {"hidden": (hidden,), "head": (head,), "both": (hidden, head)}[moving]
    along = tuple(map(jnp.cos, args))

    def filled(args):
        held = {"hidden": (hidden, head)[1:], "head": (hidden,), "both": ()}[moving]
        return (*held, *args) if moving == "head" else (*args, *held)

    def chunked(*args):
        return chunked_weighted_cross_entropy(
            *filled(args), targets, chunk_length=chunk_length, impl=impl
        ).loss

    def whole(*args):
        hidden, head = filled(args)
        return compute_weighted_cross_entropy(hidden @ head, targets, impl=impl)[0]

    def derivatives(loss):
        gradient = jax.grad(loss, argnums=tuple(range(len(args))))
        return jax.jit(lambda *both: jax.jvp(gradient, *both))(args, along)

    found, expected = derivatives(chunked), derivatives(whole)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        laws.assert_close(x, y, laws.scale_of(y), jnp.float32)
