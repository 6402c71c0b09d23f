"""Writes tests/data/hugging_face: tiny checkpoints of transformers, with their logits.

    python -m pip install --constraint constraints.txt --editable '.[peers]'
    python scripts/make_golden_hugging_face.py

Each folder has what `save_pretrained` writes and expected.npz: tokens, logits and loss
in float32. All parameters are random, norms and position tables too; sequences are
longer than T5's largest distance of a bucket, 128, and the inputs have padding.
"""

import pathlib

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests/data/hugging_face"
SIZES = {
    "vocab_size": 40,
    "d_model": 16,
    "num_heads": 2,
    "d_kv": 6,
    "d_ff": 20,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "decoder_start_token_id": 0,
}
NETWORKS = {
    "t5_1_0": (transformers.T5Config, {"feed_forward_proj": "relu"}),
    "t5_1_1": (
        transformers.T5Config,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": (
        transformers.MT5Config,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "umt5": (
        transformers.UMT5Config,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    # What the library makes of T5 1.1 since version 5, which ties every head.
    "t5_1_1_tied": (
        transformers.T5Config,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
UNTIED = ("t5_1_1", "mt5", "umt5")
CLASSES = {
    transformers.T5Config: transformers.T5ForConditionalGeneration,
    transformers.MT5Config: transformers.MT5ForConditionalGeneration,
    transformers.UMT5Config: transformers.UMT5ForConditionalGeneration,
}


def build(name: str, seed: int = 0):
    """A network of the library with random parameters, without dropout."""
    kind, changes = NETWORKS[name]
    torch.manual_seed(seed)
    model = CLASSES[kind](kind(**SIZES, **changes)).eval()
    if name in UNTIED:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            is_norm = "layer_norm" in parameter_name
            parameter.copy_(1 + noise if is_norm else noise)
    return model


def evaluate(model, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens, logits and mean loss over the target tokens that are not padding."""
    random = np.random.default_rng(seed)
    vocab_size = model.config.vocab_size
    inputs = random.integers(2, vocab_size, (2, 150))
    targets = random.integers(2, vocab_size, (2, 140))
    inputs[1, 90:] = 0
    targets[0, 100:] = 0
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor(inputs),
            attention_mask=torch.tensor(inputs != 0),
            labels=torch.tensor(np.where(targets == 0, -100, targets)),
            decoder_input_ids=torch.tensor(np.pad(targets, ((0, 0), (1, 0)))[:, :-1]),
        )
    return {
        "inputs": inputs.astype(np.int32),
        "targets": targets.astype(np.int32),
        "logits": found.logits.numpy(),
        "loss": found.loss.numpy(),
    }


def main() -> None:
    """Writes a folder for each network."""
    for name in NETWORKS:
        model = build(name)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(FOLDER / name / "expected.npz", **evaluate(model))


if __name__ == "__main__":
    main()
