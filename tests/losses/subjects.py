"""What the laws are run on: every loss of the package, beside its oracle."""

import dataclasses
import functools
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles

from t5x_fwdloss import losses
from t5x_fwdloss.losses.log_normalizer import accumulation_dtype
from t5x_fwdloss.losses.primitives import token_map
from t5x_fwdloss.losses.targets import dense_targets, entropy_of_targets

BATCH, LENGTH, EMBED, VOCAB = 2, 3, 4, 5
CHUNK_LENGTH, SCALE = 2, 0.5
BLOCK_ELEMENTS = 2 * VOCAB


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is fixed when a loss is compiled."""

    label_smoothing: float = 0.1
    z_loss: float = 0.01
    factor: Any = None


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loss of `x`, the logits that `x` stands for, and what the loss can do."""

    loss: Callable[..., tuple[jax.Array, jax.Array]]
    logits: Callable[[Any], jax.Array]
    draw: Callable[..., Any]
    is_t5x_rule: bool = False
    in_blocks: bool = False

    @property
    def laws(self) -> tuple[str, ...]:
        """The names of the laws that it keeps."""
        return tuple(laws.REVERSE if self.is_t5x_rule else laws.LAWS)


def on_logits(logits, labels, weights, settings, *, impl):
    loss, z_loss, _ = losses.compute_weighted_cross_entropy(
        logits,
        labels,
        weights,
        settings.label_smoothing,
        settings.z_loss,
        settings.factor,
        impl=impl,
    )
    return loss, z_loss


def on_dense_targets(logits, labels, weights, settings, *, impl):
    vocab_size = logits.shape[-1]
    rows = dense_targets(labels, vocab_size, settings.label_smoothing, logits.dtype)
    loss, z_term = losses.cross_entropy_with_logits(
        logits, rows, settings.z_loss, impl=impl
    )
    loss = loss - entropy_of_targets(settings.label_smoothing, vocab_size)
    if weights is not None:
        weights = weights.astype(loss.dtype)
        loss, z_term = loss * weights, z_term * weights
    return jnp.sum(loss), jnp.sum(z_term)


def on_hidden_states(x, labels, weights, settings, *, impl, tied):
    result = losses.chunked_weighted_cross_entropy(
        x[0],
        x[1],
        labels,
        weights,
        settings.label_smoothing,
        settings.z_loss,
        settings.factor,
        chunk_length=CHUNK_LENGTH,
        impl=impl,
        tied=tied,
        scale=SCALE,
    )
    return result.loss, result.z_loss


def draw_logits(key, vocab_size=VOCAB):
    return 3 * jax.random.normal(key, (BATCH, LENGTH, vocab_size), jnp.float64)


def draw_hidden_and_head(key, *, tied):
    keys = jax.random.split(key, 2)
    hidden = 2 * jax.random.normal(keys[0], (BATCH, LENGTH, EMBED), jnp.float64)
    head = jax.random.normal(keys[1], (EMBED, VOCAB), jnp.float64)
    return hidden, head.T if tied else head


def logits_of_hidden(x, *, tied):
    hidden, head = (leaf.astype(jnp.float64) for leaf in x)
    return SCALE * hidden @ (head.T if tied else head)


def _plain(loss, impl, *, in_blocks=False):
    return Subject(
        loss=functools.partial(loss, impl=impl),
        logits=lambda x: x,
        draw=draw_logits,
        is_t5x_rule=impl == "custom_vjp",
        in_blocks=in_blocks,
    )


def _chunked(impl, *, tied=False):
    return Subject(
        loss=functools.partial(on_hidden_states, impl=impl, tied=tied),
        logits=functools.partial(logits_of_hidden, tied=tied),
        draw=functools.partial(draw_hidden_and_head, tied=tied),
        is_t5x_rule=impl == "custom_vjp",
    )


SUBJECTS = {
    **{impl: _plain(on_logits, impl) for impl in losses.IMPLEMENTATIONS},
    "custom_jvp in blocks": _plain(on_logits, "custom_jvp", in_blocks=True),
    "custom_jvp on dense targets": _plain(on_dense_targets, "custom_jvp"),
    **{f"chunked {impl}": _chunked(impl) for impl in losses.IMPLEMENTATIONS},
    "chunked custom_jvp, tied": _chunked("custom_jvp", tied=True),
}


def draw_labels(key, vocab_size=VOCAB):
    return jax.random.randint(key, (BATCH, LENGTH), 0, vocab_size)


def draw_weights(kind):
    """No weights, bool ones, or fractions with a zero among them."""
    fractions = np.linspace(0.0, 2.0, BATCH * LENGTH).reshape(BATCH, LENGTH)
    return {"none": None, "bool": fractions > 0.9, "float": fractions}[kind]


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


@functools.cache
def _compiled(name, settings, names, mass):
    """Both sides of the laws `names`, jitted: the subject's and the oracle's."""
    subject = SUBJECTS[name]

    def actual(x, labels, weights, v, u):
        f = lambda x: subject.loss(x, labels, weights, settings)
        return laws.transform(f, names, x, v, u)

    def expected(x, labels, weights, v, u):
        def f(x):
            loss, z_loss = oracles.weighted_loss(
                subject.logits(x),
                labels,
                weights,
                settings.label_smoothing,
                settings.z_loss,
                settings.factor,
                mass=mass,
            )
            # T5X drops the cotangent of the z-loss output.
            return loss, jax.lax.stop_gradient(z_loss) if mass else z_loss

        return laws.transform(f, names, x, v, u)

    # Compiling is what these tests take their time for: half of it without optimization.
    options = {"xla_backend_optimization_level": 0}
    return [jax.jit(f, compiler_options=options) for f in (actual, expected)]


def check_laws(name, settings, x, labels, weights, *, names=None, dtype=jnp.float64):
    """Runs the laws of a subject at one point, along two drawn directions."""
    subject = SUBJECTS[name]
    names = [name for name in names or laws.LAWS if name in subject.laws]
    mass = 1.0 if subject.is_t5x_rule else None
    actual, expected = _compiled(name, settings, tuple(names), mass)
    keys = jax.random.split(jax.random.key(7), 2)
    x = cast(x, dtype)
    directions = [laws.draw_like(x, key) for key in keys]
    low = None if weights is None else jnp.asarray(weights)
    if low is not None and jnp.issubdtype(low.dtype, jnp.floating):
        low = low.astype(accumulation_dtype(dtype))
    size = BLOCK_ELEMENTS if subject.in_blocks else token_map.BLOCK_ELEMENTS
    with unittest.mock.patch.object(token_map, "BLOCK_ELEMENTS", size):
        got = actual(x, labels, low, *directions)
    wide = [cast(tree, jnp.float64) for tree in (x, *directions)]
    want = expected(wide[0], labels, low, *wide[1:])
    laws.assert_laws_hold(got, want, wide[0], accumulation_dtype(dtype))
