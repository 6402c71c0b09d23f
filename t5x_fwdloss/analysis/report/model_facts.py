"""Facts about the model for the report: its class, sizes and types."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import trees

# Attributes of a network's configuration, under T5X's names, and the words for them.
SIZES = {
    "num_encoder_layers": "encoder layers",
    "num_decoder_layers": "decoder layers",
    "num_layers": "layers",
    "emb_dim": "width",
    "mlp_dim": "MLP width",
    "num_heads": "heads",
    "head_dim": "head width",
    "vocab_size": "vocabulary",
}


def describe(model: Any, params: PyTree) -> dict[str, Any]:
    """The model for the record: `class`, `sizes` by name, `parameter_dtypes`.

    Args:
        model: the model of the objective; None if it was built from functions.
        params: the original parameters, before widening.
    """
    floats = jax.tree.leaves(trees.float_part(params))
    return {
        "class": "" if model is None else type(model).__name__,
        "sizes": _sizes(getattr(getattr(model, "module", None), "config", None)),
        "parameter_dtypes": sorted({str(jnp.result_type(x)) for x in floats}),
    }


def _sizes(config) -> dict[str, int]:
    if not dataclasses.is_dataclass(config):
        return {}
    found = {name: getattr(config, name, None) for name in SIZES}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def words(model: dict[str, Any]) -> str:
    """The sizes in words, such as `2 encoder layers, width 128`."""
    counted = ("encoder layers", "decoder layers", "layers", "heads")
    parts = []
    for name, size in model["sizes"].items():
        word = SIZES[name]
        parts.append(f"{size} {word}" if word in counted else f"{word} {size:,}")
    return ", ".join(parts)
