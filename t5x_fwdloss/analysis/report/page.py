"""The report of a run: one self-contained HTML file."""

import html
import string
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import header, model_facts, training
from t5x_fwdloss.analysis.report.plots import Plot, drawn
from t5x_fwdloss.analysis.report.style import PAGE, STYLE
from t5x_fwdloss.analysis.report.tables import (
    cell,
    definitions,
    escaped,
    head,
    of_numbers,
    row,
    section_id,
    table,
    title_of,
)
from t5x_fwdloss.analysis.report.terminal import DASH


def render(
    document: dict[str, Any],
    results: Sequence[MeasurementResult],
    plots: Mapping[str, Sequence[Plot]],
) -> str:
    """The report as one string of HTML.

    Args:
        document: the content of `results.json`.
        results: the finished measurements, with their arrays.
        plots: the plots of each measurement, by its name.
    """
    sections = [training.section(document["training"], document["step"])]
    sections += [_section(result, plots.get(result.name, ())) for result in results]
    sections += [
        f"<section id='{section_id(entry['name'])}'><h2>{title_of(entry['name'])}</h2>"
        f'<p class="bad">Stopped: '
        f"{escaped(entry['reason'])}</p></section>"
        for entry in document["measurements"]
        if entry["status"] == "failed"
    ]
    title = "Curvature analysis"
    where = document["checkpoint"] or "no checkpoint"
    step = "" if document["step"] is None else f", step {document['step']}"
    parts = [
        header.headlines(results),
        header.contents(_sections(document, results)),
        part("facts", "What was measured", definitions(facts(document))),
        *sections,
        part(
            "checks", "Checks before the measurements", _checks(document["preflight"])
        ),
        part(
            "environment", "Where it was measured", definitions(environment(document))
        ),
    ]
    lead = header.subject(document) + _lead(document, results)
    return whole(f"{title}: {where}{step}", title, lead, parts)


def whole(title: str, heading: str, lead: str, parts: Sequence[str]) -> str:
    """A page.

    Args:
        title: its title, for the window.
        heading: its first heading.
        lead: what stands below that, HTML.
        parts: its parts, HTML.
    """
    return string.Template(PAGE).substitute(
        title=escaped(title),
        heading=escaped(heading),
        style=STYLE,
        lead=lead,
        parts="\n".join(filter(None, parts)),
    )


def part(identifier: str, title: str, content: str) -> str:
    """A section with a title; content is HTML."""
    return (
        f"<section id='{identifier}'><h2>{escaped(title)}</h2>\n{content}\n</section>"
    )


def _sections(document, results) -> list[tuple[str, str]]:
    failed = [x["name"] for x in document["measurements"] if x["status"] == "failed"]
    names = [result.name for result in results] + failed
    probed = [(training.SECTION, training.TITLE)] if document["training"] else []
    return [
        ("facts", "What was measured"),
        *probed,
        *((section_id(name), html.unescape(title_of(name))) for name in names),
        ("checks", "Checks before the measurements"),
        ("environment", "Where it was measured"),
    ]


def _lead(document, results) -> str:
    words = [f"The loss is {document['normalizer']['words']}."]
    open_ends = [result.name for result in results if not result.converged]
    failed = [x["name"] for x in document["measurements"] if x["status"] == "failed"]
    state, css = "All measurements converged.", "good"
    if open_ends:
        state = f"Not converged in part: {', '.join(open_ends)}."
        css = "warn"
    if failed:
        state, css = (
            f"Stopped by an impossible number: {', '.join(failed)}.",
            "bad",
        )
    return f'<p>{escaped(" ".join(words))}</p><p class="{css}">{escaped(state)}</p>'


def facts(document: dict[str, Any]) -> dict[str, str]:
    """What was measured, in words, by its name."""
    loss = document["loss"]
    target = document["batch_shapes"].get("decoder_target_tokens")
    shape = "" if target is None else f" of {target[0]} by {target[1]} target positions"
    counted = "losses" if document["normalizer"]["kind"] == "losses" else "tokens"
    rows = {
        "Checkpoint": document["checkpoint"] or DASH,
        "Step": DASH if document["step"] is None else f"{document['step']:,}",
        "Data": f"{document['task'] or DASH}: {document['num_batches']} batches{shape}, "
        f"{document['num_tokens']:,} {counted} that count" + _outside(document),
        "Batches' hash": document["batches_hash"][:16],
        "Loss": ", ".join(f"{k} = {v}" for k, v in loss.items()) or DASH,
        "Normalizer W": f"{document['normalizer']['W']:,.6g} "
        f"({document['normalizer']['kind'].replace('_', ' ')})",
        "Model": ", ".join(
            filter(
                None, (document["model"]["class"], model_facts.words(document["model"]))
            )
        )
        or DASH,
        "Parameters": f"{document['num_parameters']:,}, "
        f"{' and '.join(document['model']['parameter_dtypes'])}",
        "Optimizer": document["optimizer"] or DASH,
        "Seed": str(document["seed"]),
        "Activations": document["activation_dtype"],
        "Matmul precision": document["matmul_precision"],
        "Dropout": "off"
        if document["dropout_seed"] is None
        else f"one fixed key per batch, seed {document['dropout_seed']}",
    }
    for matrix, how in document["products"].items():
        rows[f"Products, {matrix.replace('_', ' ')}"] = how
    if document["parameters_left_out"]:
        rows["Left out"] = ", ".join(document["parameters_left_out"])
    return rows


def environment(document: dict[str, Any]) -> dict[str, str]:
    """Where it was measured, in words, by its name."""
    found = document["environment"]
    mesh = found["mesh"]
    devices = f"{found['num_devices']} {found['device_kind']}"
    return {
        "Made": found["time"],
        "Devices": devices + (f", mesh {mesh}" if mesh else ""),
        "Processes": str(found["num_processes"]),
        "Versions": ", ".join(f"{k} {v}" for k, v in found["versions"].items())
        + f", Python {found['python']}",
        "Commit": found["commit"] or DASH,
        "Wall time": f"{document.get('seconds', 0.0):.1f} s",
    }


def _outside(document) -> str:
    count = document.get("num_labels_outside_vocabulary")
    return f", {count:,} of them labels outside of the vocabulary" if count else ""


def _checks(checks) -> str:
    if not checks:
        return "<p>Taken from an earlier part of this run.</p>"
    rows = [
        row(
            escaped(c["name"]),
            cell(f"{c['first']:.9g}", "n"),
            cell(f"{c['second']:.9g}", "n"),
            cell(f"{abs(c['first'] - c['second']):.2g}", "n"),
            cell(f"{c['tolerance']:.2g}", "n"),
        )
        for c in checks
    ]
    heads = [head("Check")]
    heads += [head(name, "n") for name in ("One", "Other", "Difference", "Allowed")]
    return table("Two computations of each number, and their difference", heads, rows)


def _section(result: MeasurementResult, plots: Sequence[Plot]) -> str:
    figures = [
        f"<figure>{svg}<figcaption>{escaped(caption)}</figcaption></figure>"
        for caption, svg in drawn(result, plots)
    ]
    notes = "".join(f"<p class='warn'>{escaped(note)}</p>" for note in result.notes)
    settings = ", ".join(
        f"{k} = {v}" for k, v in result.settings.items() if k != "name"
    )
    title = title_of(result.name)
    numbers = of_numbers(html.unescape(title), result.numbers)
    return (
        f"<section id='{section_id(result.name)}'><h2>{title}</h2>{notes}"
        f"{''.join(figures)}{numbers}<p class='small'>{escaped(result.kind)}: "
        f"{escaped(settings)}. {result.seconds:.1f} s.</p></section>"
    )
