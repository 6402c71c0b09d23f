"""Builds the MODEL of a T5X training configuration and prints its settings as JSON.

The flags are T5X's. What `predict_batch_with_aux` would decode is found by calling it
with a network that does nothing.
"""

import copy
import json
import sys
import types

import gin
import jax.numpy as jnp
from absl import flags
from t5x import decoding, gin_utils
from t5x.train import train  # noqa: F401  run files bind __main__.train

flags.DEFINE_multi_string("gin_file", None, "")
flags.DEFINE_multi_string("gin_bindings", [], "")


class Decoded(Exception):
    """Raised in place of decoding; gin hands on its attributes, but not its args."""

    number: int


def stop(_, num_decodes):
    decoded = Decoded()
    decoded.number = num_decodes
    raise decoded


def num_decodes(model):
    """What gin or the constructor set for beam search."""
    nothing = (jnp.zeros((1, 1, 1)), {"cache": {}})
    model = copy.copy(model)
    model.module = types.SimpleNamespace(
        apply=lambda *_, **__: nothing, decode=lambda: None, encode=lambda: None
    )
    decoding.flat_batch_beam_expand = stop
    tokens = jnp.ones((1, 2), jnp.int32)
    batch = {"encoder_input_tokens": tokens, "decoder_input_tokens": tokens}
    try:
        model.predict_batch_with_aux({}, batch)
    except Decoded as decoded:
        return decoded.number
    return None


def main(_):
    """Parses, builds, prints."""
    found = flags.FLAGS
    gin_utils.parse_gin_flags(["."], found.gin_file, found.gin_bindings)
    model = copy.deepcopy(gin.config.parse_value("%MODEL"))
    settings = {
        "bases": [cls.__name__ for cls in type(model).__mro__],
        "loss_impl": getattr(model, "_loss_impl", None),
        "loss_chunk_length": getattr(model, "_loss_chunk_length", None),
        "z_loss": model._z_loss,
        "label_smoothing": model._label_smoothing,
        "loss_normalizing_factor": model._loss_normalizing_factor,
        "decode_fn": model.decode_fn.__name__,
        "optimizer": type(model.optimizer_def).__name__,
        "vocabulary": type(model.output_vocabulary).__name__,
        "network": f"{type(model.module).__module__}.{type(model.module).__name__}",
        "feature_converter": model.FEATURE_CONVERTER_CLS.__name__,
    }
    if "EncoderDecoderModel" in settings["bases"]:
        settings["num_decodes"] = num_decodes(model)
    sys.stdout.write(f"SETTINGS {json.dumps(settings)}\n")


if __name__ == "__main__":
    gin_utils.run(main)
