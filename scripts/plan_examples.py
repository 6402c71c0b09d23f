"""Plans the example configurations of T5 1.1, and writes what the plans say.

    python scripts/plan_examples.py --output=docs/benchmarks/plan.json

Each plan is a process of its own, one after the other: its time includes the imports.
"""

import argparse
import json
import pathlib
import re
import resource
import subprocess
import sys
import time

import benchmark_record

FLAGS = (
    "--plan",
    "--gin.DEVICE_TFLOPS=100",
    "--gin.CHECKPOINT_PATH='/my/model/checkpoint_1000'",
    "--gin.ANALYSIS_OUTPUT_DIR='/my/analysis'",
    "--gin.MIXTURE_OR_TASK_NAME='my_task'",
)
# As in the example, but for the settings that make it fit.
WHOLE = ("--gin.NUM_MICROBATCHES=1", "--gin.DEVICE_MEMORY_GB=None")
# Name, file, number of devices, further flags.
EXAMPLES = (
    ("base, 64 devices", "t5_1_1_base_64", 64, ()),
    ("XL, 64 devices", "t5_1_1_xl_64", 64, ()),
    ("XXL, 64 devices", "t5_1_1_xxl_64", 64, ()),
    ("XXL, 64 devices, whole batches", "t5_1_1_xxl_64", 64, WHOLE),
    ("XXL, 256 devices", "t5_1_1_xxl_256", 256, ()),
)


def planned(name: str, file: str, devices: int, flags: tuple[str, ...]) -> dict:
    """The plan of one example, with the time that it took."""
    command = [
        *(sys.executable, "-m", "t5x_fwdloss.analyze"),
        f"--gin_file=t5x_fwdloss/configs/examples/{file}.gin",
        *FLAGS,
        f"--gin.PLAN_DEVICES={devices}",
        *flags,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    compiling = re.search(r"from shapes: ([0-9.]+) s", done.stderr)
    return {
        "name": name,
        "config": f"{file}.gin",
        "flags": list(flags),
        "status": done.returncode,
        "plan": done.stdout.splitlines(),
        "rejected": done.stderr.splitlines()[-1] if done.returncode else "",
        "seconds": round(seconds, 1),
        "seconds_compiling": float(compiling[1]) if compiling else None,
        "processor_seconds": round(after.ru_utime - before.ru_utime, 1),
    }


def main():
    """Plan all examples, or those named, and write the JSON file after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--only", action="append", help="names of examples")
    values = parser.parse_args()
    found, environment = {}, benchmark_record.environment()
    if values.output.exists():
        document = json.loads(values.output.read_text(encoding="utf-8"))
        found = {entry["name"]: entry for entry in document["examples"]}
    for name, *example in EXAMPLES:
        if values.only and name not in values.only:
            continue
        found[name] = planned(name, *example)
        print(name, found[name]["status"], *found[name]["plan"], sep="\n")
        report = {"environment": environment, "examples": list(found.values())}
        benchmark_record.write(report, values.output)


if __name__ == "__main__":
    main()
