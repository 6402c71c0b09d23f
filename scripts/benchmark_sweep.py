"""What a sweep over five checkpoints costs, against single runs of them.

    python scripts/benchmark_sweep.py [--output docs/benchmarks/sweep_cpu.json]

The quickstart's model and measurements: five checkpoints of a short training, measured by
one sweep and the last one by a run of its own, each in a new process without a
compilation cache. "Measurements" are the seconds that the results name: the checks and
measurements of a step, compilation included where it compiles. The sweep's last step
compiles nothing: five times its measurements are the least that five checkpoints cost.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import benchmark_record

STANDALONE = "t5x_fwdloss/configs/standalone"
NUM_CHECKPOINTS, PERIOD = 5, 20


def command(script, run_file, **macros):
    """Runs a command of the standalone host in a new process; its wall time."""
    bindings = [f"--gin.{name}={value!r}" for name, value in macros.items()]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "JAX_COMPILATION_CACHE_DIR"
    }
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-m",
            f"t5x_fwdloss.standalone.{script}",
            f"--gin_file={STANDALONE}/{run_file}",
            f"--gin_file={STANDALONE}/tiny.gin",
            *bindings,
        ],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def seconds(folder):
    """The seconds of the checks and measurements in a folder of results."""
    return json.loads((folder / "results.json").read_text())["seconds"]


def main():
    """Parses the command line, measures, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()
    environment = benchmark_record.environment()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        last = NUM_CHECKPOINTS * PERIOD
        command(
            "train",
            "train.gin",
            MODEL_DIR=f"{path}/model",
            TRAIN_STEPS=last,
            CHECKPOINT_PERIOD=PERIOD,
            EVAL_PERIOD=last,
            KEEP_CHECKPOINTS=NUM_CHECKPOINTS,
        )
        sweep = command(
            "analyze",
            "analyze.gin",
            CHECKPOINT_PATH=f"{path}/model",
            CHECKPOINT_STEPS="all",
            ANALYSIS_OUTPUT_DIR=f"{path}/sweep",
        )
        single = command(
            "analyze",
            "analyze.gin",
            CHECKPOINT_PATH=f"{path}/model/checkpoint_{last}",
            ANALYSIS_OUTPUT_DIR=f"{path}/single",
        )
        of_steps = [
            seconds(path / "sweep" / f"step_{step}")
            for step in range(PERIOD, last + 1, PERIOD)
        ]
        of_single = seconds(path / "single")
    report = {
        "environment": environment,
        "num_checkpoints": NUM_CHECKPOINTS,
        "seconds_of_the_sweep": sweep,
        "seconds_of_a_single_run": single,
        "measurements_of_each_step": of_steps,
        "measurements_of_a_single_run": of_single,
        "sweep_over_five_single_runs": sweep / (NUM_CHECKPOINTS * single),
        "measurements_over_five_of_a_single_run": sum(of_steps)
        / (NUM_CHECKPOINTS * of_single),
        "measurements_over_five_of_a_step_that_compiles_nothing": sum(of_steps)
        / (NUM_CHECKPOINTS * of_steps[-1]),
        "sweep_over_five_of_a_step_that_compiles_nothing": sweep
        / (NUM_CHECKPOINTS * of_steps[-1]),
    }
    for name, value in report.items():
        print(f"{name}: {value}")
    benchmark_record.write(report, options.output)


if __name__ == "__main__":
    main()
