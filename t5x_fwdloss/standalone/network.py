"""T5 1.1 (Raffel et al., 2020; Shazeer, 2020) as a Flax module, for machines without T5X.

Names, shapes and meaning of the parameters are those of `t5x.examples.t5.network`, so a
checkpoint of one loads into the other; the code is independent of it. There is no
cache, hence no sampling.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from t5x_fwdloss.standalone import layers
from t5x_fwdloss.standalone.layers import T5Config as T5Config

Tokens = Int[Array | np.ndarray, "batch length"]
Inputs = Int[Array | np.ndarray, "batch inputs"]
Targets = Int[Array | np.ndarray, "batch targets"]


class Embedder(nn.Module):
    """The table of tokens, `[vocab, embed]`, and the tied output head."""

    config: T5Config

    def setup(self):
        """Creates the table."""
        shape = (self.config.vocab_size, self.config.emb_dim)
        self.embedding = self.param("embedding", nn.initializers.normal(1.0), shape)

    def __call__(self, tokens: Tokens) -> layers.Hidden:
        """The embedding of each token."""
        return self.embedding.astype(self.config.dtype)[tokens]

    def attend(self, query: layers.Hidden) -> Float[Array, "batch length vocab"]:
        """Logits of hidden states, in float32, before the division by sqrt(embed)."""
        return jnp.dot(query.astype(jnp.float32), self.embedding.T)


class Stack(nn.Module):
    """The layers of the encoder or of the decoder, and the norm after them."""

    config: T5Config
    embedder: Embedder
    is_decoder: bool

    @nn.compact
    def __call__(self, tokens, mask, deterministic, encoded=None, cross_mask=None):
        """The encoder's states `[batch, length, embed]`, or the decoder's logits."""
        cfg = self.config
        bias = None  # each layer has its own
        if not cfg.relative_bias_per_layer:
            relpos_bias = layers.RelativePositionBias(
                cfg.num_heads, bidirectional=not self.is_decoder, name="relpos_bias"
            )
            bias = relpos_bias(tokens.shape[-1])
        x = self.embedder(tokens)
        x = layers.dropout(cfg)(x, deterministic=deterministic).astype(cfg.dtype)
        count = cfg.num_decoder_layers if self.is_decoder else cfg.num_encoder_layers
        for index in range(count):
            layer = layers.Layer(cfg, name=f"layers_{index}")
            x = layer(x, mask, bias, deterministic, encoded, cross_mask)
        x = layers.norm(cfg, "decoder_norm" if self.is_decoder else "encoder_norm")(x)
        # T5's encoder ends with an elementwise dropout, its decoder with a broadcast one.
        last = layers.dropout(cfg) if self.is_decoder else nn.Dropout(cfg.dropout_rate)
        x = last(x, deterministic=deterministic)
        if not self.is_decoder:
            return x
        if cfg.logits_via_embedding:
            logits = self.embedder.attend(x)
            return logits / jnp.sqrt(x.shape[-1]) if cfg.scale_tied_logits else logits
        head = nn.Dense(
            cfg.vocab_size,
            use_bias=False,
            dtype=jnp.float32,
            kernel_init=layers.FAN_IN_TRUNCATED,
            name="logits_dense",
        )
        return head(x)


class Transformer(nn.Module):
    """The encoder-decoder; called like T5X's, without `decode`."""

    config: T5Config

    def setup(self):
        """Creates the shared embedding and the two stacks."""
        cfg = self.config
        self.token_embedder = Embedder(cfg)
        self.encoder = Stack(cfg, self.token_embedder, is_decoder=False)
        self.decoder = Stack(cfg, self.token_embedder, is_decoder=True)

    def __call__(
        self,
        encoder_input_tokens: Inputs,
        decoder_input_tokens: Targets,
        decoder_target_tokens: Targets,
        encoder_segment_ids: Inputs | None = None,
        decoder_segment_ids: Targets | None = None,
        encoder_positions: Inputs | None = None,
        decoder_positions: Targets | None = None,
        *,
        enable_dropout: bool = True,
    ) -> Float[Array, "batch targets vocab"]:
        """Logits of the target tokens, in float32.

        Args:
            encoder_input_tokens: 0 is padding, which no token attends to.
            decoder_input_tokens: the targets, shifted right.
            decoder_target_tokens: only read to find the padding.
            encoder_segment_ids: number of the packed example of each token.
            decoder_segment_ids: the same for the targets.
            encoder_positions: not read, since positions are relative; as in T5X.
            decoder_positions: not read.
            enable_dropout: needs an rng named "dropout".

        Raises:
            ValueError: if only one side has segment ids.
        """
        del encoder_positions, decoder_positions
        source, target = encoder_input_tokens > 0, decoder_target_tokens > 0
        causal = np.tri(target.shape[-1], dtype=bool)
        segments = encoder_segment_ids, decoder_segment_ids
        if (segments[0] is None) != (segments[1] is None):
            raise ValueError(
                "A packed batch needs encoder_segment_ids and decoder_segment_ids: "
                f"got only {'decoder' if segments[0] is None else 'encoder'}_segment_ids."
            )
        deterministic = not enable_dropout
        encoded = self.encoder(
            encoder_input_tokens,
            _visible(source, source, segments[0], segments[0]),
            deterministic,
        )
        return self.decoder(
            decoder_input_tokens,
            _visible(target, target, segments[1], segments[1]) & causal,
            deterministic,
            encoded,
            _visible(target, source, segments[1], segments[0]),
        )


def _visible(queries, keys, query_segments, key_segments):
    """Which query may attend to which key, `[batch, query, key]`."""
    mask = jnp.asarray(queries)[:, :, None] & keys[:, None, :]
    if query_segments is not None:
        mask &= query_segments[:, :, None] == key_segments[:, None, :]
    return mask
