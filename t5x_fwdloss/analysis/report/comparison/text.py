"""Runs as text: Markdown tables, and CSV with one line per number."""

import csv
import io
import re
from collections.abc import Sequence

from t5x_fwdloss.analysis.report.comparison import words
from t5x_fwdloss.analysis.report.comparison.differences import Cell, measured
from t5x_fwdloss.analysis.report.comparison.records import COLUMNS, of_runs
from t5x_fwdloss.analysis.report.comparison.runs import Run, facts
from t5x_fwdloss.analysis.report.terminal import format_error, format_value


def to_csv(runs: Sequence[Run]) -> str:
    """The records of the runs, one line per number, in full precision.

    What a number does not have is empty; what is unknown is `nan`.
    """
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(of_runs(runs))
    return stream.getvalue()


def to_markdown(runs: Sequence[Run]) -> str:
    """The tables of the page of one run or several."""
    found = measured(runs, least=min(2, len(runs)))
    known = facts(runs)
    lines = ["# " + ", ".join(map(_plain, (run.label for run in runs))), ""]
    lines += [f"- {_plain(run.label)}: {_plain(run.finished.path)}" for run in runs]
    labels = [run.label for run in runs]
    if len(runs) == 1:
        rows = [[_plain(x.name), *map(_plain, x.values)] for x in known]
        lines += ["", *_table(["What", "Value"], rows)]
    else:
        lines += [f"- {_plain(x)}" for x in words.of_obstacles(runs)]
        rows = [[_plain(x.name), *map(_plain, x.values)] for x in known if x.differs]
        lines += ["", *_table(["What differs", *map(_plain, labels)], rows)]
        lines += ["", _plain(words.of_the_same(known)), "", _plain(words.HOW_TO_READ)]
    for x in found:
        lines += ["", f"## {_plain(x.name)}", ""]
        heads = [
            f"{label} (not comparable: {', '.join(against)})" if against else label
            for label, against in zip(labels, x.obstacles, strict=True)
        ]
        notes = [f"- {_plain(note)}" for note in words.of_settings(x, runs)]
        lines += [*notes, ""] if notes else []
        rows = [
            [_plain(r.name), "" if r.unit == "1" else r.unit, *map(_cell, r.cells)]
            for r in x.rows
        ]
        lines += _table(["Number", "Unit", *map(_plain, heads)], rows)
    rest = words.of_the_rest(runs, found)
    lines += ["", *(f"- {_plain(x)}" for x in rest)] if rest else []
    return "\n".join(lines) + "\n"


def _cell(found: Cell) -> str:
    if found.number is None:
        return ""
    parts = [format_value(found.number), format_error(found.number)]
    parts += [] if found.number.converged else [r"\*"]
    if found.difference is not None:
        said, large = words.of_difference(found.difference)
        parts.append(f"(**{said}**)" if large else f"({said})")
    return " ".join(filter(None, parts))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _plain(text: object) -> str:
    """The text on one line, with the signs that Markdown would read escaped."""
    line = " ".join(str(text).split())
    # An underscore between letters is one.
    return re.sub(r"[\\|*<`]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line)
