"""The captured head gives the network's logits, and a changed head is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.head_capture import capture_head

VOCAB, EMBED = 11, 6


class Network(nn.Module):
    """An embedding, one nonlinear layer and a head, tied or not."""

    tied: bool = False
    after: str = "nothing"
    dtype: jnp.dtype = jnp.float32
    use_bias: bool = False

    @nn.compact
    def __call__(self, tokens):
        embedder = nn.Embed(VOCAB, EMBED, name="token_embedder")
        hidden = jnp.tanh(nn.Dense(EMBED, name="mlp")(embedder(tokens)))
        hidden = hidden.astype(self.dtype)
        if self.tied:
            logits = embedder.attend(hidden.astype(jnp.float32)) / jnp.sqrt(EMBED)
        else:
            head = nn.Dense(VOCAB, use_bias=self.use_bias, name="logits_dense")
            logits = head(hidden.astype(jnp.float32))
        return AFTER[self.after](logits, hidden)


AFTER = {
    "nothing": lambda logits, _: logits,
    "a scale": lambda logits, _: 2.0 * logits / 3,
    "a soft cap": lambda logits, _: 30.0 * jnp.tanh(logits / 30.0),
    "a mask": lambda logits, _: jnp.where(jnp.arange(VOCAB) < 9, logits, -1e10),
    "a bias": lambda logits, _: logits + 1.0,
    "a slice": lambda logits, _: logits[..., : VOCAB - 1],
    "another dtype": lambda logits, _: logits.astype(jnp.bfloat16),
    "a factor per token": lambda logits, hidden: (
        logits * jnp.sum(hidden, -1)[..., None]
    ),
    "a temperature per class": lambda logits, _: logits * jnp.arange(1.0, VOCAB + 1),
    "a reversal": lambda logits, _: logits[..., ::-1],
    "other logits": lambda _, hidden: jnp.zeros((*hidden.shape[:-1], VOCAB)),
}
TOKENS = np.arange(8).reshape(2, 4)


def _network(**settings):
    network = Network(**settings)
    params = network.init(jax.random.key(0), TOKENS)["params"]
    return params, lambda p: network.apply({"params": p}, TOKENS)


def _logits_from_head(compute_logits):
    head = capture_head(compute_logits)
    kernel = head.kernel.T if head.tied else head.kernel
    return head.hidden.astype(jnp.float32) @ kernel.astype(jnp.float32) * head.scale


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("after", ["nothing", "a scale"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_the_captured_head_gives_the_networks_logits(tied, after, dtype):
    params, logits = _network(tied=tied, after=after, dtype=dtype)
    captured = jax.jit(lambda p: _logits_from_head(lambda: logits(p)))(params)
    expected = jax.jit(logits)(params)
    # Same products, same sums; the factor is applied once instead of twice.
    tolerance = 4 * jnp.finfo(jnp.float32).eps * float(jnp.abs(expected).max())
    np.testing.assert_allclose(captured, expected, rtol=0, atol=tolerance)


def test_derivatives_pass_through_hidden_states_and_kernel():
    params, logits = _network(tied=True)
    through_head = jax.grad(
        lambda p: jnp.sum(jnp.sin(_logits_from_head(lambda: logits(p))))
    )(params)
    direct = jax.grad(lambda p: jnp.sum(jnp.sin(logits(p))))(params)
    tolerance = 100 * jnp.finfo(jnp.float32).eps
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        through_head,
        direct,
    )


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ("a soft cap", "applies 'tanh'"),
        ("a mask", "applies 'select_n'"),
        ("a bias", "applies 'add'"),
        ("a slice", "their shape goes from"),
        ("another dtype", "applies 'convert_element_type'"),
        ("a factor per token", "applies 'mul'"),
        ("a temperature per class", "applies 'mul'"),
        ("a reversal", "applies 'rev'"),
        ("other logits", "do not come from the head's output alone"),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_changed_after_the_head_are_refused(tied, after, reason):
    params, logits = _network(tied=tied, after=after)
    with pytest.raises(
        ValueError, match=f"after the head.*{reason}.*LOSS_CHUNK_LENGTH"
    ):
        capture_head(lambda: logits(params))


def test_a_head_with_a_bias_is_refused():
    params, logits = _network(use_bias=True)
    with pytest.raises(ValueError, match="only parameter is a 2-D 'kernel'.*bias"):
        capture_head(lambda: logits(params))


def test_a_network_without_a_head_is_refused():
    with pytest.raises(
        ValueError, match="calls its output head once.*got 0 such calls"
    ):
        capture_head(
            lambda: nn.Dense(3).init_with_output(jax.random.key(0), np.ones(2))
        )


def test_a_network_that_calls_its_head_twice_is_refused():
    params, logits = _network(tied=True)
    with pytest.raises(
        ValueError, match="calls its output head once.*got 2 such calls"
    ):
        capture_head(lambda: logits(params) + logits(params))


@pytest.mark.t5x
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["t5", "scalable_t5", "decoder_only"])
def test_the_captured_head_gives_t5x_logits_to_the_bit(name, tied, dtype):
    import importlib

    network = importlib.import_module(f"t5x.examples.{name}.network")
    sizes = {
        "vocab_size": 48,
        "emb_dim": 8,
        "num_heads": 2,
        "head_dim": 4,
        "mlp_dim": 16,
    }
    if name == "decoder_only":
        config = network.TransformerConfig(
            **sizes, num_layers=2, dtype=dtype, logits_via_embedding=tied
        )
        module, arity = network.DecoderWrapper(config), 2
    else:
        config = network.T5Config(
            **sizes,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dtype=dtype,
            logits_via_embedding=tied,
        )
        module, arity = network.Transformer(config), 3
    tokens = (jax.random.randint(jax.random.key(0), (2, 7), 1, 48),) * arity
    params = module.init(jax.random.key(1), *tokens, enable_dropout=False)["params"]

    def logits(p):
        return module.apply({"params": p}, *tokens, enable_dropout=False)

    captured = jax.jit(lambda p: _logits_from_head(lambda: logits(p)))(params)
    np.testing.assert_array_equal(captured, jax.jit(logits)(params))
