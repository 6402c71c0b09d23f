"""A network small enough to compile in seconds, the golden ones, and their batches."""

import json

import jax
import numpy as np
from flax import traverse_util

from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer

SIZES = {
    "vocab_size": 384,
    "emb_dim": 16,
    "num_heads": 2,
    "head_dim": 8,
    "mlp_dim": 32,
    "mlp_activations": ("gelu", "linear"),
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "dropout_rate": 0.0,
}


def config(**changes):
    return T5Config(**{**SIZES, **changes})


def model(loss_settings=None, **changes):
    return StandaloneModel(Transformer(config(**changes)), **(loss_settings or {}))


def shapes_of(params):
    flat = traverse_util.flatten_dict(params, sep="/")
    return {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in flat.items()}


def packed_batch(vocab_size=384, seed=0):
    """Two packed examples per row, padding at the end, each feature of int32."""
    rng = np.random.default_rng(seed)
    batch = {}
    for side, length, ends in (("encoder", 20, (8, 16)), ("decoder", 17, (6, 14))):
        positions = np.arange(length)
        segments = np.select([positions < ends[0], positions < ends[1]], [1, 2], 0)
        tokens = rng.integers(2, vocab_size, (2, length)) * (segments > 0)
        name = "encoder_input_tokens" if side == "encoder" else "decoder_target_tokens"
        batch[name] = tokens
        batch[f"{side}_segment_ids"] = np.tile(segments, (2, 1))
        batch[f"{side}_positions"] = np.tile(
            np.select([segments == 1, segments == 2], [positions, positions - ends[0]]),
            (2, 1),
        )
    targets = batch["decoder_target_tokens"]
    first = np.diff(batch["decoder_segment_ids"], axis=1, prepend=0) != 0
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch["decoder_input_tokens"] = np.where(first, 0, shifted)
    batch["decoder_loss_weights"] = targets > 0
    return {name: x.astype(np.int32) for name, x in batch.items()}


def golden(path):
    """The settings, parameters, batch and logits of a file in tests/data."""
    with np.load(path) as stored:
        flat = dict(stored)
    trees = {"params": {}, "batch": {}}
    for name, x in flat.items():
        tree, _, rest = name.partition("/")
        if tree in trees:
            trees[tree][rest] = x
    params = traverse_util.unflatten_dict(trees["params"], sep="/")
    return json.loads(str(flat["config"])), params, trees["batch"], flat["logits"]


def assert_same_trees(one, other):
    """Equal structure and equal numbers, to the bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
