"""The cost of curvature, in units of one gradient: time, memory, Lanczos vector work.

    python scripts/benchmark_curvature.py [--vocabularies 384,32128] [--repeats 15]

A T5 1.1 network of 4 + 4 layers (embedding 256, 4 heads of 64, MLP 512), batch 16 of
64 inputs and 64 targets, float32, random parameters and tokens. Times are medians of
interleaved calls in random order, printed as ratios to the gradient's; memory is the
compiler's own count of temporary and output bytes. `--output` names a JSON file.
"""

import argparse
import pathlib
import random
import statistics
import time

import benchmark_record
import jax
import jax.numpy as jnp
import numpy as np

from t5x_fwdloss import curvature, losses
from t5x_fwdloss.curvature.vectors import trees
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer

Z_LOSS = 1e-4
BATCH, LENGTH = 16, 64
# Batches of the eigenpairs whose vector work is measured.
NUM_BATCHES = 8
# Targets: the largest intended ratios, by vocabulary.
TARGETS = {
    "hessian product, linearized": {384: 2.0, 32128: 1.7},
    "Gauss-Newton product, linearized": {384: 1.3, 32128: 1.3},
    "jvp": {384: 0.55, 32128: 0.55},
}


def small_t5(vocabulary):
    """The model, its parameters and a batch."""
    config = T5Config(
        vocab_size=vocabulary,
        emb_dim=256,
        num_heads=4,
        num_encoder_layers=4,
        num_decoder_layers=4,
        head_dim=64,
        mlp_dim=512,
        dropout_rate=0.0,
    )
    model = StandaloneModel(
        Transformer(config),
        z_loss=Z_LOSS,
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
        loss_impl="custom_jvp",
    )
    rng = np.random.default_rng(0)
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = {
        name: jnp.asarray(rng.integers(1, vocabulary, size=(BATCH, LENGTH)), jnp.int32)
        for name in names
    }
    batch["decoder_loss_weights"] = jnp.ones((BATCH, LENGTH), jnp.float32)
    return model, model.get_initial_params(jax.random.key(0), batch), batch


def problem(vocabulary):
    """The loss, the outputs and their Hessian, parameters and a batch."""
    model, params, batch = small_t5(vocabulary)
    tokens = BATCH * LENGTH

    def loss(params, batch):
        return model.loss_sum(params, batch)[0] / tokens

    def outputs(params, batch):
        return model._compute_logits(params, batch)

    def output_hessian(logits, tangent, batch):
        labels = batch["decoder_target_tokens"]
        product = losses.logit_hessian_product(logits, labels, tangent, z_loss=Z_LOSS)
        return product / tokens

    return loss, outputs, output_hessian, params, batch


def programs(loss, outputs, output_hessian, params, batch, stack):
    """Calls to be timed, by name, and the bytes of their compiled functions."""
    v = curvature.random_like(0, params)
    directions = {
        "jvp": curvature.directional_derivative(loss),
        "hessian product": curvature.hessian_product(loss),
        "Gauss-Newton product": curvature.gauss_newton_product(outputs, output_hessian),
    }
    compiled = {
        name: jax.jit(function).lower(params, v, batch).compile()
        for name, function in directions.items()
    }
    gradient = jax.jit(curvature.gradient(loss)).lower(params, batch).compile()
    linear_hessian = curvature.AmortizedProduct(
        curvature.hessian_map(loss), params, [(batch,)]
    )
    linear_newton = curvature.AmortizedProduct(
        curvature.gauss_newton_map(outputs, output_hessian), params, [(batch,)]
    )
    calls = {
        "gradient": lambda: gradient(params, batch),
        **{
            name: lambda program=program: program(params, v, batch)
            for name, program in compiled.items()
        },
        "hessian product, linearized": lambda: linear_hessian(v),
        "Gauss-Newton product, linearized": lambda: linear_newton(v),
    }
    if stack > 1:
        vs = curvature.random_stack(0, list(range(stack)), params)
        calls[f"{stack} hessian products at once"] = lambda: linear_hessian.stacked(vs)
    memory = {
        name: bytes_of(program)
        for name, program in {"gradient": gradient, **compiled}.items()
    }
    extra = {
        "hessian residuals": linear_hessian.batches[0].residual_bytes,
        "Gauss-Newton residuals": linear_newton.batches[0].residual_bytes,
    }
    return calls, memory, extra


def interleaved(calls, repeats):
    """Seconds of each call: the median of `repeats` rounds through all of them.

    The order is drawn anew in each round: in a fixed order, the call after a large one
    would find cold caches every time.
    """
    order, draw = list(calls.items()), random.Random(0)
    for call in calls.values():
        jax.block_until_ready(call())
    times = {name: [] for name in calls}
    for _ in range(repeats):
        draw.shuffle(order)
        for name, call in order:
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def bytes_of(program):
    """Temporary and output bytes of a compiled function."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def vector_work(loss, params, batch, num_steps):
    """Time of an eigenpairs run outside of its products, relative to theirs.

    Over `NUM_BATCHES` batches, with as many pairs and as large a basis as by default.
    """
    spent = [0.0]
    matvec = curvature.AmortizedProduct(
        curvature.hessian_map(loss), params, [(batch,)] * NUM_BATCHES
    )

    def timed(v):
        jax.block_until_ready(v)
        start = time.perf_counter()
        result = jax.block_until_ready(matvec(v))
        spent[0] += time.perf_counter() - start
        return result

    start_vector = curvature.random_like(1, params)
    # Compiles everything: a restart, and the residuals at the end.
    short = {"num_largest": 1, "num_smallest": 0, "max_basis": 6, "tolerance": 1e-6}
    curvature.eigenpairs(matvec, start_vector, max_steps=8, **short)
    states, spent[0] = [], 0.0
    start = time.perf_counter()
    result = curvature.eigenpairs(
        timed,
        start_vector,
        num_largest=5,
        num_smallest=2,
        max_steps=num_steps,
        tolerance=1e-6,
        on_step=states.append,
    )
    jax.block_until_ready(result.eigenvectors)
    total = time.perf_counter() - start
    gram = states[-1].space.basis.gram()
    return {
        "steps": num_steps,
        "batches": NUM_BATCHES,
        "restarts": result.num_restarts,
        "basis": len(gram),
        "products_seconds": spent[0],
        "vector_seconds": total - spent[0],
        "vector_over_products": (total - spent[0]) / spent[0],
        "orthogonality": float(np.abs(gram - np.eye(len(gram))).max()),
    }


def measure(vocabulary, repeats, stack, num_steps):
    """All numbers of one vocabulary."""
    loss, outputs, output_hessian, params, batch = problem(vocabulary)
    calls, memory, extra = programs(loss, outputs, output_hessian, params, batch, stack)
    seconds = interleaved(calls, repeats)
    rows = {}
    print(f"\nvocabulary {vocabulary}, {trees.dimension(params)} parameters")
    for name, value in seconds.items():
        ratio = value / seconds["gradient"]
        target = TARGETS.get(name, {}).get(vocabulary)
        space = memory[name] / memory["gradient"] if name in memory else None
        rows[name] = {"seconds": value, "time": ratio, "memory": space}
        print(
            f"  {name:36s} {1e3 * value:8.1f} ms  time {ratio:5.2f}"
            + (f" (at most {target})" if target else "")
            + (f"  memory {space:5.2f}" if space else "")
        )
    del calls  # and with them the residuals that the products keep
    work = vector_work(loss, params, batch, num_steps)
    print(
        f"  vector work of {num_steps} steps of eigenpairs, {NUM_BATCHES} batches: "
        f"{100 * work['vector_over_products']:.1f} % of the products (at most 8 %), "
        f"orthogonality {work['orthogonality']:.1e}"
    )
    return {
        "vocabulary": vocabulary,
        "parameters": trees.dimension(params),
        "rows": rows,
        "memory_bytes": memory | extra,
        "lanczos": work,
    }


def main():
    """Parses the command line, measures, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", default="384,32128")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--stack", type=int, default=1, help="vectors in one product")
    parser.add_argument("--steps", type=int, default=40, help="steps of eigenpairs")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    results = {
        "environment": benchmark_record.environment(),
        "problems": [
            measure(int(size), options.repeats, options.stack, options.steps)
            for size in options.vocabularies.split(",")
        ],
    }
    benchmark_record.write(results, options.output)


if __name__ == "__main__":
    main()
