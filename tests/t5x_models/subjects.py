"""T5X models on a network of two layers, their batches, and one comparison.

The network has T5X's call signature and head name and nothing else, because what is
compared is the loss; `test_networks.py` takes T5X's own networks. T5X is imported inside
the functions, so that this file can be imported without it.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import seqio

VOCAB, EMBED, BATCH, LENGTH = 13, 6, 4, 8
EPS = float(jnp.finfo(jnp.float32).eps)


class EncDecNetwork(nn.Module):
    """Tokens to logits with the signature of T5X's encoder-decoder networks."""

    @nn.compact
    def __call__(
        self,
        encoder_input_tokens,
        decoder_input_tokens,
        decoder_target_tokens,
        enable_dropout=True,
        **unused,
    ):
        embed = nn.Embed(VOCAB, EMBED, name="token_embedder")
        context = embed(encoder_input_tokens).mean(axis=1, keepdims=True)
        return _Decoder(name="decoder")(embed(decoder_input_tokens) + context)


class DecoderNetwork(nn.Module):
    """Tokens to logits with the signature of T5X's decoder-only network."""

    @nn.compact
    def __call__(
        self,
        decoder_input_tokens,
        decoder_target_tokens,
        enable_dropout=True,
        **unused,
    ):
        hidden = nn.Embed(VOCAB, EMBED, name="token_embedder")(decoder_input_tokens)
        return _Decoder(name="decoder")(hidden)


class _Decoder(nn.Module):
    @nn.compact
    def __call__(self, hidden):
        hidden = jnp.tanh(nn.Dense(EMBED, name="mlp")(hidden))
        self.sow("intermediates", "hidden", hidden)
        return nn.Dense(VOCAB, use_bias=False, name="logits_dense")(hidden)


KINDS = ("encoder_decoder", "decoder_only")
SETTINGS = {"label_smoothing": 0.1, "z_loss": 1e-2}


def optimizer():
    from t5x import adafactor

    return adafactor.Adafactor(learning_rate=0.1)


def arguments(kind, network=None):
    """Constructor arguments of a T5X model, but for the loss."""
    vocabulary = seqio.PassThroughVocabulary(VOCAB, eos_id=1)
    if kind == "encoder_decoder":
        module = EncDecNetwork() if network is None else network
        vocabularies = {
            "input_vocabulary": vocabulary,
            "output_vocabulary": vocabulary,
        }
    else:
        module = DecoderNetwork() if network is None else network
        vocabularies = {"vocabulary": vocabulary}
    return {"module": module, "optimizer_def": optimizer(), **vocabularies}


def stock(kind, network=None, **settings):
    from t5x import models

    classes = {
        "encoder_decoder": models.EncoderDecoderModel,
        "decoder_only": models.DecoderOnlyModel,
    }
    return classes[kind](**arguments(kind, network), **{**SETTINGS, **settings})


def ours(kind, impl, network=None, chunk=None, **settings):
    from t5x_fwdloss import models

    classes = {
        "encoder_decoder": models.FwdLossEncoderDecoderModel,
        "decoder_only": models.FwdLossDecoderOnlyModel,
    }
    return classes[kind](
        **arguments(kind, network),
        **{**SETTINGS, **settings},
        loss_impl=impl,
        loss_chunk_length=chunk,
    )


def batch(kind, packed=False, seed=0, vocab=VOCAB):
    """Features as T5X's feature converters make them: padding at the end, shifted."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(2, vocab, (BATCH, LENGTH)).astype(np.int32)
    lengths = rng.integers(3, LENGTH + 1, (BATCH, 1))
    real = np.arange(LENGTH) < lengths
    targets = targets * real
    shifted = np.concatenate([np.zeros((BATCH, 1), np.int32), targets[:, :-1]], axis=1)
    found = {
        "decoder_input_tokens": shifted,
        "decoder_target_tokens": targets,
        "decoder_loss_weights": real.astype(np.int32),
    }
    features = ["decoder"]
    if kind == "encoder_decoder":
        inputs = rng.integers(2, vocab, (BATCH, LENGTH)).astype(np.int32)
        found["encoder_input_tokens"] = inputs * real
        features.append("encoder")
    else:
        found["decoder_causal_attention"] = (np.arange(LENGTH) < 2) * real
    if packed:
        segments = (1 + (np.arange(LENGTH) >= 3)) * real
        positions = np.where(
            np.arange(LENGTH) < 3, np.arange(LENGTH), np.arange(LENGTH) - 3
        )
        for name in features:
            found[f"{name}_segment_ids"] = segments.astype(np.int32)
            found[f"{name}_positions"] = (positions * real).astype(np.int32)
    return {name: jnp.asarray(x, jnp.int32) for name, x in sorted(found.items())}


def initial(model, features, seed=1):
    """Random parameters of a model, the head scaled up so that logits differ."""
    shapes = {name: x.shape for name, x in features.items()}
    types = {name: x.dtype for name, x in features.items()}
    variables = model.get_initial_variables(jax.random.PRNGKey(seed), shapes, types)
    return variables["params"]


def assert_close(got, wanted, tolerance):
    """Trees of the same structure whose leaves differ by at most tolerance * scale."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.max(np.abs(b), initial=0.0) + 1e-30
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path)
        )
