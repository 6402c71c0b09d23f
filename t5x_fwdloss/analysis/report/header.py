"""The head of the report: the model and data, the main results, the contents."""

from collections.abc import Sequence
from typing import Any

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import model_facts
from t5x_fwdloss.analysis.report.tables import (
    cell,
    escaped,
    head,
    number_cells,
    row,
    section_id,
    spaced,
    table,
    title_of,
)

# Numbers of each measurement that the head shows.
NUM_HEADLINES = 2
# A shorter report needs no contents.
LEAST_CONTENTS = 4


def subject(document: dict[str, Any]) -> str:
    """One paragraph: model, sizes, types, optimizer, task, step."""
    model = document["model"]
    dtypes = " and ".join(model["parameter_dtypes"])
    parts = [
        model["class"] or "A loss",
        model_facts.words(model),
        f"{document['num_parameters']:,} parameters in {dtypes}",
        f"activations in {document['activation_dtype']}",
        f"optimizer {document['optimizer']}" if document["optimizer"] else "",
        f"task {document['task']}" if document["task"] else "",
        "" if document["step"] is None else f"step {document['step']:,}",
    ]
    return f"<p class='subject'>{escaped(' · '.join(filter(None, parts)))}</p>"


def headlines(results: Sequence[MeasurementResult]) -> str:
    """The first numbers of each measurement, with their errors, linked to the rest."""
    rows = []
    for result in results:
        link = f"<a href='#{section_id(result.name)}'>{title_of(result.name)}</a>"
        shown = list(result.numbers.items())[:NUM_HEADLINES]
        cells = [[cell(spaced(name)), *number_cells(x)] for name, x in shown]
        rows += [row(link, *cells[0], height=len(cells))] if cells else []
        rows += [f"<tr>{''.join(others)}</tr>" for others in cells[1:]]
    if not rows:
        return ""
    heads = [head("Measurement"), head("Number"), head("Value", "n")]
    heads += [
        head("Error", "e"),
        head("Unit"),
        head("<span class='unseen'>State</span>"),
    ]
    caption = "The first numbers of each measurement"
    return f"<section><h2>In short</h2>{table(caption, heads, rows)}</section>"


def contents(titles: Sequence[tuple[str, str]]) -> str:
    """Links to the sections, if there are many.

    Args:
        titles: id and title of each section, in order.
    """
    if len(titles) < LEAST_CONTENTS:
        return ""
    links = "".join(
        f"<li><a href='#{i}'>{escaped(title)}</a></li>" for i, title in titles
    )
    return f"<nav><h2>Contents</h2><ol>{links}</ol></nav>"
