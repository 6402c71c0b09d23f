"""Compiled temporary memory of T5X's train step: by reverse mode, and by forward mode.

    python scripts/measure_forward_memory.py --output=docs/benchmarks/forward_memory_cpu.json

The shapes of t5_1_1 base, 12 + 12 layers, T5X's network, trainer and Adafactor,
vocabulary 32128, activations in bfloat16, batch 8 of 512 inputs and 114 targets. Steps
are compiled from shapes, with their state donated as T5X does, and nothing is run. XLA's
scheduler for few live buffers, which accelerators have, is chosen for CPUs, too: the
default one for CPUs converts all weights to another type at the beginning. The exit
status is 1 if a forward gradient of all parameters takes more than 0.40 of the stock
step. Needs T5X.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

import benchmark_record
import benchmark_train_step
import benchmark_training_memory
import jax
import jax.numpy as jnp

# Read when the first function is compiled.
FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()
CHUNK_LENGTH, MOST = 32, 0.40
SIZES = {**benchmark_training_memory.SIZES["base"], "dropout_rate": 0.1}  # of T5Config
STOCK, CHUNKED = "T5X's own", "reverse mode, chunked head"
ALL, FEW = "forward mode, all parameters", "forward mode, norm scales"
# Whether the head is chunked, and which parameters move by forward mode.
STEPS = {
    STOCK: (False, None),
    ALL: (True, ".*"),
    "forward mode, norm scales and last layer": (
        True,
        ".*norm/scale|decoder/logits_dense/kernel",
    ),
    FEW: (True, ".*norm/scale"),
    CHUNKED: (True, None),
}


def temporary_bytes(is_chunked, pattern, sizes, num_directions):
    """Temporary memory of the step that the trainer compiles, and what moves in it."""
    from t5x import partitioning, trainer, utils

    from t5x_fwdloss.training import forward_trainer

    choice = ("custom_jvp", CHUNK_LENGTH) if is_chunked else None
    model = benchmark_train_step.make_model(choice, **sizes)
    trainer_cls, initializer_cls = trainer.Trainer, utils.TrainStateInitializer
    if pattern is not None:
        trainer_cls = forward_trainer.with_forward_gradient(trainer_cls, num_directions)
        initializer_cls = forward_trainer.with_chosen_parameters(pattern)
    batch = jax.eval_shape(benchmark_train_step.synthetic_batch)
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    initializer = initializer_cls(
        optimizer_def=model.optimizer_def,
        init_fn=model.get_initial_variables,
        input_shapes={name: x.shape for name, x in batch.items()},
        input_types=dict.fromkeys(batch, jnp.int32),
        partitioner=partitioner,
    )
    state = initializer.global_train_state_shape
    with tempfile.TemporaryDirectory() as folder:
        built = trainer_cls(
            model=model,
            train_state=state,
            partitioner=partitioner,
            train_state_axes=initializer.train_state_axes,
            eval_names=[],
            summary_dir=folder,
            rng=jax.random.PRNGKey(0),
            learning_rate_fn=lambda _: 1e-3,
            num_microbatches=None,
        )
        compiled = partitioner.compile(built._partitioned_train_step, state, batch)
        built.close()
    moving = state.params
    if pattern is not None:
        moving = state._optimizer.optimizer_def.chosen.pick(moving)
    return {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "moving_parameters": sum(x.size for x in jax.tree.leaves(moving)),
    }


def main():
    """Parses the command line, measures, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=12, help="of each stack")
    parser.add_argument("--directions", type=int, default=4)
    options = parser.parse_args()
    layers = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), options.layers)
    steps = {}
    report = {
        "environment": benchmark_record.environment(),
        "settings": {
            "sizes": SIZES | layers,
            "chunk_length": CHUNK_LENGTH,
            "directions": options.directions,
            "xla_flag": FLAG,
        },
        "steps": steps,
    }
    for name, choice in STEPS.items():
        row = temporary_bytes(*choice, SIZES | layers, options.directions)
        stock = steps.get(STOCK, row)["temporary_bytes"]
        steps[name] = row | {"ratio": round(row["temporary_bytes"] / stock, 4)}
        print(f"{name}: {steps[name]}", flush=True)
        benchmark_record.write(report, options.output)
    print(json.dumps({name: row["ratio"] for name, row in steps.items()}, indent=1))
    if steps[ALL]["ratio"] > MOST:
        sys.exit(f"{ALL} must take at most {MOST}: got {steps[ALL]['ratio']}")


if __name__ == "__main__":
    main()
