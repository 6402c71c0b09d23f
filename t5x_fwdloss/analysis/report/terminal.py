"""The numbers of a run as a table for the terminal."""

import io
import math
import sys
from collections.abc import Sequence
from typing import Any

from t5x_fwdloss.analysis.numbers import MeasurementResult, Number

DASH = "\N{EN DASH}"
# For terminals without these characters.
PLAIN = {"\N{PLUS-MINUS SIGN}": "+-", DASH: "-", "θ": "theta", "²": "^2"}


def print_table(
    document: dict[str, Any],
    results: Sequence[MeasurementResult],
    report_path: Any,
    stream: Any = None,
) -> None:
    """Print every number with its error, and the report's path.

    Args:
        document: the content of `results.json`.
        results: the finished measurements.
        report_path: path of the report.
        stream: the output stream; standard output by default.
    """
    lines = [f"Loss: {document['normalizer']['words']}."]
    outside = document.get("num_labels_outside_vocabulary")
    if outside:
        lines.append(f"{outside} labels are outside of the network's vocabulary.")
    for result in results:
        rows = [
            (name, format_value(x), format_error(x), x.unit, _state(x))
            for name, x in result.numbers.items()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines += ["", f"{result.name} ({result.seconds:.1f} s)"]
        for row in rows:
            cells = [
                row[0].ljust(widths[0]),
                row[1].rjust(widths[1]),
                row[2].ljust(widths[2]),
                row[3].ljust(widths[3]),
                row[4],
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        lines += [f"  {note}" for note in result.notes]
    for entry in document["measurements"]:
        if entry["status"] == "failed":
            lines += ["", f"{entry['name']} FAILED: {entry['reason']}"]
    lines += ["", f"Report: {report_path}"]
    print_line("\n".join(lines), stream)


def encodable(text: str, encoding: str | None) -> str:
    """The text in a terminal's characters: '+-' for a plus-minus sign in ASCII.

    Args:
        text: the text to print.
        encoding: the terminal's encoding; None if it takes every character.
    """
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        for sign, plain in PLAIN.items():
            text = text.replace(sign, plain)
        return text.encode("ascii", "backslashreplace").decode("ascii")
    return text


def print_line(line: str, stream: Any = None) -> None:
    """Print one line; to standard output by default."""
    stream = stream or sys.stdout or io.StringIO()
    stream.write(encodable(f"{line}\n", getattr(stream, "encoding", None)))


def format_value(number: Number) -> str:
    """Six significant digits, or a whole pure number; a dash for NaN and Inf."""
    if not math.isfinite(number.value):
        return DASH
    if number.unit == "1" and number.value == int(number.value):
        return f"{int(number.value)}"
    return f"{number.value:.6g}"


def format_error(number: Number) -> str:
    """The error bar, or nothing if the value is exact up to rounding."""
    if number.error is None:
        return ""
    if not math.isfinite(number.error):
        return "± unknown"
    return f"± {number.error:.2g}"


def _state(number: Number) -> str:
    return "" if number.converged else "not converged"
