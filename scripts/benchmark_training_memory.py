"""Compiled temporary memory of a probe of the curvature, beside that of one gradient.

    python scripts/benchmark_training_memory.py --output=docs/benchmarks/training_memory_cpu.json

The shapes of t5_1_1 small and base, vocabulary 32128, activations in bfloat16, the
chunked head, batch 8 of 512 inputs and 114 targets. Everything is compiled from shapes
and nothing is run. T5X's own network multiplies its embedding by one-hot vectors of all
tokens, which on CPUs is most of the memory of its forward pass; the standalone network
looks embeddings up. The line search keeps one trial tree of parameters, so it is
reported a second time without one. The exit status is 1 if a target is missed. Needs
T5X.
"""

import argparse
import json
import pathlib
import sys

import benchmark_record
import benchmark_train_step
import jax
import jax.numpy as jnp

from t5x_fwdloss import curvature
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer
from t5x_fwdloss.training.along_update import along_update
from t5x_fwdloss.training.line_search import line_search

CHUNK_LENGTH = 32
CASES = ("T5X, small", "T5X, base", "standalone, small")
SIZES = {  # of T5Config, from T5X's t5_1_1/{small,base}.gin
    "small": {
        "emb_dim": 512,
        "num_heads": 6,
        "num_encoder_layers": 8,
        "num_decoder_layers": 8,
        "mlp_dim": 1024,
    },
    "base": {
        "emb_dim": 768,
        "num_heads": 12,
        "num_encoder_layers": 12,
        "num_decoder_layers": 12,
        "mlp_dim": 2048,
    },
}
GRADIENT, FORWARD = "value and gradient", "forward pass"
NESTED, SEARCH = "slope and curvature (jvp of jvp)", "line search"
SEARCH_ALONE = "line search, without its trial parameters"


def problem(network, size):
    """The loss, and the shapes of its parameters and its batch."""
    sizes, batch = SIZES[size], jax.eval_shape(benchmark_train_step.synthetic_batch)
    if network == "T5X":
        model = benchmark_train_step.make_model(("custom_jvp", CHUNK_LENGTH), **sizes)
        shapes = {name: x.shape for name, x in batch.items()}
        types = dict.fromkeys(batch, jnp.int32)
        initial = lambda key, _: model.get_initial_variables(key, shapes, types)[
            "params"
        ]
    else:
        model = standalone_model(sizes)
        initial = model.get_initial_params
    params = jax.eval_shape(initial, jax.random.key(0), batch)
    return lambda params, batch: model.loss_fn(params, batch, None)[0], params, batch


def standalone_model(sizes):
    """The same shapes without T5X's classes."""
    config = T5Config(
        vocab_size=benchmark_train_step.VOCAB,
        dtype="bfloat16",
        head_dim=64,
        mlp_activations=("gelu", "linear"),
        dropout_rate=0.0,
        **sizes,
    )
    return StandaloneModel(
        Transformer(config),
        z_loss=1e-4,
        loss_impl="custom_jvp",
        loss_chunk_length=CHUNK_LENGTH,
    )


def functions(loss):
    """What is compiled, by name, as functions of two parameter trees and a batch."""
    second = curvature.second_directional_derivative(loss)
    first = curvature.directional_derivative(loss)

    def search(params, update, batch):
        moved = lambda m: jax.tree.map(lambda x, d: x + m * d, params, update)
        return line_search(lambda m: loss(moved(m), batch), 2.0, True)

    return {
        GRADIENT: lambda params, _, batch: jax.value_and_grad(loss)(params, batch),
        FORWARD: lambda params, _, batch: loss(params, batch),
        "jvp": first,
        NESTED: second,
        SEARCH: search,
        "the whole probe": along_update(loss),
    }


def measure(network, size):
    """Temporary bytes of each function, and their ratios to one gradient's."""
    loss, params, batch = problem(network, size)
    tree = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    found = {}
    for name, function in functions(loss).items():
        compiled = jax.jit(function).lower(params, params, batch).compile()
        found[name] = compiled.memory_analysis().temp_size_in_bytes
        print(f"{network} {size}: {name} {found[name] / 2**20:.0f} MiB", flush=True)
    found[SEARCH_ALONE] = found[SEARCH] - tree
    return {
        "parameter_bytes": tree,
        "temporary_bytes": found,
        "ratios": {name: round(x / found[GRADIENT], 4) for name, x in found.items()},
    }


def missed(case, found):
    """The targets that a case misses, in words."""
    ratios = found["ratios"]
    wanted = ((NESTED, 0.65), (SEARCH_ALONE, ratios[FORWARD]))
    return [
        f"{case}: {name} must take at most {most} of one gradient: got {ratios[name]}"
        for name, most in wanted
        if ratios[name] > most
    ]


def main():
    """Parses the command line, measures, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--output", type=pathlib.Path, help="keeps its other cases")
    options = parser.parse_args()
    cases = {case: measure(*case.split(", ")) for case in options.cases}
    kept = {}
    if options.output and options.output.exists():
        kept = json.loads(options.output.read_text())["cases"]
    report = {
        "environment": benchmark_record.environment(),
        "settings": {"sizes": SIZES, "chunk_length": CHUNK_LENGTH},
        "cases": {case: (kept | cases)[case] for case in CASES if case in kept | cases},
    }
    print(json.dumps({case: x["ratios"] for case, x in cases.items()}, indent=1))
    benchmark_record.write(report, options.output)
    sys.exit("\n".join(x for case in cases for x in missed(case, cases[case])) or 0)


if __name__ == "__main__":
    main()
