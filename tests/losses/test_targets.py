"""Labels mean the same class in every dtype, wherever they are compared with classes."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from losses import subjects
from losses.subjects import BATCH, LENGTH, SUBJECTS, Settings
from t5x_fwdloss import losses
from t5x_fwdloss.losses.targets import class_indices, dense_targets

pytestmark = pytest.mark.usefixtures("x64")

VOCAB = 300  # more classes than a byte has values
# Classes that an int8 can hold; each has one neighbor at a distance of 256.
CLASSES = np.array([[3, 43, 127], [0, 1, 5]])
DTYPES = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
SMOOTHED = Settings(label_smoothing=0.1, z_loss=0.01)


def example(name):
    key = jax.random.key(0)
    if not name.startswith("chunked"):
        return subjects.draw_logits(key, vocab_size=VOCAB)
    hidden, head = SUBJECTS[name].draw(key)
    tied = name.endswith("tied")
    wide = jax.random.normal(key, (subjects.EMBED, VOCAB), jnp.float64)
    return hidden.astype(head.dtype), wide.T if tied else wide


@pytest.mark.parametrize("name", SUBJECTS)
def test_loss_and_gradient_know_a_label_in_a_byte_and_a_whole_float(name):
    subject = SUBJECTS[name]
    x = example(name)
    labels = [jnp.asarray(CLASSES, dtype) for dtype in ("uint8", "float32")]

    @jax.jit
    def found(x, labels):
        loss = lambda x: subject.loss(x, labels, None, SMOOTHED)[0]
        return jax.value_and_grad(loss)(x)

    def expected(x):
        settings = SMOOTHED.label_smoothing, SMOOTHED.z_loss
        logits = subject.logits(x)
        mass = 1.0 if subject.is_t5x_rule else None
        return oracles.weighted_loss(logits, CLASSES, None, *settings, mass=mass)[0]

    value, gradient = jax.jit(jax.value_and_grad(expected))(x)
    for array in labels:
        got_value, got = found(x, array)
        np.testing.assert_allclose(got_value, value, rtol=1e-12)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_rows_and_the_logit_hessian_know_a_label_of_any_dtype(dtype):
    labels = jnp.asarray(CLASSES, dtype)
    logits = subjects.draw_logits(jax.random.key(1), vocab_size=VOCAB)
    rows = dense_targets(labels, VOCAB, 0.0, logits.dtype)
    np.testing.assert_array_equal(jnp.argmax(rows, axis=-1), CLASSES)
    np.testing.assert_array_equal(jnp.sum(rows, axis=-1), np.ones((BATCH, LENGTH)))
    picked = np.take_along_axis(np.asarray(logits), CLASSES[..., None], -1)[..., 0]
    expected = jax.nn.logsumexp(logits, axis=-1) - picked
    for impl in losses.IMPLEMENTATIONS:
        found = losses.weighted_token_cross_entropy(logits, labels, impl=impl)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    tangent = jnp.cos(logits)
    product = losses.logit_hessian_product(logits, labels, tangent)
    wide = losses.logit_hessian_product(logits, jnp.asarray(CLASSES), tangent)
    np.testing.assert_array_equal(product, wide)


NO_CLASSES = {
    "int8": [-1, -128],
    "int16": [-1, VOCAB],
    "uint16": [VOCAB, 65535],
    "uint32": [VOCAB, 2**32 - 1],
    "int32": [-1, VOCAB, 2**31 - 1, -(2**31)],
    "int64": [-1, 2**63 - 1, 2**32, 2**32 + 3],
    "float32": [-1.0, 0.5, 1e10, np.nan, np.inf, -np.inf, VOCAB],
    "float64": [2.0**32 + 3, 3 + 1e-9, -0.5],
}


@pytest.mark.parametrize("dtype", NO_CLASSES)
def test_a_label_that_is_no_class_has_an_empty_row(dtype):
    labels = jnp.asarray(np.array(NO_CLASSES[dtype]), dtype)
    rows = dense_targets(labels, VOCAB, 0.0, jnp.float64)
    np.testing.assert_array_equal(rows, np.zeros_like(rows))
    logits = subjects.draw_logits(jax.random.key(1), vocab_size=VOCAB)[0, :1]
    logits = jnp.broadcast_to(logits, (len(labels), VOCAB))
    log_z = jax.nn.logsumexp(logits, axis=-1)
    for impl in losses.IMPLEMENTATIONS:
        # Traced: where they can be seen, labels that are not whole are refused.
        loss = jax.jit(
            lambda labels, impl=impl: losses.compute_weighted_cross_entropy(
                logits, labels, z_loss=0.01, impl=impl
            )[0]
        )(labels)
        np.testing.assert_allclose(loss, 0.01 * jnp.sum(log_z**2), rtol=1e-12)


def test_indices_are_widened_where_a_vocabulary_may_be_larger():
    for dtype in DTYPES:
        kept = dtype in ("int32", "uint32", "int64")
        found = class_indices(jnp.zeros(3, dtype)).dtype
        assert found == (dtype if kept else "int32")


def test_labels_that_are_not_whole_are_refused_while_they_can_be_seen():
    logits = subjects.draw_logits(jax.random.key(1))
    labels = np.full((BATCH, LENGTH), 1.5, np.float32)
    with pytest.raises(ValueError, match=r"Targets must be whole numbers: got 1\.5\."):
        losses.compute_weighted_cross_entropy(logits, labels)
    with pytest.raises(ValueError, match="must be integers: got dtype bool"):
        losses.compute_weighted_cross_entropy(logits, labels > 0)
    traced = jax.jit(lambda y: losses.compute_weighted_cross_entropy(logits, y)[0])
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # No class, so the cross entropy is zero: T5X's rule for labels out of range.
    np.testing.assert_allclose(traced(labels), 0.0 * jnp.sum(log_z))
