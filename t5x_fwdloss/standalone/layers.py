"""Blocks of T5 1.1: relative position bias, attention, gated MLP, one layer.

Differences from other Transformers: RMS normalization before each block and no biases;
attention scores are not divided by sqrt(head_dim), but the query kernel starts smaller;
each head adds a learned number per bucket of relative position to the scores.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from t5x_fwdloss.analysis import settings

NUM_BUCKETS = 32
MAX_DISTANCE = 128
NORM_EPSILON = 1e-6
MASKED = -1e10  # added to scores; finite, so that a fully masked row has no NaN

FAN_IN = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
FAN_IN_TRUNCATED = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
FAN_AVG_UNIFORM = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")

Hidden = Float[Array, "batch length embed"]


def _is_floating(dtype) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


FLOATING = settings.Rule("a floating-point dtype", _is_floating, alone=True)
ACTIVATION = settings.Rule(
    "'linear' or the name of a function in jax.nn",
    lambda name: name == "linear" or callable(getattr(jax.nn, name, None)),
    alone=True,
)
RATE = settings.Rule("from 0 to below 1", lambda x: 0 <= x < 1)


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and choices; the fields have T5X's names and meaning, but for the last two.

    `relative_bias_per_layer` gives each layer its own table of relative positions, as in
    umT5, and `scale_tied_logits` = False leaves out the division of tied logits by
    sqrt(embed), as in networks of Hugging Face that tie a head of T5 1.1.
    """

    vocab_size: settings.Positive
    dtype: Annotated[Any, FLOATING] = "float32"
    emb_dim: settings.Positive = 512
    num_heads: settings.Positive = 8
    num_encoder_layers: settings.Positive = 6
    num_decoder_layers: settings.Positive = 6
    head_dim: settings.Positive = 64
    mlp_dim: settings.Positive = 2048
    mlp_activations: Sequence[Annotated[str, ACTIVATION]] = ("gelu", "linear")
    dropout_rate: Annotated[float, RATE] = 0.1
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False
    relative_bias_per_layer: bool = False
    scale_tied_logits: bool = True

    def __post_init__(self):
        """Checks the type and range of every field (`ValueError`)."""
        settings.check_fields(self)


def relative_position_buckets(
    length: int, *, bidirectional: bool
) -> Int[np.ndarray, "length length"]:
    """Bucket of each (query, key) pair, from 0 to `NUM_BUCKETS` - 1.

    The distance is query minus key. With both directions one half of the buckets is
    for keys to the left, the other for keys to the right; with one direction keys to
    the right count as distance 0. Half of the buckets of a direction hold one
    distance each, the others grow logarithmically up to `MAX_DISTANCE`.
    """
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    buckets = NUM_BUCKETS // 2 if bidirectional else NUM_BUCKETS
    offset = np.where(distance < 0, buckets, 0) if bidirectional else 0
    distance = np.abs(distance) if bidirectional else np.maximum(distance, 0)
    exact = buckets // 2
    # The epsilon avoids log(0) and is part of T5's definition of the edges.
    ratio = distance / exact + np.finfo(np.float32).eps
    growth = np.log(ratio) / np.log(MAX_DISTANCE / exact) * (buckets - exact)
    large = np.minimum(exact + growth.astype(np.int64), buckets - 1)
    return offset + np.where(distance < exact, distance, large)


class RelativePositionBias(nn.Module):
    """A learned number per head and bucket, as a bias `[1, heads, query, key]`."""

    num_heads: int
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int) -> Float[Array, "1 heads length length"]:
        """The bias of every query and key of a sequence."""
        table = self.param(
            "rel_embedding", FAN_AVG_UNIFORM, (self.num_heads, NUM_BUCKETS)
        )
        buckets = relative_position_buckets(length, bidirectional=self.bidirectional)
        return table[None, :, buckets]


class Attention(nn.Module):
    """Multi-head attention of `queries` to `memory`."""

    config: T5Config

    @nn.compact
    def __call__(
        self,
        queries: Hidden,
        memory: Float[Array, "batch keys embed"],
        mask: Bool[Array, "batch length keys"],
        bias: Float[Array, "1 heads length keys"] | None,
        deterministic: bool,
    ) -> Hidden:
        """Each query's mixture of the values that the mask allows."""
        cfg = self.config
        heads = (cfg.num_heads, cfg.head_dim)

        def project(name, inputs, init: Any = FAN_IN):
            y = dense(cfg, cfg.num_heads * cfg.head_dim, name, init)(inputs)
            return y.reshape(*y.shape[:-1], *heads)

        def small(key, shape, dtype):
            return FAN_IN(key, shape, dtype) / np.sqrt(cfg.head_dim)

        query = project("query", queries, small)
        key, value = project("key", memory), project("value", memory)
        if cfg.float32_attention_logits:
            query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            scores += bias.astype(scores.dtype)
        scores += jnp.where(mask[:, None], 0.0, MASKED).astype(scores.dtype)
        shares = jax.nn.softmax(scores).astype(cfg.dtype)
        # One mask for all queries: the length axis is broadcast, as everywhere in T5.
        shares = dropout(cfg)(shares, deterministic=deterministic)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, value)
        mixed = mixed.reshape(*mixed.shape[:-2], -1)
        return dense(cfg, queries.shape[-1], "out", FAN_IN)(mixed)


class GatedMlp(nn.Module):
    """Product of the activations' branches, projected back."""

    config: T5Config

    @nn.compact
    def __call__(self, x: Hidden, deterministic: bool) -> Hidden:
        """The block's output, without the residual connection."""
        cfg = self.config
        product = jnp.ones((), cfg.dtype)
        for index, activation in enumerate(cfg.mlp_activations):
            name = "wi" if len(cfg.mlp_activations) == 1 else f"wi_{index}"
            branch = dense(cfg, cfg.mlp_dim, name)(x)
            if activation != "linear":
                branch = getattr(jax.nn, activation)(branch)
            product *= branch
        product = dropout(cfg)(product, deterministic=deterministic)
        return dense(cfg, x.shape[-1], "wo")(product)


class Layer(nn.Module):
    """One layer of the encoder or, given encoder states, of the decoder."""

    config: T5Config

    @nn.compact
    def __call__(
        self, x, mask, bias, deterministic, encoded: Any = None, cross_mask: Any = None
    ):
        """The layer's output, `[batch, length, embed]`."""
        cfg = self.config
        crosses = encoded is not None
        if cfg.relative_bias_per_layer:
            relpos_bias = RelativePositionBias(
                cfg.num_heads, bidirectional=not crosses, name="relpos_bias"
            )
            bias = relpos_bias(x.shape[-2])

        def add(x, norm_name, block):
            y = block(norm(cfg, norm_name)(x))
            return x + dropout(cfg)(y, deterministic=deterministic)

        attention = Attention(cfg, name="self_attention" if crosses else "attention")
        norm_name = f"pre_{attention.name}_layer_norm"
        x = add(x, norm_name, lambda y: attention(y, y, mask, bias, deterministic))
        if crosses:
            cross = Attention(cfg, name="encoder_decoder_attention")
            x = add(
                x,
                "pre_cross_attention_layer_norm",
                lambda y: cross(y, encoded, cross_mask, None, deterministic),
            )
        mlp = GatedMlp(cfg, name="mlp")
        return add(x, "pre_mlp_layer_norm", lambda y: mlp(y, deterministic))


def dense(cfg: T5Config, features: int, name: str, init: Any = FAN_IN_TRUNCATED):
    """A linear map without bias; its kernel is `[in, out]`, heads flattened."""
    return nn.Dense(
        features, use_bias=False, dtype=cfg.dtype, kernel_init=init, name=name
    )


def norm(cfg: T5Config, name: str) -> nn.RMSNorm:
    """T5's layer norm: no mean, no bias."""
    return nn.RMSNorm(epsilon=NORM_EPSILON, dtype=cfg.dtype, name=name)


def dropout(cfg: T5Config) -> nn.Dropout:
    """Dropout with one mask for all positions of a sequence."""
    return nn.Dropout(cfg.dropout_rate, broadcast_dims=(-2,))
