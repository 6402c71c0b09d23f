"""Takes golden numbers from the installed T5X, for machines without it.

    python scripts/make_golden.py

writes into tests/data:

* golden_losses.npz: inputs, losses and gradients of T5X's `losses.py` over `LOSS_CASES`;
* golden_network_{untied,tied,decoder_only}.npz: parameters, batch and logits of tiny
  networks of T5X's examples (`params/...`, `batch/...`, `logits`, `config` as JSON);
* golden_metrics.json: results of `loss_fn` of T5X's two model classes on them.

Every file records the versions it was made with. The same functions serve the tests
that compare with a live T5X.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

TESTED_COMMIT = "cc342d4"
DATA = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data"
SHAPE, VOCAB = (3, 6), 11
FACTORS = {
    "none": None,
    "int": 7,
    "float": 2.5,
    "numpy": ["numpy", 3.0],
    "jax": ["jax", 4.0],
    "real_tokens": "NUM_REAL_TARGET_TOKENS",
    "total_tokens": "NUM_TOTAL_TARGET_TOKENS",
    "per_sequence": "AVERAGE_PER_SEQUENCE",
}


def versions(t5x_commit: str) -> dict[str, str]:
    """The numbers' origin: T5X's commit and a hash of its losses, jax, flax, numpy."""
    from t5x import losses

    names = ("jax", "jaxlib", "flax", "numpy")
    source = pathlib.Path(losses.__file__).read_bytes()
    return {
        "t5x_commit": t5x_commit,
        "t5x_losses_sha256": hashlib.sha256(source).hexdigest(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def decode_factor(factor):
    """A normalizing factor from its JSON form."""
    if not isinstance(factor, list):
        return factor
    kind, value = factor
    return np.float32(value) if kind == "numpy" else jnp.float32(value)


# --- losses -----------------------------------------------------------------------


def loss_cases() -> dict[str, tuple[dict, dict[str, np.ndarray]]]:
    """Settings and input arrays of each case, by name."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(*SHAPE, VOCAB), scale=3.0).astype(np.float32)
    targets = rng.integers(1, VOCAB, size=SHAPE).astype(np.int32)
    padded = targets.copy()
    padded[0, 4:], padded[1, 2:], padded[2, :] = 0, 0, 0
    is_real = padded > 0
    fractions = rng.uniform(0.25, 2.0, size=SHAPE).astype(np.float32)
    packed = {
        "targets": np.where([[1] * 6, [1] * 5 + [0], [1] * 6], targets, 0),
        "segment_ids": np.array(
            [[1, 1, 2, 2, 2, 3], [1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32
        ),
        "positions": np.array(
            [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]], np.int32
        ),
    }
    smooth = {"label_smoothing": 0.1, "z_loss": 1e-2}
    masked = logits.copy()
    masked[..., 7:] = -1e10
    outside = targets.copy()
    outside[0, :3], outside[1, 0] = (-1, VOCAB, -100), VOCAB + 5
    base = {"logits": logits, "targets": targets}
    cases = {
        "plain": ({}, base),
        "z_loss": ({"z_loss": 1e-2}, base),
        "smoothing": ({"label_smoothing": 0.1}, base),
        "smoothing_and_z_loss": (smooth, base),
        "bool_weights": (smooth, {**base, "weights": is_real}),
        "int_weights": (smooth, {**base, "weights": is_real.astype(np.int32)}),
        "float_weights": (smooth, {**base, "weights": fractions}),
        "zero_weights": (smooth, {**base, "weights": np.zeros(SHAPE, np.float32)}),
        "outside_labels": ({"z_loss": 1e-2}, {**base, "targets": outside}),
        "outside_labels_smoothed": (smooth, {**base, "targets": outside}),
        "masked_classes": (
            {"z_loss": 1e-2},
            {**base, "logits": masked, "targets": targets % 7},
        ),
        "large_logits": (
            {"z_loss": 1e-4},
            {**base, "logits": np.sign(logits).astype(np.float32) * 1e4},
        ),
        "equal_logits": (smooth, {**base, "logits": np.full_like(logits, 2.5)}),
        "one_class": (
            smooth,
            {"logits": logits[..., :1], "targets": np.where(is_real, 0, 3)},
        ),
        "bfloat16": ({**smooth, "dtype": "bfloat16"}, base),
    }
    for name, factor in FACTORS.items():
        settings = {**smooth, "factor": factor}
        cases[f"factor_{name}"] = (settings, {**base, "targets": padded})
        cases[f"factor_{name}_weights"] = (settings, {**base, "weights": fractions})
    for weights in ({}, {"weights": fractions}):
        settings = {**smooth, "factor": "AVERAGE_PER_SEQUENCE"}
        suffix = "_weights" if weights else ""
        cases[f"packed{suffix}"] = (settings, {**base, **packed, **weights})
    return cases


def loss_outputs(losses, settings, arrays, **options) -> dict[str, np.ndarray]:
    """Loss, z-loss, weight sum and gradient, by any module with T5X's two functions."""
    batch_names = {
        "targets": "decoder_target_tokens",
        "weights": "decoder_loss_weights",
        "segment_ids": "decoder_segment_ids",
        "positions": "decoder_positions",
    }
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    batch = {long: arrays[k] for k, long in batch_names.items() if k in arrays}
    logits = arrays["logits"].astype(settings.get("dtype", "float32"))
    factor, weights = losses.get_loss_normalizing_factor_and_weights(
        decode_factor(settings.get("factor")), batch
    )

    def loss_and_rest(logits):
        loss, *rest = losses.compute_weighted_cross_entropy(
            logits,
            arrays["targets"],
            weights,
            settings.get("label_smoothing", 0.0),
            settings.get("z_loss", 0.0),
            factor,
            **options,
        )
        return loss, rest

    primal = loss_and_rest(logits)[0]
    (loss, (z_loss, weight_sum)), gradient = jax.value_and_grad(
        loss_and_rest, has_aux=True
    )(logits)
    floats = {"primal": primal, "loss": loss, "z_loss": z_loss, "gradient": gradient}
    outputs = {k: np.asarray(v.astype(jnp.float32)) for k, v in floats.items()}
    return {**outputs, "weight_sum": np.asarray(weight_sum)}


def write_losses(directory, about):
    """Writes golden_losses.npz."""
    from t5x import losses

    settings, stored = {}, {}
    for name, (case_settings, arrays) in loss_cases().items():
        settings[name] = case_settings
        outputs = loss_outputs(losses, case_settings, arrays)
        stored |= {f"{name}/inputs/{k}": v for k, v in arrays.items()}
        stored |= {f"{name}/outputs/{k}": v for k, v in outputs.items()}
    np.savez_compressed(
        directory / "golden_losses.npz",
        settings=np.array(json.dumps(settings)),
        versions=np.array(json.dumps(about)),
        **stored,
    )


# --- networks and models ------------------------------------------------------------


def tiny_sizes(**options) -> dict:
    """Sizes of the tiny networks, as JSON."""
    return {
        "vocab_size": 37,
        "dtype": "float32",
        "emb_dim": 8,
        "num_heads": 2,
        "head_dim": 4,
        "mlp_dim": 16,
        "mlp_activations": ["gelu", "linear"],
        "dropout_rate": 0.0,
        **options,
    }


def tiny_batch(*, with_encoder: bool) -> dict[str, np.ndarray]:
    """Two rows, the second padded; the decoder's inputs are its targets, shifted."""
    rng = np.random.default_rng(1)
    targets = rng.integers(1, 37, size=(2, 24)).astype(np.int32)
    targets[1, 17:] = 0
    batch = {
        "decoder_input_tokens": np.roll(targets, 1, axis=1) * (np.arange(24) > 0),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }
    if not with_encoder:
        return batch
    inputs = rng.integers(1, 37, size=(2, 40)).astype(np.int32)
    inputs[0, 31:] = 0
    return {"encoder_input_tokens": inputs, **batch}


def tiny_model(name: str, **settings):
    """A T5X model on a tiny network of T5X's examples, and the network's sizes."""
    import seqio
    from t5x import models

    vocabulary = seqio.PassThroughVocabulary(37)
    if name == "decoder_only":
        from t5x.examples.decoder_only import network

        sizes = tiny_sizes(num_layers=2, logits_via_embedding=False)
        module = network.DecoderWrapper(network.TransformerConfig(**as_config(sizes)))
        return models.DecoderOnlyModel(module, vocabulary, None, **settings), sizes

    from t5x.examples.t5 import network

    sizes = tiny_sizes(
        num_encoder_layers=2, num_decoder_layers=2, logits_via_embedding=name == "tied"
    )
    module = network.Transformer(network.T5Config(**as_config(sizes)))
    model = models.EncoderDecoderModel(module, vocabulary, vocabulary, None, **settings)
    return model, sizes


def as_config(sizes: dict) -> dict:
    """The sizes as fields of T5X's config, which needs a tuple."""
    return {**sizes, "mlp_activations": tuple(sizes["mlp_activations"])}


def tiny_params(model, batch):
    """Parameters as T5X draws them, but norm scales that differ from one."""
    shapes = {name: value.shape for name, value in batch.items()}
    types = dict.fromkeys(batch, jnp.int32)
    params = model.get_initial_variables(jax.random.key(0), shapes, types)["params"]
    flat = traverse_util.flatten_dict(params, sep="/")
    # All ones at the start, where a misplaced scale would not show.
    key = jax.random.key(1)
    for path, value in sorted(flat.items()):
        if value.ndim == 1:
            key, subkey = jax.random.split(key)
            flat[path] = value + 0.2 * jax.random.normal(subkey, value.shape)
    return traverse_util.unflatten_dict(flat, sep="/")


def write_network(directory, about, name):
    """Writes golden_network_{name}.npz; returns parameters and batch."""
    batch = tiny_batch(with_encoder=name != "decoder_only")
    model, sizes = tiny_model(name)
    params = tiny_params(model, batch)
    logits = model._compute_logits(params, batch)
    flat = traverse_util.flatten_dict(params, sep="/")
    np.savez_compressed(
        directory / f"golden_network_{name}.npz",
        config=np.array(json.dumps(sizes)),
        versions=np.array(json.dumps(about)),
        logits=np.asarray(logits),
        **{f"params/{path}": np.asarray(value) for path, value in flat.items()},
        **{f"batch/{key}": value for key, value in batch.items()},
    )
    return params, batch


def metrics_of(model, params, batch) -> dict:
    """The loss and each metric's numbers, by field."""
    loss, metrics = model.loss_fn(params, batch, None)
    fields = {
        name: {
            "class": type(metric).__name__,
            **{
                field.name: float(np.asarray(getattr(metric, field.name)))
                for field in dataclasses.fields(metric)
                if getattr(metric, field.name) is not None
            },
        }
        for name, metric in metrics.items()
    }
    return {"loss": float(loss), "metrics": fields}


def write_metrics(directory, about, networks):
    """Writes golden_metrics.json: {network: {factor: {loss, metrics}}}."""
    results = {
        name: {
            factor_name: metrics_of(
                tiny_model(
                    name,
                    label_smoothing=0.1,
                    z_loss=1e-3,
                    loss_normalizing_factor=factor,
                )[0],
                params,
                batch,
            )
            for factor_name, factor in FACTORS.items()
            if not isinstance(factor, list)
        }
        for name, (params, batch) in networks.items()
    }
    settings = {"label_smoothing": 0.1, "z_loss": 1e-3, "factors": FACTORS}
    text = json.dumps(
        {"versions": about, "settings": settings, "results": results}, indent=1
    )
    (directory / "golden_metrics.json").write_text(text + "\n")


def main():
    """Writes all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=pathlib.Path, default=DATA)
    parser.add_argument("--t5x_commit", default=TESTED_COMMIT)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    about = versions(arguments.t5x_commit)
    networks = {
        name: write_network(arguments.directory, about, name)
        for name in ("untied", "tied", "decoder_only")
    }
    write_metrics(arguments.directory, about, networks)
    write_losses(arguments.directory, about)


if __name__ == "__main__":
    main()
