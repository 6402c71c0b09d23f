"""T5X's own networks: t5, scalable_t5 (scan, remat) and decoder_only; whole and chunked."""

import functools

import flax.core
import jax
import jax.numpy as jnp
import pytest

from t5x_models import subjects
from t5x_models.subjects import EPS, assert_close

pytestmark = pytest.mark.t5x

VOCAB = 24
SIZES = {
    "vocab_size": VOCAB,
    "emb_dim": 8,
    "num_heads": 2,
    "head_dim": 4,
    "mlp_dim": 8,
    "dropout_rate": 0.0,
}
CHUNK = 3  # does not divide the length of 8
SETTINGS = {"loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS"}


def t5(**config):
    from t5x.examples.t5 import network

    sizes = SIZES | {"num_encoder_layers": 1, "num_decoder_layers": 1} | config
    return network.Transformer(network.T5Config(**sizes))


def scalable_t5(**config):
    from t5x.examples.scalable_t5 import network

    sizes = SIZES | {"num_encoder_layers": 2, "num_decoder_layers": 2} | config
    return network.Transformer(network.T5Config(**sizes))


def decoder_only(**config):
    from t5x.examples.decoder_only import network

    sizes = SIZES | {"num_layers": 1} | config
    return network.DecoderWrapper(network.TransformerConfig(**sizes))


TIED = {"logits_via_embedding": True}
# Tied and untied heads, scanned layers with remat, bfloat16: each on some network.
NETWORKS = {
    "t5": ("encoder_decoder", t5, {}),
    "t5, tied, bfloat16": ("encoder_decoder", t5, TIED | {"dtype": jnp.bfloat16}),
    "scalable_t5": ("encoder_decoder", scalable_t5, {"remat_policy": "full"}),
    "decoder_only, tied": ("decoder_only", decoder_only, TIED),
}


def tolerance(name):
    # bfloat16 activations: their rounding depends on how the program is fused.
    return 2.0**-6 if "bfloat16" in name else 200 * EPS


@functools.cache
def prepared(name):
    kind, network, config = NETWORKS[name]
    features = subjects.batch(kind, packed=True, vocab=VOCAB)
    if "bfloat16" in name:
        # LLVM of jaxlib 0.10.2 aborts on T5X's own bfloat16 masks of 8 bytes.
        features = {feature: x[:, :-1] for feature, x in features.items()}
    stock = subjects.stock(kind, network(**config), **SETTINGS)
    params = flax.core.unfreeze(subjects.initial(stock, features))
    return kind, network(**config), features, stock, params


def chunked(name):
    kind, network, features, _, params = prepared(name)
    model = subjects.ours(kind, "custom_jvp", network, CHUNK, **SETTINGS)
    return model, features, params


def loss_gradient_scores(model, features, tangent=None):
    """One program: loss, metrics, gradient, scores; and the loss along a tangent."""

    def run(params):
        found = jax.value_and_grad(model.loss_fn, has_aux=True)(params, features, None)
        scores = model.score_batch(params, features)
        if tangent is None:
            return found, scores
        loss = lambda p: model.loss_fn(p, features, None)[0]
        return (found, scores), jax.jvp(loss, (params,), (tangent,))[1]

    return jax.jit(run)


@pytest.mark.parametrize("name", NETWORKS)
def test_chunked_loss_metrics_gradients_and_scores_are_t5x_s(name):
    _, _, features, stock, params = prepared(name)
    model, _, _ = chunked(name)
    tangent = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), params
    )
    wanted = loss_gradient_scores(stock, features)(params)
    got, derivative = loss_gradient_scores(model, features, tangent)(params)
    ((_, metrics), gradient), _ = wanted
    assert float(metrics["accuracy"].count) > 0
    assert_close(got, wanted, tolerance(name))
    # And forward mode, which T5X's loss does not have, against the gradient.
    terms = jnp.stack(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, tangent)))
    assert abs(derivative - terms.sum()) <= tolerance(name) * jnp.abs(terms).sum()


def test_second_derivatives_of_a_chunked_model_agree_in_every_order():
    features = subjects.batch("decoder_only", packed=True)
    model = subjects.ours("decoder_only", "custom_jvp", chunk=CHUNK, **SETTINGS)
    params = subjects.initial(model, features)
    tangent = jax.tree.map(jnp.ones_like, params)

    def loss(p):
        return model.loss_fn(p, features, None)[0]

    def inner(p):
        products = jax.tree.map(jnp.vdot, jax.grad(loss)(p), tangent)
        return sum(jax.tree.leaves(products))

    @jax.jit
    def products(p):
        return (
            jax.jvp(jax.grad(loss), (p,), (tangent,))[1],
            jax.grad(lambda q: jax.jvp(loss, (q,), (tangent,))[1])(p),
            jax.grad(inner)(p),
        )

    forward_over_reverse, reverse_over_forward, reverse_over_reverse = products(params)
    assert_close(reverse_over_forward, forward_over_reverse, 2000 * EPS)
    assert_close(reverse_over_reverse, forward_over_reverse, 2000 * EPS)


@pytest.mark.parametrize("name", ["t5", "decoder_only, tied"])
def test_no_product_in_the_chunked_program_has_the_logits_of_the_whole_batch(name):
    model, features, params = chunked(name)
    _, _, _, stock, _ = prepared(name)
    # The lookup of T5X's embeddings is a product too, but of this shape as an input.
    whole = f"-> tensor<{subjects.BATCH}x{subjects.LENGTH}x{VOCAB}xf32>"

    def heads(which):
        text = loss_gradient_scores(which, features).lower(params).as_text()
        return [x for x in text.splitlines() if "dot_general" in x and whole in x]

    assert heads(stock)
    assert not heads(model)


@pytest.mark.parametrize("name", ["t5", "scalable_t5", "decoder_only, tied"])
def test_parameters_and_their_logical_axes_are_t5x_s(name):
    kind, network, features, stock, _ = prepared(name)
    shapes = {n: x.shape for n, x in features.items()}
    types = {n: x.dtype for n, x in features.items()}

    def variables(model):
        initial = model.get_initial_variables
        return jax.eval_shape(
            lambda key: initial(key, shapes, types), jax.random.key(0)
        )

    wanted, got = variables(stock), variables(subjects.ours(kind, "autodiff", network))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got["params"]) == jax.tree.map(
        lambda x: (x.shape, x.dtype), wanted["params"]
    )
    assert got["params_axes"] == wanted["params_axes"]


def test_predictions_are_t5x_s():
    kind, network, features, stock, params = prepared("t5")
    plain = {n: x for n, x in features.items() if not n.endswith(("_ids", "positions"))}
    wanted, got = (
        jax.jit(functools.partial(model.predict_batch_with_aux, num_decodes=2))(
            params, plain
        )
        for model in (stock, subjects.ours(kind, "custom_jvp", network))
    )
    assert_close(got, wanted, 0.0)
