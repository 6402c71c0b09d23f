"""Hugging Face's checkpoints of the T5 family, as parameters of `network.Transformer`.

A checkpoint is a folder with `config.json` and `model.safetensors`, in one file or in
several with an index. T5 1.0 and 1.1, Flan-T5, mT5, ByT5 and umT5 have this layout. The
library `transformers` is not needed. Kernels are `[in, out]` here and `[out, in]` there;
the tables of relative positions are `[heads, buckets]` here and `[buckets, heads]` there.
"""

import collections
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
from etils import epath
from safetensors.numpy import save_file

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.analysis.store import files
from t5x_fwdloss.standalone import layers
from t5x_fwdloss.standalone.network import T5Config

CONFIG, ONE_FILE = "config.json", "model.safetensors"
INDEX = f"{ONE_FILE}.index.json"
EMBEDDING, HEAD = "shared.weight", "lm_head.weight"
# Further names of the embedding, in files that do not know that it is shared.
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# In T5 1.0's files; no program reads it.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

MODEL_TYPES = ("t5", "mt5", "umt5")
SIZES = {
    "vocab_size": "vocab_size",
    "emb_dim": "d_model",
    "num_heads": "num_heads",
    "head_dim": "d_kv",
    "mlp_dim": "d_ff",
    "num_encoder_layers": "num_layers",
}
# `gelu_new` is the approximation with tanh, which is T5X's and jax.nn's `gelu`.
ACTIVATIONS = {
    "relu": ("relu",),
    "gelu_new": ("gelu",),
    "silu": ("silu",),
    "gated-relu": ("relu", "linear"),
    "gated-gelu": ("gelu", "linear"),
    "gated-gelu_new": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
}
# Names of parameters here, and there but for ".weight" at the end.
NAMES = {
    r"token_embedder/embedding": r"shared",
    r"decoder/logits_dense/kernel": r"lm_head",
    r"(\w+)/\1_norm/scale": r"\1.final_layer_norm",
    r"(\w+)/relpos_bias/rel_embedding": (
        r"\1.block.0.layer.0.SelfAttention.relative_attention_bias"
    ),
    r"(\w+)/layers_(\d+)/relpos_bias/rel_embedding": (
        r"\1.block.\2.layer.0.SelfAttention.relative_attention_bias"
    ),
    r"(\w+)/layers_(\d+)/(?:self_)?attention/([qkvo])\w+/kernel": (
        r"\1.block.\2.layer.0.SelfAttention.\3"
    ),
    r"(\w+)/layers_(\d+)/pre_(?:self_)?attention_layer_norm/scale": (
        r"\1.block.\2.layer.0.layer_norm"
    ),
    r"decoder/layers_(\d+)/encoder_decoder_attention/([qkvo])\w+/kernel": (
        r"decoder.block.\1.layer.1.EncDecAttention.\2"
    ),
    r"decoder/layers_(\d+)/pre_cross_attention_layer_norm/scale": (
        r"decoder.block.\1.layer.1.layer_norm"
    ),
    r"encoder/layers_(\d+)/mlp/(\w+)/kernel": (
        r"encoder.block.\1.layer.1.DenseReluDense.\2"
    ),
    r"encoder/layers_(\d+)/pre_mlp_layer_norm/scale": (
        r"encoder.block.\1.layer.1.layer_norm"
    ),
    r"decoder/layers_(\d+)/mlp/(\w+)/kernel": (
        r"decoder.block.\1.layer.2.DenseReluDense.\2"
    ),
    r"decoder/layers_(\d+)/pre_mlp_layer_norm/scale": (
        r"decoder.block.\1.layer.2.layer_norm"
    ),
}
# What the network has as constants.
CONSTANTS = {
    "relative_attention_num_buckets": layers.NUM_BUCKETS,
    "relative_attention_max_distance": layers.MAX_DISTANCE,
    "layer_norm_epsilon": layers.NORM_EPSILON,
}
# Fields that change neither the parameters nor, without dropout, the loss.
FREE_FIELDS = ("dtype", "dropout_rate", "float32_attention_logits")


def is_checkpoint(folder: epath.Path) -> bool:
    """Whether there is a configuration of `transformers` in a folder."""
    return (folder / CONFIG).exists()


def read_config(
    folder: settings.Words, dtype: Any = "float32", dropout_rate: float | None = None
) -> T5Config:
    """The network that a checkpoint's `config.json` describes.

    Args:
        folder: of the checkpoint.
        dtype: of the activations; the parameters are restored in float32.
        dropout_rate: None: the checkpoint's.

    Raises:
        ValueError: the folder has no such file, or it describes a network that is not
            of the T5 family or has other constants.
    """
    path = files.user_path(folder)
    if not is_checkpoint(path):
        raise ValueError(
            f"A checkpoint of Hugging Face must be a folder with {CONFIG} and {ONE_FILE}: "
            f"{path} has no {CONFIG}."
        )
    found = files.read_json(path / CONFIG)
    _check_supported(found, str(path / CONFIG))
    stored = _header(path)
    tied, scaled = HEAD not in stored or _is_copy(path, stored, HEAD), _scales(found)
    if scaled and not tied:
        raise ValueError(
            f"A scaled head must be the embedding itself (T5 1.0): {path} has {HEAD} "
            "apart from it, and its tie_word_embeddings is not false."
        )
    kind, layer_count = found["model_type"], found["num_layers"]
    return T5Config(
        **{name: found[key] for name, key in SIZES.items()},
        num_decoder_layers=found.get("num_decoder_layers") or layer_count,
        mlp_activations=ACTIVATIONS[_activation(found)],
        dropout_rate=(
            found.get("dropout_rate", 0.1) if dropout_rate is None else dropout_rate
        ),
        dtype=dtype,
        logits_via_embedding=tied,
        scale_tied_logits=scaled or not tied,
        relative_bias_per_layer=kind == "umt5",
    )


def check_network(path: str, module: Any) -> None:
    """Passes if a network computes what the checkpoint's own does.

    A checkpoint of another format passes.

    Args:
        path: the checkpoint.
        module: the network; its `FREE_FIELDS` may differ.

    Raises:
        ValueError: it names the fields that differ.
    """
    if not is_checkpoint(files.user_path(path)):
        return
    config, wanted = getattr(module, "config", None), read_config(path)
    if not isinstance(config, T5Config):
        raise ValueError(
            f"MODEL must be a network.Transformer for the checkpoint of Hugging Face at "
            f"{path}: got {type(module).__name__}."
        )
    sides = [
        f"{name} is {getattr(config, name)}, there {getattr(wanted, name)}"
        for name in T5Config.__dataclass_fields__
        if name not in FREE_FIELDS
        and _plain(getattr(config, name)) != _plain(getattr(wanted, name))
    ]
    if sides:
        raise ValueError(
            f"MODEL must be the network of {path}/{CONFIG}: {'; '.join(sides)}; "
            "t5x_fwdloss/configs/standalone/hugging_face.gin reads it from there."
        )


def restore_params(folder: epath.PathLike, like: Any) -> Any:
    """The parameters of a checkpoint.

    Args:
        folder: of the checkpoint, local.
        like: parameters of `network.Transformer`, or their shapes and dtypes; each leaf
            is restored with the dtype and the sharding, if any, given here.

    Raises:
        ValueError: the arrays are not those of `like`, or an array that must equal the
            embedding does not.
    """
    path = files.user_path(folder)
    stored = _header(path)
    for copy in (*COPIES, HEAD):
        is_used = copy == HEAD and HEAD in map(_key, parameters.named_leaves(like))
        if copy in stored and not is_used and not _is_copy(path, stored, copy):
            raise ValueError(
                f"The array {copy} must equal {EMBEDDING} in a checkpoint whose network "
                f"shares them: those of {path} differ."
            )
    wanted = {name: _key(name) for name in parameters.named_leaves(like)}
    _check_same(path, stored, wanted, like)
    by_file = collections.defaultdict(list)
    for name, key in wanted.items():
        by_file[stored[key][0]].append((name, key))
    leaves, restored = parameters.named_leaves(like), {}
    for file, names in by_file.items():
        with _opened(path / file) as arrays:
            for name, key in names:
                leaf, array = leaves[name], arrays.get_tensor(key)
                array = np.asarray(array.T if _is_turned(name) else array, leaf.dtype)
                restored[name] = jax.device_put(array, getattr(leaf, "sharding", None))
    flat = [restored[name] for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), flat)


def save(folder: epath.PathLike, params: Any, config: T5Config) -> None:
    """Writes parameters as a checkpoint that `transformers` reads.

    Args:
        folder: new; it appears under its name when it is complete.
        params: of `network.Transformer`.
        config: of the network.

    Raises:
        ValueError: the folder exists already, is not local, or the network has
            activations that `transformers` has no name for.
    """
    path = files.user_path(folder)
    if path.exists() or not files.is_local(path):
        raise ValueError(f"The folder to write must be local and new: got {path}.")
    arrays = {
        _key(name): np.ascontiguousarray(leaf.T if _is_turned(name) else leaf)
        for name, leaf in parameters.named_leaves(params).items()
    }
    if config.logits_via_embedding and not config.scale_tied_logits:
        # Earlier versions of transformers share the two only where the logits are scaled.
        arrays[HEAD] = arrays[EMBEDDING].copy()
    document = _document(config)
    with files.writing(path):
        part = path.parent / f".{path.name}.part"
        files.remove(part)
        part.mkdir(parents=True)
        save_file(arrays, part / ONE_FILE, metadata={"format": "pt"})
        files.write_json(part / CONFIG, document)
        part.rename(path)
        files.sync_folder(path.parent)


def _check_supported(found: Mapping[str, Any], path: str) -> None:
    def refuse(what, key, default=None):
        value = found.get(key, default)
        raise ValueError(f"{path} must have {what} as {key}: got {value!r}.")

    if found.get("model_type") not in MODEL_TYPES:
        refuse(f"one of {', '.join(MODEL_TYPES)}", "model_type")
    if _activation(found) not in ACTIVATIONS:
        refuse(f"one of {', '.join(ACTIVATIONS)}", "feed_forward_proj")
    for key, value in CONSTANTS.items():
        if found.get(key, value) != value:
            refuse(f"{value}, which is T5's,", key)
    for key in SIZES.values():
        if not isinstance(found.get(key), int):
            refuse("a whole number", key)


def _activation(found: Mapping[str, Any]) -> str:
    default = "relu" if found["model_type"] == "t5" else "gated-gelu"
    return found.get("feed_forward_proj", default)


def _scales(found: Mapping[str, Any]) -> bool:
    """Whether the logits are divided by sqrt(embed), as `transformers` decides it."""
    if found["model_type"] == "mt5":
        return False
    unless_told = found.get("tie_word_embeddings") is not False
    return bool(found.get("scale_decoder_outputs", unless_told))


def _document(config: T5Config) -> dict[str, Any]:
    names = {tuple(value): key for key, value in reversed(ACTIVATIONS.items())}
    activations = tuple(config.mlp_activations)
    if activations not in names:
        raise ValueError(
            "mlp_activations must be those of a network of transformers: got "
            f"{activations}, and it has {', '.join(map(str, names))}."
        )
    kind = "umt5" if config.relative_bias_per_layer else "t5"
    return {
        "architectures": [f"{kind.upper()}ForConditionalGeneration"],
        "model_type": kind,
        **{key: getattr(config, name) for name, key in SIZES.items()},
        "num_decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": names[activations],
        "dropout_rate": config.dropout_rate,
        **CONSTANTS,
        "tie_word_embeddings": config.logits_via_embedding and config.scale_tied_logits,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def _key(name: str) -> str:
    """Hugging Face's name of a parameter of `network.Transformer`; '' if it has none."""
    for pattern, key in NAMES.items():
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(key) + ".weight"
    return ""


def _is_turned(name: str) -> bool:
    return name.endswith(("/kernel", "/rel_embedding"))


def _header(path: epath.Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """File, shape and dtype of each array of a checkpoint.

    Raises:
        ValueError: the folder is not local, or has no file of arrays.
    """
    if not files.is_local(path):
        raise ValueError(
            "A checkpoint of Hugging Face must be in a local folder, since safetensors "
            f"reads no other: got {path}."
        )
    if (path / INDEX).exists():
        with files.reading(path / INDEX):
            names = set(files.read_json(path / INDEX)["weight_map"].values())
    else:
        names = {ONE_FILE}
    if not (path / INDEX).exists() and not (path / ONE_FILE).exists():
        there = ", ".join(sorted(x.name for x in path.iterdir()))
        raise ValueError(
            f"A checkpoint of Hugging Face must hold {ONE_FILE} or {INDEX}: {path} holds "
            f"{there}; save it by model.save_pretrained in transformers."
        )
    found = {}
    for name in sorted(names):
        with _opened(path / name) as arrays:
            for key in arrays.keys():  # noqa: SIM118, it is no mapping
                array = arrays.get_slice(key)
                found[key] = name, tuple(array.get_shape()), array.get_dtype()
    return found


def _opened(file: epath.Path):
    with files.reading(file):
        try:
            return safetensors.safe_open(file, framework="numpy")
        except safetensors.SafetensorError as error:
            raise files.StorageError(
                f"{file} must be a whole file of safetensors: {error}."
            ) from error


def _is_copy(path: epath.Path, stored, key: str) -> bool:
    """Whether an array equals the embedding, bit for bit."""
    if EMBEDDING not in stored or stored[key][1:] != stored[EMBEDDING][1:]:
        return False
    with (
        _opened(path / stored[key][0]) as one,
        _opened(path / stored[EMBEDDING][0]) as other,
    ):
        return np.array_equal(one.get_tensor(key), other.get_tensor(EMBEDDING))


def _check_same(path, stored, wanted, like) -> None:
    """The same arrays on both sides, but for what no network reads."""
    found = {}
    for key, (_, shape, dtype) in stored.items():
        if key not in (*COPIES, UNUSED, HEAD) or key in wanted.values():
            kind = "" if dtype in ("F64", "F32", "F16", "BF16") else f" of {dtype}"
            found[key] = f"{shape}{kind}" if kind else shape
    shapes = {
        wanted[name] or name: tuple(
            leaf.shape[::-1] if _is_turned(name) else leaf.shape
        )
        for name, leaf in parameters.named_leaves(like).items()
    }
    parameters.check_same(found, shapes, str(path))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value
