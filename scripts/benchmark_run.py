"""What a whole analysis run costs: start-up, compilations, products, memory.

    python scripts/benchmark_run.py [--vocabulary 384] [--num_batches 1] [--output FILE]

`Eigenpairs(num_largest=5)` on the T5 of `benchmark_curvature.py`, trained for some steps
so that its spectrum is one of a network; parameters and batches are in memory. Start-up
ends where the measurement begins. Memory is the peak of the process's resident set.
"""

import argparse
import logging
import pathlib
import resource
import tempfile
import time

import benchmark_curvature
import benchmark_record
import jax

from t5x_fwdloss.analysis import Eigenpairs, Objective, run_analysis

COMPILATION = "/jax/core/compile/backend_compile_duration"
TRACING = "/jax/core/compile/jaxpr_trace_duration"


class Timed(Eigenpairs):
    """Eigenpairs that note when they begin."""

    def run(self, context):
        """Measures, as always."""
        began.append(time.perf_counter())
        seen.append(dict(spent))
        return super().run(context)


began, seen = [], []
spent = {COMPILATION: 0.0, TRACING: 0.0, "compilations": 0}


def listen(name, seconds, **_):
    """Adds up what compilations take."""
    if name in spent:
        spent[name] += seconds
        spent["compilations"] += name == COMPILATION


def trained(model, params, batch, num_steps):
    """Parameters after some steps of gradient descent."""
    step = jax.jit(
        lambda p: jax.tree.map(
            lambda x, g: x - 0.3 * g / batch["decoder_loss_weights"].sum(),
            p,
            jax.grad(lambda p: model.loss_sum(p, batch)[0])(p),
        )
    )
    for _ in range(num_steps):
        params = step(params)
    return jax.block_until_ready(params)


def main():
    """Parses the command line, measures, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=384)
    parser.add_argument("--num_batches", type=int, default=1)
    parser.add_argument("--train_steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    model, params, batch = benchmark_curvature.small_t5(options.vocabulary)
    params = trained(model, params, batch, options.train_steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    objective = Objective.from_model(model, [batch] * options.num_batches)
    measurement = Timed(num_largest=5, num_smallest=0, tolerance=options.tolerance)
    with tempfile.TemporaryDirectory() as folder:
        status = run_analysis(
            objective,
            params,
            measurements=[measurement],
            output_dir=str(pathlib.Path(folder) / "run"),
        )
    total = time.perf_counter() - start
    (first,) = began
    report = {
        "environment": benchmark_record.environment(),
        "vocabulary": options.vocabulary,
        "num_batches": options.num_batches,
        "status": status,
        "seconds": total,
        "seconds_before_the_measurement": first - start,
        "compilations": spent["compilations"],
        "compilations_before_the_measurement": seen[0]["compilations"],
        "seconds_compiling": spent[COMPILATION],
        "seconds_tracing": spent[TRACING],
        "peak_gib_before": before / 2**20,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    for name, value in report.items():
        print(f"{name}: {value}")
    benchmark_record.write(report, options.output)


if __name__ == "__main__":
    main()
