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
    definitions,
    escaped,
    of_numbers,
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
    return string.Template(PAGE).substitute(
        title=escaped(f"{title}: {where}{step}"),
        heading=title,
        style=STYLE,
        lead=header.subject(document) + _lead(document, results),
        headlines=header.headlines(results),
        contents=header.contents(_sections(document, results)),
        facts=_facts(document),
        checks=_checks(document["preflight"]),
        sections="\n".join(sections),
        environment=_environment(document),
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


def _facts(document) -> str:
    loss = document["loss"]
    target = document["batch_shapes"].get("decoder_target_tokens")
    shape = "" if target is None else f" of {target[0]} by {target[1]} target positions"
    rows = {
        "Checkpoint": document["checkpoint"] or DASH,
        "Step": DASH if document["step"] is None else f"{document['step']:,}",
        "Data": f"{document['task'] or DASH}: {document['num_batches']} batches{shape}, "
        f"{document['num_tokens']:,} tokens that count" + _outside(document),
        "Batches' hash": document["batches_hash"][:16],
        "Loss": ", ".join(f"{k} = {v}" for k, v in loss.items()),
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
    return definitions(rows)


def _environment(document) -> str:
    found = document["environment"]
    mesh = found["mesh"]
    devices = f"{found['num_devices']} {found['device_kind']}"
    rows = {
        "Made": found["time"],
        "Devices": devices + (f", mesh {mesh}" if mesh else ""),
        "Processes": str(found["num_processes"]),
        "Versions": ", ".join(f"{k} {v}" for k, v in found["versions"].items())
        + f", Python {found['python']}",
        "Commit": found["commit"] or DASH,
        "Wall time": f"{document.get('seconds', 0.0):.1f} s",
    }
    return definitions(rows)


def _outside(document) -> str:
    count = document.get("num_labels_outside_vocabulary")
    return f", {count:,} of them labels outside of the vocabulary" if count else ""


def _checks(checks) -> str:
    if not checks:
        return "<p>Taken from an earlier part of this run.</p>"
    rows = [
        f"<tr><td>{escaped(c['name'])}</td><td class='n'>{c['first']:.9g}</td>"
        f"<td class='n'>{c['second']:.9g}</td>"
        f"<td class='n'>{abs(c['first'] - c['second']):.2g}</td>"
        f"<td class='n'>{c['tolerance']:.2g}</td></tr>"
        for c in checks
    ]
    head = "<th>Check<th class='n'>One<th class='n'>Other<th class='n'>Difference"
    return table(f"{head}<th class='n'>Allowed", rows)


def _section(result: MeasurementResult, plots: Sequence[Plot]) -> str:
    figures = [
        f"<figure>{svg}<figcaption>{escaped(caption)}</figcaption></figure>"
        for caption, svg in drawn(result, plots)
    ]
    notes = "".join(f"<p class='warn'>{escaped(note)}</p>" for note in result.notes)
    settings = ", ".join(
        f"{k} = {v}" for k, v in result.settings.items() if k != "name"
    )
    return (
        f"<section id='{section_id(result.name)}'><h2>{title_of(result.name)}</h2>{notes}{''.join(figures)}"
        f"{of_numbers(result.numbers)}<p class='small'>{escaped(result.kind)}: "
        f"{escaped(settings)}. {result.seconds:.1f} s.</p></section>"
    )
