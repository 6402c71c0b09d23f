"""Writes the tables of README.md and docs/*.md from the JSON files in docs/benchmarks/.

    python scripts/readme_tables.py            # writes the pages
    python scripts/readme_tables.py --check    # fails if a page says something else

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function here.
"""

import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODES = {
    "value_and_grad": "value and gradient",
    "jvp": "jvp",
    "jvp_of_grad": "jvp(grad)",
}


def losses(shape: str, file: str = "loss_cpu.json") -> str:
    """Memory of every loss at one shape, float32 hidden states.

    The file has times, too; from machine to machine they differ by a factor of two.
    """
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    batch, length, embed, vocab = report["settings"]["shapes"][shape]
    rows = [r for r in report["rows"] if (r["shape"], r["dtype"]) == (shape, "float32")]
    where = f"{report['environment']['device']}, jax {report['environment']['jax']}"
    lines = [
        f"Batch {batch}, length {length}, width {embed}, vocabulary {vocab} ({where}):",
        "",
        "| loss | " + " | ".join(MODES.values()) + " |",
        "|---" * (len(MODES) + 1) + "|",
    ]
    for row in rows:
        cells = [_cell(row["memory"][m]) for m in MODES]
        lines.append(f"| {row['loss']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(memory):
    return "fails" if isinstance(memory, str) else f"{memory:.2f}"


def train_step(file: str = "loss_cpu.json") -> str:
    """Memory of a whole T5X train step under each loss."""
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    lines = ["| loss | temporary memory |", "|---|---|"]
    lines += [
        f"| {name} | {row['temporary_bytes'] / 2**20:.0f} MiB |"
        for name, row in report["train_step"].items()
    ]
    return "\n".join(lines)


def curvature(file: str = "curvature_cpu.json") -> str:
    """The cost of products, in units of one gradient, at each vocabulary."""
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    problems = report["problems"]
    heads = [f"vocabulary {problem['vocabulary']}" for problem in problems]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in problems[0]["rows"]:
        times = [f"{problem['rows'][name]['time']:.2f}" for problem in problems]
        lines.append(f"| {name} | " + " | ".join(times) + " |")
    work = [100 * problem["lanczos"]["vector_over_products"] for problem in problems]
    run = problems[0]["lanczos"]
    lines.append(
        f"| vector work of {run['steps']} steps of eigenpairs on {run['batches']} "
        "batches, over that of their products | "
        + " | ".join(f"{x:.0f} %" for x in work)
        + " |"
    )
    return "\n".join(lines)


def plans(file: str = "plan.json") -> str:
    """The largest memory of the example plans, and the time that they took."""
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    lines = ["| T5 1.1 | file | most per device | compiled in |", "|---|---|---|---|"]
    for entry in report["examples"]:
        most = re.search(r"At most ([0-9.]+ \w+)", entry["plan"][-1])
        flags = [x.removeprefix("--gin.") for x in entry["flags"]]
        lines.append(
            f"| {entry['name']} | `{' '.join([entry['config'], *flags[:1]])}` "
            f"| {most[1] if most else 'rejected'} "
            f"| {entry['seconds_compiling']:.0f} s |"
        )
    return "\n".join(lines)


def forward_memory(file: str = "forward_memory_cpu.json") -> str:
    """Temporary memory of a T5X train step of t5_1_1 base, by reverse and forward mode."""
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    lines = [
        "| step of t5_1_1 base | parameters that move | temporary memory | to T5X's own |",
        "|---" * 4 + "|",
    ]
    lines += [
        f"| {name} | {row['moving_parameters']:,} "
        f"| {row['temporary_bytes'] / 2**20:.0f} MiB | {row['ratio']:.2f} |"
        for name, row in report["steps"].items()
    ]
    return "\n".join(lines)


def forward_gradient(file: str = "forward_gradient.json") -> str:
    """Validation losses of a shifted task, tuned by reverse mode and forward gradients."""
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    settings = report["settings"]
    lines = [
        f"{settings['moving_parameters']:,} parameters, {settings['steps']} steps, "
        f"{settings['directions']} directions per step:",
        "",
        "| cmudict_g2p without stress digits | validation loss |",
        "|---|---|",
        f"| before | {report['loss']['shifted task, before']:.3f} |",
    ]
    lines += [
        f"| {name} | {report[name]['loss']:.3f} |"
        for name in ("reverse mode", "forward gradient")
    ]
    share = f"The forward gradient gains {100 * report['share']:.0f} % of reverse mode."
    return "\n".join([*lines, "", share])


def probe_cost(file: str = "probes_cpu.json") -> str:
    """What a probe of training costs, in one sentence."""
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    settings, environment = report["settings"], report["environment"]
    return (
        f"With the settings of `{settings['gin_files'][0]}` on {environment['processors']} "
        f"{environment['device']} cores, probing every {settings['period']} steps cost "
        f"{100 * report['median_cost']:.1f} % of the time of training (median of "
        f"{settings['pairs']} pairs of {settings['period']} steps with and without a "
        f"probe, in one run), and {report['compilation_seconds']:.0f} seconds of "
        "compilation at the first probe."
    )


def sweep_cost(file: str = "sweep_cpu.json") -> str:
    """What a sweep costs beside its measurements and beside single runs, in words."""
    report = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())
    environment, count = report["environment"], report["num_checkpoints"]
    return (
        f"On {environment['processors']} {environment['device']} cores a sweep over "
        f"{count} checkpoints of the quickstart's training took "
        f"{report['seconds_of_the_sweep']:.0f} seconds, start and compilation included: "
        f"{report['sweep_over_five_of_a_step_that_compiles_nothing']:.2f} times the "
        f"measurements of {count} checkpoints that compile nothing, and "
        f"{100 * report['sweep_over_five_single_runs']:.0f} % of the time of {count} "
        "single runs (`scripts/benchmark_sweep.py`)."
    )


def edge_of_stability(file: str = "edge_of_stability.json") -> str:
    """The sharpness at the start and the end of each run of gradient descent."""
    runs = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())["runs"]
    heads = [f"learning rate {run['learning_rate']}" for run in runs]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    largest, mean = "largest_eigenvalue", "largest_eigenvalue_at_mean"
    rows = {
        "largest eigenvalue at the start": lambda run, unit: run[largest][0] / unit,
        "first step at which it is 1 or more": lambda run, unit: next(
            step
            for step, found in zip(run["step"], run[largest], strict=True)
            if found >= unit
        ),
        "largest eigenvalue at the steps": lambda run, unit: _end(run[largest]) / unit,
        "at the mean of two successive steps": lambda run, unit: _end(run[mean]) / unit,
        "critical sharpness": lambda run, unit: _end(run["critical_sharpness"]) / unit,
    }
    for name, value in rows.items():
        found = [value(run, 2 / run["learning_rate"]) for run in runs]
        cells = [f"{x:.2f}" if isinstance(x, float) else str(x) for x in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def edge_of_adaptive(file: str = "edge_of_stability_adaptive.json") -> str:
    """Eigenvalues of Adam's and Adafactor's runs, in units of their thresholds."""
    runs = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())["runs"]
    heads = [f"{run['optimizer']}, {run['learning_rate']}" for run in runs]
    lines = ["| learning rate | " + " | ".join(heads) + " |"]
    lines.append("|---" * (len(heads) + 1) + "|")
    ratio = "largest_preconditioned_eigenvalue"
    rows = {
        "threshold": lambda run: f"{run['threshold']:,.0f}",
        "largest eigenvalue of P H over the threshold": lambda run: _settled(
            run[ratio], run["threshold"]
        ),
        "largest eigenvalue of H over 2/η": lambda run: _settled(
            run["largest_eigenvalue"], 2 / run["learning_rate"]
        ),
    }
    for name, cell in rows.items():
        lines.append(f"| {name} | " + " | ".join(map(cell, runs)) + " |")
    return "\n".join(lines)


def _settled(numbers, unit):
    """Median and quartiles of the last two thirds, in a unit."""
    last = [x / unit for x in numbers[len(numbers) // 3 :]]
    low, middle, high = statistics.quantiles(last, n=4, method="inclusive")
    return f"{middle:.2g} ({low:.2g} to {high:.2g})"


def _end(numbers):
    """Median of the last third, without those that were not found."""
    last = numbers[len(numbers) * 2 // 3 :]
    return statistics.median(x for x in last if x is not None)


def probe_memory(file: str = "training_memory_cpu.json") -> str:
    """Memory of a probe of training and of its parts, beside one gradient's."""
    cases = json.loads((ROOT / "docs" / "benchmarks" / file).read_text())["cases"]
    sizes = {case: found["temporary_bytes"] for case, found in cases.items()}
    lines = ["| | " + " | ".join(cases) + " |", "|---" * (len(cases) + 1) + "|"]
    trees = [f"{found['parameter_bytes'] / 2**20:.0f} MiB" for found in cases.values()]
    lines.append("| parameters | " + " | ".join(trees) + " |")
    for name in next(iter(sizes.values())):
        cells = [
            f"{found[name] / 2**20:.0f} MiB ({cases[case]['ratios'][name]:.2f})"
            for case, found in sizes.items()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = {
    "edge_of_stability": edge_of_stability,
    "edge_of_adaptive": edge_of_adaptive,
    "probe_cost": probe_cost,
    "probe_memory": probe_memory,
    "sweep_cost": sweep_cost,
    "V32128": lambda: losses("V32128"),
    "V250112": lambda: losses("V250112"),
    "train_step": train_step,
    "curvature": curvature,
    "forward_memory": forward_memory,
    "plans": plans,
    "forward_gradient": forward_gradient,
}


def rewritten(text: str) -> str:
    """The text with every table rewritten."""

    def table(match):
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[4]}"

    pattern = r"(<!-- table: (\w+) -->)(.*?)(<!-- end -->)"
    return re.sub(pattern, table, text, flags=re.S)


def main(arguments: list[str]) -> int:
    """Exit status of the command line."""
    differ = False
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = path.read_text(encoding="utf-8")
        new = rewritten(old)
        if "--check" not in arguments:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            print(
                f"{path.relative_to(ROOT)} differs from docs/benchmarks; run this script."
            )
            differ = True
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
