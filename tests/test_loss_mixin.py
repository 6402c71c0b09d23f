"""LossMixin on a small network without T5X: values, normalizers, scores, derivatives."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clu import metrics as clu_metrics

from t5x_fwdloss import losses
from t5x_fwdloss.loss_mixin import (
    LossMixin,
    check_no_other_loss,
    segment_ids_for_metrics,
)

VOCAB, EMBED, BATCH, LENGTH = 13, 6, 4, 5
TOLERANCE = 50 * float(jnp.finfo(jnp.float32).eps)
FACTORS = [
    None,
    7.0,
    "NUM_REAL_TARGET_TOKENS",
    "NUM_TOTAL_TARGET_TOKENS",
    "AVERAGE_PER_SEQUENCE",
]
FORWARD = ["autodiff", "custom_jvp"]


class Network(nn.Module):
    """Tokens to logits, with the names of T5X's head."""

    @nn.compact
    def __call__(self, tokens):
        hidden = nn.Embed(VOCAB, EMBED, name="token_embedder")(tokens)
        hidden = jnp.tanh(nn.Dense(EMBED, name="mlp")(hidden))
        self.sow("intermediates", "hidden", hidden)
        return nn.Dense(VOCAB, use_bias=False, name="logits_dense")(hidden)


class Model(LossMixin):
    """The least that LossMixin needs from the class beside it."""

    def __init__(self, impl="custom_jvp", factor=None, chunk_length=None):
        self._loss_impl = impl
        self._loss_chunk_length = chunk_length
        self._label_smoothing = 0.1
        self._z_loss = 1e-2
        self._loss_normalizing_factor = factor

    def _compute_logits(self, params, batch, dropout_rng=None, mutable=False):
        return Network().apply(
            {"params": params}, batch["decoder_input_tokens"], mutable=mutable
        )

    def _compute_metrics(self, logits, targets, mask, loss, z_loss, segment_ids):
        accuracy = clu_metrics.Accuracy.from_model_output(
            logits=logits, labels=targets.astype(jnp.int32), mask=mask
        )
        lengths = {name: jnp.sum(ids != 0) for name, ids in segment_ids.items()}
        return {"accuracy": accuracy, "loss": loss, "z_loss": z_loss, **lengths}


@pytest.fixture(scope="module")
def params():
    tokens = np.zeros((1, LENGTH), np.int32)
    return jax.jit(Network().init)(jax.random.key(0), tokens)["params"]


def _batch(seed=0):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, LENGTH + 1, size=(BATCH, 1))
    real = np.arange(LENGTH) < lengths
    return {
        "decoder_input_tokens": draw.integers(1, VOCAB, (BATCH, LENGTH)),
        "decoder_target_tokens": draw.integers(1, VOCAB, (BATCH, LENGTH)) * real,
        "decoder_loss_weights": (real * draw.uniform(0.2, 1, real.shape)).astype("f4"),
    }


def _close(left, right):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE),
        left,
        right,
    )


@pytest.mark.parametrize("factor", FACTORS, ids=str)
@pytest.mark.parametrize("impl", losses.IMPLEMENTATIONS)
def test_the_loss_is_the_weighted_cross_entropy_of_the_logits(params, impl, factor):
    model, batch = Model(impl, factor), _batch()
    number, weights = losses.get_loss_normalizing_factor_and_weights(factor, batch)
    expected, expected_z, _ = losses.compute_weighted_cross_entropy(
        model._compute_logits(params, batch),
        batch["decoder_target_tokens"],
        weights,
        label_smoothing=0.1,
        z_loss=1e-2,
        loss_normalizing_factor=number,
        impl=impl,
    )
    loss, metrics = jax.jit(model.loss_fn)(params, batch, None)
    _close((loss, metrics["z_loss"]), (expected, expected_z))
    assert metrics["decoder_target_tokens"] == np.sum(
        batch["decoder_target_tokens"] > 0
    )


@pytest.mark.parametrize("factor", FACTORS, ids=str)
def test_loss_sums_of_two_batches_make_the_loss_of_both(params, factor):
    model, batches = Model(factor=factor), [_batch(1), _batch(2)]
    both = {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}
    sums = [jax.jit(model.loss_sum)(params, batch) for batch in batches]
    numerator = sum(n for n, _ in sums)
    special = isinstance(factor, str)
    normalizer = sum(m for _, m in sums) if special else sums[0][1]
    _close(numerator / normalizer, jax.jit(model.loss_fn)(params, both, None)[0])


@pytest.mark.parametrize("impl", FORWARD)
def test_jvp_of_loss_and_score_is_gradient_times_tangent(params, impl):
    model, batch = Model(impl), _batch()
    tangent = jax.tree.map(jnp.sin, params)
    functions = [
        lambda p: model.loss_fn(p, batch, None)[0],
        lambda p: model.loss_sum(p, batch)[0],
        lambda p: jnp.sum(model.score_batch(p, batch)),
    ]
    for function in functions:
        forward = jax.jit(lambda p, f=function: jax.jvp(f, (p,), (tangent,)))(params)
        value, gradient = jax.jit(jax.value_and_grad(function))(params)
        products = jax.tree.map(lambda g, v: jnp.sum(g * v), gradient, tangent)
        _close(forward, (value, sum(jax.tree.leaves(products))))


@pytest.mark.parametrize("impl", losses.IMPLEMENTATIONS)
def test_scores_are_weighted_log_probabilities_without_z_loss_or_smoothing(
    params, impl
):
    model, batch = Model(impl), _batch()
    log_probs = jax.nn.log_softmax(model._compute_logits(params, batch))
    targets = batch["decoder_target_tokens"]
    picked = np.take_along_axis(np.asarray(log_probs), targets[..., None], -1)[..., 0]
    expected = np.sum(picked * batch["decoder_loss_weights"], axis=-1)
    _close(jax.jit(model.score_batch)(params, batch), expected)


def test_scores_come_with_what_the_network_sowed(params):
    model, batch = Model(), _batch()
    scores, sown = model.score_batch(params, batch, return_intermediates=True)
    assert set(sown["decoder"]) == {"target_tokens", "loss_weights", "token_scores"}
    _close(scores, jnp.sum(sown["decoder"]["token_scores"][0], axis=-1))
    assert sown["hidden"][0].shape == (BATCH, LENGTH, EMBED)


CHUNKED = [
    *((impl, None, 2) for impl in losses.IMPLEMENTATIONS),
    *(("custom_jvp", factor, 2) for factor in FACTORS[1:]),
    *(("custom_jvp", None, chunk_length) for chunk_length in (1, LENGTH, 9)),
]


@pytest.mark.parametrize(("impl", "factor", "chunk_length"), CHUNKED)
def test_the_chunked_loss_has_value_metrics_and_gradient_of_the_whole(
    params, impl, factor, chunk_length
):
    batch = _batch()
    results = [
        jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(params, batch, None)
        for model in (Model(impl, factor), Model(impl, factor, chunk_length))
    ]
    _close(*results)


@pytest.mark.parametrize("impl", FORWARD)
def test_every_order_of_derivatives_agrees_with_the_whole_when_chunked(params, impl):
    batch, tangent = _batch(), jax.tree.map(jnp.sin, params)

    def derivatives(model):
        loss = lambda p: model.loss_fn(p, batch, None)[0]
        score = lambda p: jnp.sum(model.score_batch(p, batch) ** 2)
        gradient_product = lambda p: jax.tree.reduce(
            jnp.add,
            jax.tree.map(lambda g, v: jnp.sum(g * v), jax.grad(loss)(p), tangent),
        )

        def all_of_them(p):
            return {
                "jvp": jax.jvp(loss, (p,), (tangent,)),
                "jvp(grad)": jax.jvp(jax.grad(loss), (p,), (tangent,)),
                "grad(jvp)": jax.grad(lambda q: jax.jvp(loss, (q,), (tangent,))[1])(p),
                "grad(grad)": jax.grad(gradient_product)(p),
                "score": jax.jvp(score, (p,), (tangent,)),
                "grad of score": jax.grad(score)(p),
            }

        return jax.jit(all_of_them)(params)

    chunked = derivatives(Model(impl, chunk_length=2))
    _close(chunked, derivatives(Model(impl)))
    _close(chunked["grad(jvp)"], chunked["jvp(grad)"][1])
    _close(chunked["grad(grad)"], chunked["jvp(grad)"][1])


def test_metrics_that_read_logits_are_refused_when_chunked(params):
    class Entropy(Model):
        def _compute_metrics(self, logits, **_):
            return {"entropy": jnp.sum(jnp.exp(logits))}

    class Largest(Model):
        def _compute_metrics(self, logits, **_):
            return {"largest": logits.max()}

    for model, asked in ((Entropy, "the array itself"), (Largest, "'max'")):
        with pytest.raises(TypeError, match=f"argmax.*only.*asks for {asked}"):
            model(chunk_length=2).loss_fn(params, _batch(), None)


def test_segment_ids_are_the_packed_ones_or_else_the_padding():
    packed = {"decoder_segment_ids": np.ones((1, 2)), "decoder_target_tokens": 0}
    assert list(segment_ids_for_metrics(packed)) == ["decoder"]
    plain = {"encoder_input_tokens": np.array([[3, 0]]), "decoder_positions": 0}
    ids = segment_ids_for_metrics(plain)
    np.testing.assert_array_equal(ids["encoder_input_tokens"], [[True, False]])
    assert list(ids) == ["encoder_input_tokens"]


class Regularized(Model):
    """A term on top of the mixin's loss."""

    def loss_fn(self, params, batch, dropout_rng):
        loss, metrics = super().loss_fn(params, batch, dropout_rng)
        return loss + 1.0, metrics


class HasItsOwn:
    """A model with a loss that is not the mixin's."""

    def loss_fn(self, params, batch, dropout_rng):
        raise NotImplementedError


class Beside(LossMixin, HasItsOwn):
    """The mixin in front of another loss."""


class OtherSum(Model):
    """Measured and trained would differ."""

    def loss_sum(self, params, batch, dropout_rng=None):
        raise NotImplementedError


class OtherParts(Model):
    """What both use, overridden."""

    def _weighted_loss(self, *args):
        raise NotImplementedError


def instance_with_its_own():
    model = Model()
    model.loss_fn = lambda *_: None
    return model


OTHER_LOSSES = {
    "extended in a subclass": (Regularized, r"own loss_fn \(\S+Regularized.loss_fn\)"),
    "extended below": (type("Below", (Regularized,), {}), "Below has its own loss_fn"),
    "beside the mixin": (Beside, r"own loss_fn \(\S+HasItsOwn.loss_fn\)"),
    "another sum": (OtherSum, "own loss_sum"),
    "other parts": (OtherParts, "own _weighted_loss"),
    "on the instance": (instance_with_its_own, "attribute loss_fn of the instance"),
}


@pytest.mark.parametrize("case", OTHER_LOSSES)
def test_a_loss_that_an_analysis_would_drop_is_refused_with_a_remedy(case):
    make, message = OTHER_LOSSES[case]
    with pytest.raises(ValueError, match=f"{message}.*analysis.Objective in Python"):
        check_no_other_loss(make())


def test_other_logits_metrics_and_evaluation_leave_the_loss_as_it_is():
    class Mine(Model):
        def _compute_logits(self, *args, **kwargs):
            return 2 * super()._compute_logits(*args, **kwargs)

        def _compute_metrics(self, **kwargs):
            return {}

        def eval_fn(self, params, batch):
            return None

    check_no_other_loss(Mine())
    check_no_other_loss(Model())
    check_no_other_loss(HasItsOwn())
