"""The report of a sweep: every number over the steps, as curves and as tables."""

import html
import math
import re
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from t5x_fwdloss.analysis.numbers import EXACT, Number, result_from_json
from t5x_fwdloss.analysis.report import figures, page
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.tables import (
    cell,
    cell_of,
    escaped,
    head,
    row,
    section_id,
    spaced,
    table,
    title_of,
)

TITLE = "Curvature over the training"
THRESHOLD = "stability_threshold"
# Of these optimizers a step is stable while eigenvalues are below 2 / learning rate.
PLAIN = ("SGD",)
Curves = dict[str, dict[str, Any]]


def render(document: dict[str, Any], documents: dict[int, dict[str, Any]]) -> str:
    """The report as one string of HTML.

    Args:
        document: the content of `sweep.json`.
        documents: step to the content of its `results.json`.
    """
    where = document["fingerprint"]["checkpoint"]
    sections = [_steps(document)]
    sections += [_section(x, document, documents) for x in document["measurements"]]
    return page.whole(f"{TITLE}: {where}", TITLE, _lead(document), sections)


def thresholds(
    measurement: dict[str, Any],
    document: dict[str, Any],
    documents: dict[int, dict[str, Any]],
) -> dict[int, float]:
    """Step to the eigenvalue below which the optimizer's steps are stable.

    That is the threshold in the results of a preconditioned measurement; of the Hessian
    itself it is 2 over the learning rate, where the optimizer is plain gradient descent
    and the configuration has its learning rate.

    Args:
        measurement: an entry of `sweep.json`.
        document: the content of `sweep.json`.
        documents: step to the content of its `results.json`.
    """
    numbers, settings = measurement["numbers"], measurement["settings"]
    if THRESHOLD in numbers:
        curve = numbers[THRESHOLD]
        return dict(zip(curve["steps"], curve["values"], strict=True))
    if settings.get("preconditioned") or settings.get("matrix") != "hessian":
        return {}
    rates = {x["step"]: x["learning_rate"] for x in document["steps"]}
    return {
        step: 2 / rates[step]
        for step, found in documents.items()
        if rates.get(step) and found["optimizer"] in PLAIN
    }


def _lead(document) -> str:
    done = [x for x in document["steps"] if x["status"] == "finished"]
    words = f"{document['fingerprint']['checkpoint']}: {len(done)} of "
    words += f"{len(document['steps'])} steps measured; {document['status']}."
    notes = "".join(f"<p class='warn'>{escaped(x)}</p>" for x in document["notes"])
    return f"<p class='subject'>{escaped(words)}</p>{notes}"


def _steps(document) -> str:
    rows = []
    for x in document["steps"]:
        rate = "" if x["learning_rate"] is None else f"{x['learning_rate']:.4g}"
        name = f"{x['step']:,}"
        if x["status"] == "finished":
            name = f"<a href='{x['folder']}/report.html'>{name}</a>"
        css = {"finished": "good", "failed": "bad"}.get(x["status"], "warn")
        cells = cell(x["status"], css), cell(rate, "n")
        rows.append(row(name, *cells, cell(escaped(x["reason"] or ""), "small")))
    heads = [head("Step"), head("State"), head("Learning rate", "n"), head("Reason")]
    return page.part("steps", "Steps", table("The steps of the sweep", heads, rows))


def _section(measurement, document, documents) -> str:
    name = measurement["name"]
    numbers: Curves = measurement["numbers"] | _overlaps(name, document["neighbors"])
    limits = thresholds(measurement, document, documents)
    drawn = _figure(name, numbers, limits)
    title = html.unescape(title_of(name))
    shown = drawn + _table(f"{title}: numbers by step", numbers, limits)
    return page.part(section_id(name), title, shown)


def _overlaps(name: str, neighbors) -> Curves:
    found: Curves = {}
    for x in neighbors:
        if x["measurement"] != name:
            continue
        curve = found.setdefault(
            f"{x['end']}_overlap_with_step_before",
            {
                "unit": "1",
                "steps": [],
                "values": [],
                "errors": [],
                "error_kinds": [],
                "intervals": [],
                "converged": [],
            },
        )
        curve["steps"].append(x["later"])
        curve["values"].append(x["overlap"])
        curve["errors"].append(None)
        curve["error_kinds"].append(EXACT)
        curve["intervals"].append(None)
        curve["converged"].append(x["converged"])
    return found


def _panel(name: str) -> str:
    """The title of a number's panel: numbers of one kind share it."""
    if re.fullmatch(r"(largest|smallest)_\d+", name):
        return "eigenvalues"
    column = name.rpartition("/")[2]
    return re.sub(r"_\d+$", "", column).replace("_", " ")


def _figure(name: str, numbers: Curves, limits: dict[int, float]) -> str:
    panels: dict[str, list[str]] = {}
    for number in numbers:
        if number != THRESHOLD:
            panels.setdefault(_panel(number), []).append(number)
    if not panels:
        return ""
    with figures.settings():
        axes = figures.panels(len(panels))
        for axis, (title, names) in zip(axes, panels.items(), strict=True):
            _draw(axis, title, {n: numbers[n] for n in names})
            if title == "eigenvalues" and limits:
                axis.plot(*_points(limits), "--", color=FAINT, label="threshold")
            if len(axis.get_legend_handles_labels()[1]) > 1:
                axis.legend(loc="best")
        figure: Any = axes[0].get_figure(root=True)
        svg = figures.to_svg(figure, re.sub(r"\W", "-", f"sweep-{name}"))
    caption = (
        "Over the training step; bands are the errors, open circles are not converged. "
        "The table has the same numbers."
    )
    if limits:
        caption += " Dashed: the optimizer's steps are stable below."
    if any(len(names) > len(SERIES) for names in panels.values()):
        caption += f" Of more than {len(SERIES)} curves the first are drawn."
    return f"<figure>{svg}<figcaption>{escaped(caption)}</figcaption></figure>"


def _points(limits: dict[int, float]) -> tuple[list[int], list[float]]:
    return sorted(limits), [limits[step] for step in sorted(limits)]


def _draw(axis: Axes, title: str, curves: Curves) -> None:
    for color, (name, curve) in zip(SERIES, curves.items(), strict=False):
        values, errors = (
            np.array([math.nan if x is None else x for x in curve[key]], float)
            for key in ("values", "errors")
        )
        errors = np.nan_to_num(errors, nan=0.0)
        label = name.rpartition("/")[0] or name.replace("_", " ")
        axis.plot(curve["steps"], values, color=color, label=label)
        axis.fill_between(
            curve["steps"], values - errors, values + errors, color=color, alpha=0.2
        )
        for step, value, converged in zip(
            curve["steps"], values, curve["converged"], strict=True
        ):
            fill = color if converged else "none"
            axis.plot(step, value, "o", color=color, markerfacecolor=fill, markersize=4)
    unit = next(iter(curves.values()))["unit"]
    axis.set_title(title if unit == "1" else f"{title}, {unit}")
    axis.set_xlabel("training step")
    figures.count_along(axis)


def _table(caption: str, numbers: Curves, limits: dict[int, float]) -> str:
    steps = sorted({step for curve in numbers.values() for step in curve["steps"]})
    rows = []
    for name, curve in numbers.items():
        found = _numbers(curve)
        rows.append(row(spaced(name), *(cell_of(found.get(step)) for step in steps)))
    if limits and THRESHOLD not in numbers:
        found = {step: Number(limit, "1") for step, limit in limits.items()}
        cells = (cell_of(found.get(step)) for step in steps)
        rows.append(row("2 / learning rate", *cells))
    heads = [head("Step"), *(head(f"{step:,}", "n") for step in steps)]
    return table(caption, heads, rows)


def _numbers(curve: dict[str, Any]) -> dict[int, Number]:
    """Step to the number, as a result holds it."""
    columns = zip(
        curve["steps"],
        curve["values"],
        curve["errors"],
        curve["error_kinds"],
        curve["intervals"],
        curve["converged"],
        strict=True,
    )
    results = {
        str(step): {
            "value": value,
            "unit": curve["unit"],
            "error": error,
            "error_kind": kind,
            "converged": converged,
            "interval": interval,
            "count": None,
        }
        for step, value, error, kind, interval, converged in columns
    }
    whole: Any = {
        "name": "",
        "kind": "",
        "settings": {},
        "notes": (),
        "seconds": 0.0,
        "results": results,
    }
    return {int(step): x for step, x in result_from_json(whole, {}).numbers.items()}
