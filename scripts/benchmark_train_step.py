"""A whole T5X train step of t5_1_1 small shapes: the stock model against the chunked head.

    python scripts/benchmark_train_step.py

Two layers of encoder and decoder, T5X's network, Adafactor and trainer, the real
vocabulary of 32128, synthetic batches of 8 sequences of 512 inputs and 114 targets.
Compiled temporary memory, and step times of interleaved runs (none with
`--repeats=0`). Needs T5X.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

BATCH, INPUTS, TARGETS, VOCAB = 8, 512, 114, 32128
MODELS = {  # loss_impl and loss_chunk_length; None is T5X's own model
    "stock": None,
    "custom_jvp": ("custom_jvp", None),
    "chunk 16": ("custom_jvp", 16),
    "chunk 32": ("custom_jvp", 32),
}


def make_model(choice, **sizes):
    """T5X's encoder-decoder model of t5_1_1 small, two layers, with the chosen loss.

    Args:
        choice: one of the values of `MODELS`.
        **sizes: of T5X's `T5Config`, in place of those.
    """
    import seqio
    from t5x import adafactor, models
    from t5x.examples.t5 import network

    from t5x_fwdloss.models import with_loss

    small = {
        "vocab_size": VOCAB,
        "dtype": "bfloat16",
        "emb_dim": 512,
        "num_heads": 6,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "head_dim": 64,
        "mlp_dim": 1024,
        "mlp_activations": ("gelu", "linear"),
        "dropout_rate": 0.0,
    }
    config = network.T5Config(**{**small, **sizes})
    vocabulary = seqio.PassThroughVocabulary(VOCAB)
    model = models.EncoderDecoderModel(
        network.Transformer(config),
        vocabulary,
        vocabulary,
        adafactor.Adafactor(
            decay_rate=0.8,
            logical_factor_rules=adafactor.standard_logical_factor_rules(),
        ),
        z_loss=1e-4,
    )
    if choice is None:
        return model
    impl, chunk_length = choice
    return with_loss(model, loss_impl=impl, loss_chunk_length=chunk_length)


def synthetic_batch():
    """Random tokens, none of them padding."""
    rng = np.random.default_rng(0)
    draw = lambda length: rng.integers(1, VOCAB, (BATCH, length)).astype(np.int32)
    targets = draw(TARGETS)
    return {
        "encoder_input_tokens": draw(INPUTS),
        "decoder_input_tokens": np.roll(targets, 1, axis=1),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": np.ones_like(targets),
    }


def compile_step(model, batch):
    """The compiled step, and the state that it starts from."""
    from t5x import train_state, trainer

    shapes = {name: value.shape for name, value in batch.items()}
    types = dict.fromkeys(batch, jnp.int32)

    def initial_state(key):
        variables = model.get_initial_variables(key, shapes, types)
        return train_state.FlaxOptimTrainState.create(model.optimizer_def, variables)

    state = jax.jit(initial_state)(jax.random.key(0))

    def step(state, batch):
        rate = jnp.float32(1e-3)
        key = jax.random.key(1)
        state, metrics = trainer.train_with_lr(state, batch, rate, key, model, None)
        return state, metrics["loss"].compute()

    return jax.jit(step).lower(state, batch).compile(), state


def measure(repeats: int) -> dict:
    """Memory in bytes and in logits arrays; time, if repeated, as a ratio to stock."""
    batch = synthetic_batch()
    steps, results = {}, {}
    for name, choice in MODELS.items():
        steps[name] = compile_step(make_model(choice), batch)
        temporary = steps[name][0].memory_analysis().temp_size_in_bytes
        results[name] = {
            "temporary_bytes": temporary,
            "logits_arrays": round(temporary / (4 * BATCH * TARGETS * VOCAB), 3),
        }
        print(f"train step, {name}: {results[name]}", flush=True)
    if not repeats:
        return results
    times = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, (step, state) in steps.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(step(state, batch))
            end = time.perf_counter(), time.process_time()
            times[name].append(np.subtract(end, start))
    medians = {name: np.median(t[1:], axis=0) for name, t in times.items()}
    for name, median in medians.items():
        ratio, cpu = median / medians["stock"]
        results[name] |= {"ratio": round(float(ratio), 3), "cpu": round(float(cpu), 3)}
        print(f"train step, {name}: {results[name]}", flush=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="0: memory only")
    print(json.dumps(measure(parser.parse_args().repeats), indent=1))
