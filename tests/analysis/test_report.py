"""The report is one whole page that fetches nothing, and the table says the same."""

import html
import html.parser
import io
import json
import re

import numpy as np
import pytest

from t5x_fwdloss.analysis import GroupTraces
from t5x_fwdloss.analysis.numbers import (
    MeasurementResult,
    Number,
    result_from_json,
    result_to_json,
    to_json,
)
from t5x_fwdloss.analysis.report.page import render
from t5x_fwdloss.analysis.report.terminal import (
    DASH,
    format_error,
    format_value,
    print_table,
)
from t5x_fwdloss.progress import Progress, stage

from . import toy


class Page(html.parser.HTMLParser):
    """Tags, attributes and ids of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]


@pytest.fixture(scope="module")
def page(finished_run):
    return (finished_run / "report.html").read_text()


def test_the_report_fetches_nothing(page):
    parsed = Page()
    parsed.feed(page)
    assert "script" not in parsed.tags
    assert "link" not in parsed.tags
    links = [v for k, v in parsed.attributes if k in ("src", "href", "xlink:href")]
    assert all(link.startswith("#") for link in links)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_ids_are_unique_over_all_figures(page):
    parsed = Page()
    parsed.feed(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    references = set(re.findall(r"url\(#([^)]+)\)", page))
    assert references <= set(parsed.ids)


def test_the_report_shows_what_the_results_say(page, finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    assert page.count("<svg") == 4
    assert document["normalizer"]["words"] in page
    assert document["checkpoint"] in page
    trace = document["measurements"][2]["results"]["trace"]
    assert f"{trace['value']:.6g}" in page
    assert f"± {trace['error']:.2g}" in page


def test_every_color_of_a_figure_is_one_of_the_page(page):
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert {c for f in figures for c in re.findall(r"#[0-9a-f]{6}\b", f)} == set()
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", page))
    defined = set(re.findall(r"(--[a-z0-9-]+):", page))
    assert used <= defined


def test_text_in_the_report_is_escaped(finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    found = render(document | {"checkpoint": "<b>&$x"}, [], {})
    assert "&lt;b&gt;&amp;$x" in found
    assert "<b>&" not in found


def test_numbers_survive_their_file():
    number = Number(np.nan, "nat", np.inf, "standard error", False, (0.0, np.inf), 3)
    result = MeasurementResult("a", "B", {"x": (1, 2)}, {"n": number}, {}, ("note",))
    stored = json.loads(json.dumps(result_to_json(result), allow_nan=False))
    back = result_from_json(stored, {}).numbers["n"]
    assert np.isnan(back.value)
    assert np.isnan(back.error)
    assert not back.converged
    assert result_to_json(result_from_json(stored, {})) == stored


def test_json_has_no_nan():
    found = to_json({"a": np.array([1.0, np.nan]), "b": (np.float32(np.inf), True)})
    assert found == {"a": [1.0, None], "b": [None, True]}


def test_a_number_that_did_not_converge_says_so_in_the_table():
    numbers = {
        "good": Number(0.125, "nat"),
        "bad": Number(2.0, "nat", 0.1, "residual", converged=False),
    }
    result = MeasurementResult("m", "M", {}, numbers, notes=("A note.",))
    document = {"normalizer": {"words": "the sum"}, "measurements": []}
    stream = io.StringIO()
    print_table(document, [result], "/x/report.html", stream)
    lines = stream.getvalue().splitlines()
    assert [line.split() for line in lines if "good" in line] == [
        ["good", "0.125", "nat"]
    ]
    assert any(line.endswith("not converged") and "± 0.1" in line for line in lines)
    assert "  A note." in lines
    assert lines[-1] == "Report: /x/report.html"


@pytest.mark.parametrize(
    ("number", "value", "error"),
    [
        (Number(12.0, "1"), "12", ""),
        (Number(12345678.0, "1"), "12345678", ""),
        (Number(12345678.0, "nat"), "1.23457e+07", ""),
        (Number(1.23456789, "nat", 0.0123), "1.23457", "± 0.012"),
        (Number(np.nan, "nat", np.nan), "\N{EN DASH}", "± unknown"),
    ],
)
def test_numbers_are_written_with_their_errors(number, value, error):
    assert (format_value(number), format_error(number)) == (value, error)


def test_progress_tells_the_time_left_from_fresh_steps_only():
    progress = Progress("Lanczos", 50, done=10, stream=io.StringIO())
    progress.update(10, "now")
    expected = "Lanczos: 20 of 50, 5 s gone, at most 15 s left, now"
    assert progress.line(5.0, "now") == expected


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_a_bar_is_drawn_on_a_terminal_by_the_first_process_only():
    shown, hidden = Terminal(), Terminal()
    for stream, is_primary in ((shown, True), (hidden, False)):
        with Progress("Probes", 4, is_primary=is_primary, stream=stream) as progress:
            progress.update(4, "mean 1.5")
    assert "Probes" in shown.getvalue()
    assert hidden.getvalue() == ""


def test_the_time_left_leaves_out_the_first_step_which_compiles():
    now = iter([0.0, 20.0, 20.0, 23.0, 23.0])
    progress = Progress("Probes", 10, stream=io.StringIO(), clock=lambda: next(now))
    progress.update()
    assert "at most 180 s left" in progress.line(20.0)
    progress.update(3)
    assert "4 of 10, 23 s gone, at most 6 s left" in progress.line(23.0)


def test_lines_say_where_the_work_begins_and_ends(caplog):
    now = iter([0.0, 2.0, 2.0, 3.5])
    with caplog.at_level("INFO", logger="absl"):
        clock = lambda: next(now)
        with Progress("Lanczos", 10, done=3, stream=io.StringIO(), clock=clock) as line:
            line.update(4)
    first, last = "Lanczos: starts at 3 of 10", "Lanczos: 7 of 10 in 3.5 s"
    assert caplog.messages == [first, last]


def test_a_stage_says_that_it_begins_and_how_long_it_took(caplog):
    with caplog.at_level("INFO", logger="absl"):
        with stage("Restoring /m/checkpoint_50"):
            assert caplog.messages == ["Restoring /m/checkpoint_50"]
        with stage("Elsewhere", is_primary=False):
            pass
    assert len(caplog.messages) == 2
    assert re.fullmatch(r"Restoring /m/checkpoint_50: \d+\.\d s", caplog.messages[1])


def text_of(page, start, end):
    """The visible text of a part of the page."""
    part = page[page.index(start) :]
    part = part[: part.index(end)]
    return " ".join(re.sub(r"<[^>]*>", " ", part).split())


def test_the_head_says_what_was_analyzed_and_what_was_found(page, finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    document |= {"task": "some_task", "step": 1200, "optimizer": "Adafactor"}
    document["activation_dtype"] = "bfloat16"
    document["model"]["sizes"] = {
        "num_encoder_layers": 2,
        "num_decoder_layers": 3,
        "num_layers": 4,
        "emb_dim": 5120,
        "mlp_dim": 6,
        "num_heads": 7,
        "head_dim": 8,
        "vocab_size": 32128,
    }
    results = [
        result_from_json(x, {}) for x in document["measurements"] if "results" in x
    ]
    found = render(document, [], {})
    head = html.unescape(text_of(found, "<header>", "</header>"))
    for words in (
        document["model"]["class"],
        "2 encoder layers, 3 decoder layers, 4 layers, width 5,120, MLP width 6, 7 heads, "
        "head width 8, vocabulary 32,128",
        f"{document['num_parameters']:,} parameters in float32",
        "activations in bfloat16",
        "optimizer Adafactor",
        "task some_task",
        "step 1,200",
    ):
        assert words in head
    short = html.unescape(text_of(page, "<h2>In short", "</section>"))
    for result in results:
        for name, number in list(result.numbers.items())[:2]:
            row = f"{name.replace('_', ' ')} {format_value(number)}"
            row += f" {format_error(number)}" if number.error is not None else ""
            assert row in short


def rows_of(page, start, end):
    """The rows of tables, without tags that are not rows' or cells'."""
    part = page[page.index(start) :]
    rows = re.findall(r"<tr>(.*?)</tr>", part[: part.index(end)], re.DOTALL)
    return [" ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in rows]


def test_what_did_not_converge_is_said_wherever_it_is_shown(finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    unit = "nat per θ²"
    numbers = {
        "good": Number(0.5, unit, 0.1, "residual"),
        "bad": Number(2.0, unit, 0.25, "residual", converged=False),
        "a/share": Number(3.0, unit, 0.5, "spread"),
        "b/share": Number(4.0, unit, 0.75, "spread", converged=False),
    }
    result = MeasurementResult("open", "M", {}, numbers)
    assert not result_to_json(result)["converged"]
    good = {"good": numbers["good"], "a/share": numbers["a/share"]}
    closed = MeasurementResult("closed", "M", {}, good)
    assert result_to_json(closed)["converged"]
    page = render(document, [result, closed], {})
    assert "Not converged in part: open.<" in page
    assert "All measurements converged.<" in render(document, [closed], {})
    assert rows_of(page, "<h2>In short", "</section>")[1:] == [
        f"Open good 0.5 ± 0.1 {unit}",
        f"bad 2 ± 0.25 {unit} not converged",
        f"Closed good 0.5 ± 0.1 {unit}",
        f"a/share 3 ± 0.5 {unit}",
    ]
    assert rows_of(page, "<section id='measurement-open'", "</section>") == [
        "Number Value Error Unit What the error is",
        f"good 0.5 ± 0.1 {unit} residual",
        f"bad 2 ± 0.25 {unit} residual not converged",
        f"share {unit}",
        "a 3 ± 0.5",
        "b 4 ± 0.75 *",
    ]
    told = "<p class='small'>share: spread; <b>*</b>: not converged.</p>"
    assert page.count(told) == 1
    # A failure is worse, and said in its place.
    failed = {"name": "broken", "status": "failed", "reason": "it must be so"}
    page = render(document | {"measurements": [failed]}, [result], {})
    assert "Stopped by an impossible number: broken.<" in page
    assert "Not converged in part" not in page


def test_names_of_the_reader_keep_their_signs_and_figures_their_size(finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    layers = [f"decoder.layers_{i}" for i in range(48)]
    number = Number(1.0, "nat", 0.5, "spread", interval=(0.5, 1.5))
    numbers = {f"{layer}/mean_trace": number for layer in layers}
    other = Number(2.0, "nat per θ²", 0.5, "spread", interval=(1.5, 2.5))
    numbers |= {f"{layer}/trace": other for layer in layers}
    result = MeasurementResult("groups", "GroupTraces", {}, numbers)
    page = render(document, [result], {"groups": GroupTraces().plots()})
    rows = rows_of(page, "<section id='measurement-groups'", "</section>")
    assert rows[0] == "mean trace nat trace nat per θ²"
    assert [row.split()[0] for row in rows[1:]] == layers
    assert "decoder.layers_0/mean trace 1" in " ".join(
        rows_of(page, "<h2>In s", "</section")
    )
    # A bound on a tall figure's height would shrink its text with it.
    (style,) = re.findall(r"figure svg \{([^}]*)\}", page)
    assert "height: auto" in style
    assert "max-height" not in style
    assert all(f">{layer}</text>" in page for layer in layers)


def test_an_interval_has_the_digits_of_its_value(finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    number = Number(1050.4, "1", 0.02, "residual", interval=(1050.38, 1050.42))
    result = MeasurementResult("m", "M", {}, {"trace": number})
    page = render(document, [result], {})
    (row,) = rows_of(page, "<section id='measurement-m'", "</section>")[1:]
    assert row == "trace 1050.4 ± 0.02 [1050.38, 1050.42] residual"


def test_the_facts_are_those_of_the_results(page, finished_run):
    document = json.loads((finished_run / "results.json").read_text())

    def facts(page):
        pairs = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)
        assert len(dict(pairs)) == len(pairs)
        return {html.unescape(name): html.unescape(text) for name, text in pairs}

    examples, length = 6, toy.LENGTH
    weights = toy.examples()["decoder_loss_weights"]
    tokens = int(weights.sum())
    found, machine = facts(page), document["environment"]
    wanted = {
        "Checkpoint": "/models/toy/checkpoint_50",
        "Step": "50",
        "Data": f"toy: 2 batches of {examples} by {length} target positions, {tokens} "
        "tokens that count",
        "Batches' hash": document["batches_hash"][:16],
        "Normalizer W": f"{tokens} (real tokens)",
        "Model": "SoftmaxRegression",
        "Parameters": f"{(toy.FEATURES + 1) * toy.CLASSES}, float32",
        "Optimizer": DASH,
        "Seed": "3",
        "Activations": "float32",
        "Matmul precision": "highest",
        "Dropout": "off",
        "Products, hessian": document["products"]["hessian"],
        "Made": machine["time"],
        "Processes": "1",
        "Commit": machine["commit"] or DASH,
        "Wall time": f"{document['seconds']:.1f} s",
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert "loss_impl = custom_jvp, loss_chunk_length = None" in found["Loss"]
    assert f"numpy {np.__version__}, " in found["Versions"]
    assert found["Devices"].startswith(f"{machine['num_devices']} ")
    other = document | {
        "step": None,
        "dropout_seed": 4,
        "optimizer": "Adam",
        "num_parameters": 12345678,
        "parameters_left_out": ["step"],
        "num_labels_outside_vocabulary": 1234,
    }
    other["normalizer"] = document["normalizer"] | {"W": 12345.678}
    other["environment"] = machine | {"mesh": {"data": 2}, "num_processes": 8}
    found = facts(render(other, [], {}))
    assert found["Step"] == DASH
    assert found["Data"].endswith(
        "count, 1,234 of them labels outside of the vocabulary"
    )
    assert found["Dropout"] == "one fixed key per batch, seed 4"
    assert found["Optimizer"] == "Adam"
    assert found["Normalizer W"] == "12,345.7 (real tokens)"
    assert found["Parameters"] == "12,345,678, float32"
    assert found["Left out"] == "step"
    assert found["Processes"] == "8"
    assert found["Devices"].endswith(", mesh {'data': 2}")


def test_every_measurement_is_in_the_contents(page, finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    parsed = Page()
    parsed.feed(page[page.index("<nav>") : page.index("</nav>")])
    links = [value for name, value in parsed.attributes if name == "href"]
    names = [f"#measurement-{x['name']}" for x in document["measurements"]]
    assert links == ["#facts", *names, "#checks", "#environment"]
    for link in links:
        assert f"id='{link[1:]}'" in page or f'id="{link[1:]}"' in page
