"""Several tangents in one mapped program give what one after the other gives.

The logits are not mapped, the tangents are, and the rows are as long as a vocabulary:
XLA's CPU compiler has compiled such programs wrongly (docs/upstream/).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import losses

BATCH, VOCAB, NUM = (2, 20), 384, 4
SMOOTHING, Z_LOSS = 0.1, 0.05
# Of sums of a vocabulary's many terms in float32, in units of the largest result.
ROUNDING = 32 * float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def example():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(*BATCH, VOCAB)).astype(np.float32)
    labels = rng.integers(0, VOCAB, BATCH).astype(np.int32)
    tangents = rng.normal(size=(NUM, *logits.shape)).astype(np.float32)
    return tuple(map(jnp.asarray, (logits, labels, tangents)))


def closed_forms(logits, labels, tangents):
    """For each tangent the slope of each token's loss, and its Hessian's product."""
    z, u, labels = (np.asarray(x) for x in (logits, tangents, labels))
    z, u = z.astype(float), u.astype(float)
    log_z = np.log(np.exp(z).sum(-1, keepdims=True))
    p = np.exp(z - log_z)
    targets = np.full(z.shape, SMOOTHING / (VOCAB - 1))
    np.put_along_axis(targets, labels[..., None], 1 - SMOOTHING, -1)
    scale = 1 + 2 * Z_LOSS * log_z
    mean = (p * u).sum(-1, keepdims=True)
    slope = (scale * mean)[..., 0] - (targets * u).sum(-1)
    return slope, scale * (p * u - p * mean) + 2 * Z_LOSS * p * mean


def token_loss(name, labels):
    """The loss of each token as a function of the logits."""
    if name == "labels":
        return lambda z: losses.token_cross_entropy(
            z, labels, label_smoothing=SMOOTHING, z_loss=Z_LOSS
        )[0]
    off = SMOOTHING / (VOCAB - 1)
    is_label = np.arange(VOCAB) == np.asarray(labels)[..., None]
    targets = jnp.asarray(np.where(is_label, 1 - SMOOTHING, off), jnp.float32)
    return lambda z: losses.cross_entropy_with_logits(z, targets, Z_LOSS, impl=name)[0]


def assert_close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING * scale)


def mapped(linear, logits, tangents):
    """`linear(z, u)` of all tangents at once: whole, and with its common part kept."""
    yield jax.jit(jax.vmap(linear, (None, 0)))(logits, tangents)
    kept = jax.jit(lambda z: jax.linearize(lambda u: linear(z, u), z)[1])(logits)
    yield jax.jit(jax.vmap(lambda kept, u: kept(u), (None, 0)))(kept, tangents)


def test_closed_form_of_the_hessian(example):
    logits, labels, tangents = example
    product = lambda z, u: losses.logit_hessian_product(
        z, labels, u, label_smoothing=SMOOTHING, z_loss=Z_LOSS
    )
    for found in mapped(product, logits, tangents):
        assert_close(found, closed_forms(*example)[1])


@pytest.mark.parametrize("name", ["labels", "autodiff", "custom_jvp"])
def test_slopes(example, name):
    logits, labels, tangents = example
    loss = token_loss(name, labels)
    slope = lambda z, u: jax.jvp(loss, (z,), (u,))[1]
    for found in mapped(slope, logits, tangents):
        assert_close(found, closed_forms(*example)[0])


@pytest.mark.parametrize("name", ["labels", "autodiff", "custom_jvp", "custom_vjp"])
def test_products_with_the_hessian(example, name):
    logits, labels, tangents = example
    gradient = jax.grad(lambda z: jnp.sum(token_loss(name, labels)(z)))
    product = lambda z, u: jax.jvp(gradient, (z,), (u,))[1]
    for found in mapped(product, logits, tangents):
        assert_close(found, closed_forms(*example)[1])


@pytest.mark.parametrize("impl", ["autodiff", "custom_jvp"])
def test_products_through_the_chunked_head(example, impl):
    """The same with a head before the loss, in chunks of the length."""
    _, labels, _ = example
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    hidden, head, tangents = draw(*BATCH, 3), draw(3, VOCAB), draw(NUM, *BATCH, 3)

    loss = lambda h: jnp.sum(
        losses.chunked_weighted_token_cross_entropy(
            h, head, labels, chunk_length=7, impl=impl
        )
    )
    product = lambda h, u: jax.jvp(jax.grad(loss), (h,), (u,))[1]
    expected = np.stack([jax.jit(product)(hidden, u) for u in tangents])
    for found in mapped(product, hidden, tangents):
        assert_close(found, expected)
