"""How often the float32 value lies within the error of a number from bfloat16.

    python scripts/measure_rounding.py [--shape small] [--seeds 20] [--output FILE]

A T5 1.1 of the given shape with random parameters and tokens is measured twice with the
same seeds: with its activations in bfloat16, and in float32. For slopes and curvatures
each seed is one random direction; for eigenvalues and traces each seed is a run of its
own, with its own parameters, four eigenvalues and four traces by different probes.
Counts and the ratio of the error to the actual deviation are printed; `--output` names
a JSON file, written anew after each run. `--kinds` measures some of the numbers only;
the others that the file has, by the same settings, are kept.
"""

import argparse
import json
import pathlib
import tempfile
import time

import benchmark_record
import jax
import numpy as np

from t5x_fwdloss import analysis
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer

# Vocabulary, width, heads, width of a head, MLP, layers of encoder and decoder each.
SHAPES = {
    "tiny": (384, 64, 4, 16, 128, 2),
    "half": (8064, 256, 4, 64, 512, 4),
    "small": (32128, 512, 6, 64, 1024, 8),  # t5_1_1/small.gin
}
TYPES = ("bfloat16", "float32")
KINDS = ("directions", "eigenvalues", "traces")
TRACES = tuple(f"trace_{i}" for i in range(4))


def model(shape, dtype):
    """The network of a shape, with the loss of T5's own configuration."""
    vocabulary, width, heads, head, mlp, layers = SHAPES[shape]
    config = T5Config(
        vocab_size=vocabulary,
        dtype=dtype,
        emb_dim=width,
        num_heads=heads,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        head_dim=head,
        mlp_dim=mlp,
        dropout_rate=0.0,
    )
    return StandaloneModel(Transformer(config), loss_impl="custom_jvp", z_loss=1e-4)


def tokens(shape, batch, length, seed):
    """One batch of random tokens."""
    rng = np.random.default_rng(seed)
    inputs, targets = rng.integers(1, SHAPES[shape][0], (2, batch, length), np.int32)
    return {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": np.ones((batch, length), np.float32),
    }


def measure(args, dtype, seed, measurements):
    """The numbers of one run, by measurement and name."""
    network = model(args.shape, dtype)
    batch = tokens(args.shape, args.batch, args.length, seed)
    params = model(args.shape, "float32").get_initial_params(
        jax.random.key(seed), batch
    )
    objective = analysis.Objective.from_model(network, [batch])
    with tempfile.TemporaryDirectory() as folder:
        analysis.run_analysis(
            objective,
            params,
            measurements=measurements,
            output_dir=folder,
            seed=seed,
            memory_budget=0,
        )
        document = json.loads((pathlib.Path(folder) / "results.json").read_text())
    return {
        f"{found['name']}/{name}": number
        for found in document["measurements"]
        for name, number in found["results"].items()
    }


def compared(pairs):
    """How many lie within the error, and the error's ratio to the deviation."""
    change = np.asarray([abs(x["value"] - y["value"]) for x, y in pairs])
    error = np.asarray([x["error"] for x, _ in pairs])
    value = np.asarray([abs(y["value"]) for _, y in pairs])
    return {
        "count": len(change),
        "within": int((change <= error).sum()),
        "median_error_over_deviation": round(float(np.median(error / change)), 2),
        "median_relative_deviation": float(f"{np.median(change / value):.2g}"),
    }


def main():
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--spectrum_seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--probes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args()
    start = time.monotonic()
    report = {"environment": benchmark_record.environment(), "numbers": {}}
    own = ("output", "kinds")
    report["settings"] = {k: v for k, v in vars(args).items() if k not in own}
    kept = {}
    if args.output and args.output.exists():
        before = json.loads(args.output.read_text())
        kept = before["numbers"] if before["settings"] == report["settings"] else {}
    directions = analysis.DirectionalDerivatives(num_random=args.seeds, num_points=0)
    eigenvalues = analysis.Eigenpairs(
        num_largest=3, num_smallest=1, max_steps=args.steps, tolerance=0.01
    )
    traces = [
        analysis.Trace(name=name, num_probes=args.probes, block_size=1)
        for name in TRACES
    ]
    spectrum = [eigenvalues] * ("eigenvalues" in args.kinds)
    spectrum += traces * ("traces" in args.kinds)
    pairs = []
    for seed in range(args.spectrum_seeds):
        with_directions = seed == 0 and "directions" in args.kinds
        wanted = spectrum + [directions] * with_directions
        pairs.append([measure(args, dtype, seed, wanted) for dtype in TYPES])
        report["numbers"] = kept | summary(pairs, args.seeds)
        report["seconds"] = round(time.monotonic() - start)
        benchmark_record.write(report, args.output)
    print(json.dumps(report, indent=1))


def summary(runs, num_directions):
    """`compared` for each kind of number, over all pairs of runs so far."""
    groups = {
        f"{quantity} along random directions": [
            tuple(run[f"directional_derivatives/random_{i}/{quantity}"] for run in pair)
            for pair in runs[:1]
            if "directional_derivatives/random_0/slope" in pair[0]
            for i in range(num_directions)
        ]
        for quantity in ("slope", "curvature")
    }
    names = [f"largest_{i + 1}" for i in range(3)] + ["smallest_1"]
    groups["eigenvalues"] = [
        tuple(run[f"hessian_eigenpairs/{name}"] for run in pair)
        for pair in runs
        for name in names
        if f"hessian_eigenpairs/{name}" in pair[0]
    ]
    groups["traces, same probes"] = [
        tuple(run[f"{name}/trace"] for run in pair)
        for pair in runs
        for name in TRACES
        if f"{name}/trace" in pair[0]
    ]
    return {name: compared(pairs) for name, pairs in groups.items() if pairs}


if __name__ == "__main__":
    main()
