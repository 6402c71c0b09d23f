"""Writes the tables of README.md from the JSON files in docs/benchmarks/.

    python scripts/readme_tables.py            # writes README.md
    python scripts/readme_tables.py --check    # fails if README.md says something else

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function here.
"""

import json
import pathlib
import re
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
    "probe_memory": probe_memory,
    "V32128": lambda: losses("V32128"),
    "V250112": lambda: losses("V250112"),
    "train_step": train_step,
    "curvature": curvature,
    "forward_memory": forward_memory,
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
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = rewritten(old)
    if "--check" in arguments:
        if new != old:
            print("README.md differs from docs/benchmarks; run this script.")
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
