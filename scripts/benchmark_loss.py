"""Memory and time of every loss, beside T5X's own, at real vocabularies.

    python scripts/benchmark_loss.py --device=cpu --output=docs/benchmarks/loss_cpu.json

For each shape and dtype of the hidden states: T5X's loss (where T5X can be imported),
the three implementations, and the chunked head, under value and gradient, jvp, and
jvp(grad), all with respect to hidden states and head, with label smoothing and z-loss.

* Memory: the compiled function's temporary buffers, in units of one float32 logits
  array `[batch, length, vocab]`. Nothing is run.
* Time: a ratio to T5X's value and gradient (ours with `custom_vjp`, the same
  arithmetic, without T5X). Each pair has a process of its own, in which both functions
  take turns; the ratio is that of the medians. `cpu` is the same for processor time,
  which a busy machine affects less. `--time_length` shortens the sequences that are
  timed, `--time_derivatives` names the losses whose jvp and jvp(grad) are timed too.
* `--train_step`: a whole T5X train step of t5_1_1 small shapes, stock against chunked
  (see `benchmark_train_step.py`).
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import time

SHAPES = {  # batch, length, embed, vocab
    "V32128": (8, 512, 512, 32128),
    "V250112": (4, 128, 256, 250112),
}
CHUNK_LENGTHS = (8, 16, 32, 64, 128)
LOSSES = (
    "t5x",
    "custom_vjp",
    "autodiff",
    "custom_jvp",
    *(f"chunk {length}" for length in CHUNK_LENGTHS),
)
MODES = ("value_and_grad", "jvp", "jvp_of_grad")
SETTINGS = (0.1, 1e-4, 3.0)  # label smoothing, z-loss, normalizing factor


def loss_function(name):
    """The loss of (hidden, head, targets, weights), by its name in `LOSSES`."""
    import jax.numpy as jnp

    from t5x_fwdloss import losses

    if name.startswith("chunk"):
        chunked = functools.partial(
            losses.chunked_weighted_cross_entropy,
            chunk_length=int(name.split()[1]),
            impl="custom_jvp",
        )
        return lambda h, w, y, m: chunked(h, w, y, m, *SETTINGS).loss
    if name == "t5x":
        from t5x import losses as t5x_losses

        compute = t5x_losses.compute_weighted_cross_entropy
    else:
        compute = functools.partial(losses.compute_weighted_cross_entropy, impl=name)

    def loss(hidden, head, targets, weights):
        logits = jnp.einsum("bld,dv->blv", hidden.astype(jnp.float32), head)
        return compute(logits, targets, weights, *SETTINGS)[0]

    return loss


def derivative(name, mode):
    """The measured function of x, v (hidden, head), targets, weights."""
    import jax

    loss = loss_function(name)

    def program(x, v, targets, weights):
        f = lambda *x: loss(*x, targets, weights)
        if mode == "value_and_grad":
            return jax.value_and_grad(f, (0, 1))(*x)
        if mode == "jvp":
            return jax.jvp(f, x, v)
        return jax.jvp(jax.grad(f, (0, 1)), x, v)[1]

    return jax.jit(program)


def arrays(shape, dtype, length=None):
    """Random arguments of the function."""
    import jax

    batch, full_length, embed, vocab = SHAPES[shape]
    size = (batch, length or full_length)
    keys = jax.random.split(jax.random.key(0), 5)
    draw = lambda k, *s: jax.random.normal(k, s)
    x, v = (
        (draw(k0, *size, embed).astype(dtype), draw(k1, embed, vocab) * embed**-0.5)
        for k0, k1 in (keys[:2], keys[2:4])
    )
    targets = jax.random.randint(keys[4], size, 0, vocab)
    return x, v, targets, jax.numpy.ones(size)


def memory(shape, dtype, name, mode):
    """Temporary memory in float32 logits arrays, or the error's name."""
    import jax

    batch, length, _, vocab = SHAPES[shape]
    like = jax.eval_shape(lambda: arrays(shape, dtype))
    try:
        compiled = derivative(name, mode).lower(*like).compile()
    except (TypeError, NotImplementedError) as error:
        return f"fails: {type(error).__name__}"
    unit = 4 * batch * length * vocab
    return round(compiled.memory_analysis().temp_size_in_bytes / unit, 4)


def timed_pair(shape, dtype, name, mode, *, reference, repeats, length):
    """Medians of interleaved runs of the reference's gradient and of the derivative."""
    import jax
    import numpy as np

    args = arrays(shape, dtype, length)
    pair = [derivative(reference, "value_and_grad"), derivative(name, mode)]
    pair = [program.lower(*args).compile() for program in pair]
    times = np.zeros((2, repeats + 1, 2))
    for repeat in range(repeats + 1):
        for i, program in enumerate(pair):
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*args))
            end = time.perf_counter(), time.process_time()
            times[i, repeat] = np.subtract(end, start)
    base, own = np.median(times[:, 1:], axis=1)  # the first run warms up
    return {
        "ratio": round(float(own[0] / base[0]), 3),
        "cpu": round(float(own[1] / base[1]), 3),
        "reference_seconds": round(float(base[0]), 4),
    }


def has_t5x():
    """Whether T5X's own loss can be measured."""
    import importlib.util

    return importlib.util.find_spec("t5x") is not None


def in_process(pair, options):
    """Times of one pair, from a process of its own."""
    request = json.dumps([*pair, options.repeats, options.time_length])
    command = [sys.executable, __file__, f"--device={options.device}"]
    finished = subprocess.run(
        [*command, f"--request={request}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        return {"failed": finished.stderr.strip().splitlines()[-1]}
    return json.loads(finished.stdout.strip().splitlines()[-1])


def measure(options):
    """All requested numbers, printed as they come."""
    names = [n for n in LOSSES if n != "t5x" or has_t5x()]
    reference = names[0]
    results = []
    for shape in options.shapes:
        for dtype in options.dtypes:
            for name in names:
                row = {"shape": shape, "dtype": dtype, "loss": name}
                row["memory"] = {m: memory(shape, dtype, name, m) for m in MODES}
                pairs = modes_to_time(name, dtype, options)
                row["time"] = {
                    mode: in_process([shape, dtype, name, mode, reference], options)
                    for mode in pairs
                    if not isinstance(row["memory"][mode], str)
                }
                results.append(row)
                print(format_row(row), flush=True)
    return {"reference": reference, "rows": results}


def modes_to_time(name, dtype, options):
    """The derivatives of a loss that are timed."""
    if name not in options.time_losses or dtype not in options.time_dtypes:
        return []
    return MODES if name in options.time_derivatives else MODES[:1]


def format_row(row):
    """One line of the table."""
    cells = [f"{row['shape']:8} {row['dtype']:9} {row['loss']:11}"]
    for mode in MODES:
        spent = row["time"].get(mode, {})
        ratio = f" (time {spent.get('ratio', spent)})" if spent else ""
        cells.append(f"{mode} {row['memory'][mode]}{ratio}")
    return "  ".join(cells)


def parse_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, gpu or tpu")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--time_losses", nargs="*", default=list(LOSSES[1:]))
    parser.add_argument("--time_derivatives", nargs="*", default=list(LOSSES[1:]))
    parser.add_argument("--time_dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--time_length", type=int, help="default: the shape's length")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--train_step", action="store_true")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    """Measures, prints and writes."""
    options = parse_arguments()
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(options.device, options.device)
    if options.request:
        *what, reference, repeats, length = json.loads(options.request)
        answer = timed_pair(*what, reference=reference, repeats=repeats, length=length)
        print(json.dumps(answer))
        return
    import benchmark_record

    report = {
        "environment": benchmark_record.environment(),
        "settings": {
            "shapes": SHAPES,
            "repeats": options.repeats,
            "time_length": options.time_length,
        },
        **measure(options),
    }
    if options.train_step:
        import benchmark_train_step

        report["train_step"] = benchmark_train_step.measure(options.repeats)
    benchmark_record.write(report, options.output)


if __name__ == "__main__":
    main()
