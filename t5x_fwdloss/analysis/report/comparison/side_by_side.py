"""The page of several runs side by side: one self-contained HTML file."""

import html
from collections.abc import Mapping, Sequence

from t5x_fwdloss.analysis.report import figures, header
from t5x_fwdloss.analysis.report.comparison import words
from t5x_fwdloss.analysis.report.comparison.differences import (
    Cell,
    Measured,
    Row,
    measured,
)
from t5x_fwdloss.analysis.report.comparison.runs import Fact, Run, facts
from t5x_fwdloss.analysis.report.page import part, whole
from t5x_fwdloss.analysis.report.plots import Plot, salt_of
from t5x_fwdloss.analysis.report.tables import (
    cell,
    definitions,
    escaped,
    head,
    row,
    section_id,
    spaced,
    table,
    title_of,
    with_error,
)

TITLE = "Curvature analyses side by side"


def render(runs: Sequence[Run], plots: Mapping[str, Sequence[Plot]]) -> str:
    """The page as one string of HTML.

    Args:
        runs: two runs or more, the first of which is the others' reference.
        plots: the plots of each measurement, by its name.
    """
    found, known = measured(runs), facts(runs)
    lead = (
        f"<p>{escaped(f'{len(runs)} runs; differences are from {runs[0].label}.')}</p>"
    )
    lead += "".join(map(_warning, words.of_obstacles(runs)))
    sections = [(section_id(x.name), html.unescape(title_of(x.name))) for x in found]
    alone = [_warning(x) for x in words.of_the_rest(runs, found)]
    folders = {run.label: str(run.finished.path) for run in runs}
    parts = [
        header.contents([("runs", "The runs"), *sections]),
        part("runs", "The runs", definitions(folders) + _facts(runs, known)),
        *(_section(x, runs, plots.get(x.name, ())) for x in found),
        part("rest", "Not compared", "".join(alone)) if alone else "",
        part("reading", "How to read it", f"<p>{escaped(words.HOW_TO_READ)}</p>"),
    ]
    return whole(f"{TITLE}: {', '.join(run.label for run in runs)}", TITLE, lead, parts)


def _facts(runs, known: Sequence[Fact]) -> str:
    heads = [head("What differs"), *(head(escaped(run.label)) for run in runs)]
    rows = [
        row(escaped(fact.name), *(cell(escaped(x), "fact") for x in fact.values))
        for fact in known
        if fact.differs
    ]
    same = f"<p class='small'>{escaped(words.of_the_same(known))}</p>"
    return table("What differs between the runs", heads, rows) + same


def _section(found: Measured, runs, plots) -> str:
    title = title_of(found.name)
    heads = [head("Number")]
    for run, against in zip(runs, found.obstacles, strict=True):
        mark = ""
        if against:
            reasons = escaped(f"not comparable: {', '.join(against)}")
            mark = f"<br><span class='small warn'>{reasons}</span>"
        heads.append(head(f"{escaped(run.label)}{mark}", "n"))
    rows = [_row(x) for x in found.rows]
    caption = f"{html.unescape(title)}: numbers of each run"
    notes = "".join(map(_warning, words.of_settings(found, runs)))
    drawn = "".join(_figures(found, runs, plots))
    return (
        f"<section id='{section_id(found.name)}'><h2>{title}</h2>{notes}{drawn}"
        f"{table(caption, heads, rows)}</section>"
    )


def _row(found: Row) -> str:
    name = spaced(found.name)
    if found.unit != "1":
        name += f"<br><span class='small'>{escaped(found.unit)}</span>"
    return row(name, *(cell(_cell(x), "n") for x in found.cells))


def _cell(found: Cell) -> str:
    if found.number is None:
        return ""
    text = with_error(found.number)
    if found.difference is None:
        return text
    said, large = words.of_difference(found.difference)
    said = f"<b>{escaped(said)}</b>" if large else escaped(said)
    return f"{text}<br><span class='small'>{said}</span>"


def _figures(found: Measured, runs, plots) -> list[str]:
    results = {}
    for run, result, against in zip(runs, found.results, found.obstacles, strict=True):
        # matplotlib leaves labels out that begin so, and typesets dollars.
        label = run.label.lstrip("_").replace("$", r"\$") or run.label
        if result is not None and _drawable(result, results):
            results[f"{label} ({', '.join(against)})" if against else label] = result
    if len(results) < 2:
        return []
    drawn = []
    for number, plot in enumerate(plots):
        if plot.overlay is None:
            continue
        with figures.settings():
            figure = plot.overlay(results)
            if figure is None:
                continue
            svg = figures.to_svg(figure, salt_of(found.name, number))
        caption = f"<figcaption>{escaped(plot.caption)}</figcaption>"
        drawn.append(f"<figure>{svg}{caption}</figure>")
    return drawn


def _drawable(result, others) -> bool:
    """Whether a result has the same axes as those that are drawn already."""
    if not others:
        return True
    first = next(iter(others.values()))
    units = [{x.unit for x in r.numbers.values()} for r in (first, result)]
    return first.kind == result.kind and units[0] == units[1]


def _warning(sentence: str) -> str:
    return f"<p class='warn'>{escaped(sentence)}</p>"
