"""A standalone T5 of a few hundred parameters, and random batches for it."""

import jax
import jax.numpy as jnp
import numpy as np

from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer

VOCAB, LENGTH = 8, 5
SIZES = T5Config(
    vocab_size=VOCAB,
    emb_dim=4,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=2,
    mlp_dim=8,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.1,
)


def model(**settings):
    given = {
        "loss_impl": "custom_jvp",
        "loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS",
        "label_smoothing": 0.1,
        "z_loss": 1e-3,
    }
    return StandaloneModel(Transformer(SIZES), **given | settings)


def batches(num=2, size=4, seed=0):
    rng = np.random.default_rng(seed)

    def batch():
        targets = rng.integers(1, VOCAB, (size, LENGTH))
        lengths = rng.integers(2, LENGTH + 1, (size, 1))
        targets = np.where(np.arange(LENGTH) < lengths, targets, 0).astype(np.int32)
        return {
            "encoder_input_tokens": rng.integers(1, VOCAB, (size, LENGTH)).astype(
                "int32"
            ),
            "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            "decoder_target_tokens": targets,
            "decoder_loss_weights": (targets > 0).astype(np.float32),
        }

    return [batch() for _ in range(num)]


def parameters(seed=0):
    return model().get_initial_params(
        jax.random.key(seed), jax.tree.map(jnp.asarray, batches()[0])
    )
