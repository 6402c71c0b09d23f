"""Several runs side by side: labels, what differs, differences against their errors."""

import csv
import dataclasses
import html
import io
import json
import math
import pathlib
import re

import pytest

from t5x_fwdloss import report
from t5x_fwdloss.analysis import Eigenpairs, SpectralDensity, Trace
from t5x_fwdloss.analysis.numbers import RESIDUAL, STANDARD_ERROR, Number
from t5x_fwdloss.analysis.report.comparison import differences
from t5x_fwdloss.analysis.report.comparison import runs as compared
from t5x_fwdloss.analysis.report.comparison.words import LARGE, of_difference
from t5x_fwdloss.analysis.store import finished_run

from . import runs, toy

JACKKNIFE = "standard error, by the jackknife over batches"
ROUNDED = f"{STANDARD_ERROR}, plus rounding in bfloat16"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run, one at another step and seed, and one on other batches."""
    root = tmp_path_factory.mktemp("runs")
    pairs = Eigenpairs(num_largest=2, max_steps=9)
    density = SpectralDensity(num_probes=2, num_steps=4)
    given = {
        "first": {"measurements": [pairs, Trace(num_probes=4), density]},
        "later": {
            "measurements": [Trace(num_probes=6), Eigenpairs(max_steps=9), density],
            "params": toy.parameters(7),
            "seed": 9,
            "host": runs.host(checkpoint="/models/toy/checkpoint_90", step=90),
        },
        "data": {
            "measurements": [Trace(num_probes=4), Trace(name="own", num_probes=2)],
            "objective": runs.objective(toy.batches(4, seed=8)),
        },
    }
    for name, fields in given.items():
        assert runs.run(root / name / "analysis", **fields) == 0
    return [str(root / name / "analysis") for name in given]


@pytest.fixture(scope="module")
def page(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "side.html"
    assert report.attempt(folders, output=str(path)) == 0
    return path.read_text()


def documents(folders):
    return [json.loads(pathlib.Path(x, "results.json").read_text()) for x in folders]


def results(document, name):
    return next(x for x in document["measurements"] if x["name"] == name)["results"]


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/r/seed0/analysis", "/r/seed1/analysis"], ["seed0", "seed1"]),
        (["/r/a/step_1", "/r/b/step_2"], ["step_1", "step_2"]),
        (["/r/a/1/x", "/r/a/2/x", "/r/b/1/x"], ["a/1", "a/2", "b/1"]),
        (["gs://m/run", "gs://m/runs/run"], ["m/run", "m/runs/run"]),
        (["/r/run", "/r/run/b"], ["run", "run/b"]),
        (["/r/a/b/c", "/r/a/x"], ["b/c", "x"]),
        (["/r/one"], ["one"]),
    ],
)
def test_a_label_is_the_shortest_part_that_distinguishes(paths, labels):
    assert compared.labels(paths) == labels


@pytest.mark.parametrize(
    ("first", "other", "value", "error", "ratio"),
    [
        ((1.0, 3.0, STANDARD_ERROR), (11.0, 4.0, JACKKNIFE), 10.0, 5.0, 2.0),
        ((1.0, 3.0, STANDARD_ERROR), (11.0, 4.0, RESIDUAL), 10.0, 7.0, None),
        ((1.0, 3.0, STANDARD_ERROR), (11.0, 4.0, ROUNDED), 10.0, 7.0, None),
        ((1.0, 3.0, RESIDUAL), (0.5, 0.25, RESIDUAL), -0.5, 3.25, None),
        ((1.0, None, "exact"), (4.0, 2.0, STANDARD_ERROR), 3.0, 2.0, None),
        ((1.0, None, "exact"), (4.0, None, "exact"), 3.0, None, None),
        ((1.0, 0.0, STANDARD_ERROR), (1.0, 0.0, STANDARD_ERROR), 0.0, 0.0, None),
    ],
)
def test_a_difference_has_the_joint_error(first, other, value, error, ratio):
    numbers = [
        Number(x, "nat", error=bar, error_kind=kind) for x, bar, kind in (first, other)
    ]
    found = differences.difference(*numbers)
    assert dataclasses.astuple(found) == (value, error, ratio)


def test_numbers_of_other_units_and_unknown_ones_have_no_difference():
    one = Number(1.0, "nat")
    assert differences.difference(one, Number(1.0, "1")) is None
    assert differences.difference(one, Number(math.nan, "nat")) is None


def test_a_large_difference_is_said_as_such():
    said = lambda ratio: of_difference(differences.Difference(ratio, 1.0, ratio))
    assert said(-LARGE) == ("-3 ± 1, -3.0 SE", True)
    assert said(LARGE - 0.5) == ("+2.5 ± 1, +2.5 SE", False)


def test_each_obstacle_to_a_comparison_is_named(folders):
    document = documents(folders)[0]
    assert compared.obstacles(document, document) == ()
    for change, words in [
        ({"batches_hash": "0"}, "other batches"),
        ({"normalizer": document["normalizer"] | {"W": 2.0}}, "another normalizer"),
        (
            {"normalizer": document["normalizer"] | {"kind": "sum"}},
            "another normalizer",
        ),
        ({"loss": document["loss"] | {"z_loss": 0.5}}, "another loss function"),
        ({"dropout_seed": 3}, "other dropout"),
        ({"num_parameters": 3}, "another model size"),
        (
            {"model": document["model"] | {"sizes": {"emb_dim": 3}}},
            "another model size",
        ),
    ]:
        assert compared.obstacles(document, document | change) == (words,)
    other = document | {"loss": document["loss"] | {"loss_impl": "autodiff"}, "seed": 5}
    assert compared.obstacles(document, other) == ()


def test_a_number_of_the_table_is_that_of_the_results(folders):
    finished = [finished_run.read(folder) for folder in folders]
    found = compared.compared(finished)
    tables = differences.measured(found)
    # Only one run has `own`.
    names = ["hessian_eigenpairs", "hessian_trace", "hessian_spectral_density"]
    assert [x.name for x in tables] == names
    for table in tables:
        labels = {n for x in table.results if x is not None for n in x.numbers}
        assert {row.name for row in table.rows} == labels
        for row in table.rows:
            for run, cell in zip(found, row.cells, strict=True):
                result = run.results.get(table.name)
                wanted = result.numbers.get(row.name) if result else None
                assert cell.number is wanted
            assert row.cells[0].difference is None
            assert row.cells[2].difference is None  # other batches
            shared = row.cells[0].number and row.cells[1].number
            assert (row.cells[1].difference is not None) == bool(shared)
    # The second run has one eigenvalue fewer or more: its cells are empty.
    assert any(None in [c.number for c in row.cells[:2]] for row in tables[0].rows)


def test_another_quantity_of_the_same_name_does_not_compare(folders):
    found = compared.compared([finished_run.read(x) for x in folders[:2]])
    trace = found[1].results["hessian_trace"]
    for name, value in {"damping": 1.0, "matrix": "fisher", "group": "a/.*"}.items():
        other = dataclasses.replace(trace, settings=trace.settings | {name: value})
        changed = dataclasses.replace(found[1], results={"hessian_trace": other})
        (table,) = differences.measured([found[0], changed])
        assert table.obstacles == ((), ("another quantity",))
        assert all(row.cells[1].difference is None for row in table.rows)


def text_of(part):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", part)).split())


def section(page, name):
    part = page[page.index(f"<section id='{name}'>") :]
    return part[: part.index("</section>")]


def test_the_page_says_what_differs_and_what_is_the_same(page):
    found = section(page, "runs")
    rows = [text_of(x) for x in re.findall(r"<tr>(.*?)</tr>", found)]
    assert rows[0] == "What differs first later data"
    assert "Step 50 90 50" in rows
    assert "Seed 3 9 3" in rows
    assert "Checkpoint /models/toy/checkpoint_50 /models/toy/checkpoint_90" in rows[1]
    (same,) = re.findall(r"<p class='small'>The same in all runs: (.*?)</p>", found)
    for words in ("Parameters 16, float32", "Dropout off", "loss impl custom_jvp"):
        assert words in same
        assert not any(words in row for row in rows)
    assert "data is not comparable with first: other batches" in text_of(page)


def test_the_page_has_the_numbers_with_their_differences(page, folders):
    first, later, data = documents(folders)
    found = section(page, "measurement-hessian_trace")
    rows = [text_of(x) for x in re.findall(r"<tr>(.*?)</tr>", found)]
    assert rows[0].startswith("Number first later data not comparable: other batches")
    a, b, c = (results(x, "hessian_trace")["trace"] for x in (first, later, data))
    difference, joint = b["value"] - a["value"], math.hypot(a["error"], b["error"])
    assert rows[1] == (
        f"trace {a['unit']} {a['value']:.6g} ± {a['error']:.2g} "
        f"{b['value']:.6g} ± {b['error']:.2g} "
        f"{difference:+.4g} ± {joint:.2g}, {difference / joint:+.1f} SE "
        f"{c['value']:.6g} ± {c['error']:.2g}"
    )
    assert "num_probes differs: 4 in first, 6 in later, 4 in data." in text_of(found)
    assert "Only data has own." in text_of(section(page, "rest"))
    # One figure over all runs each; the trace has none.
    assert found.count("<svg") == 0
    for name in ("hessian_eigenpairs", "hessian_spectral_density"):
        (svg,) = re.findall(
            r"<svg.*?</svg>", section(page, f"measurement-{name}"), re.DOTALL
        )
        assert {">first</text>", ">later</text>"} <= set(
            re.findall(r">first</text>|>later</text>", svg)
        )


def test_the_lines_of_the_csv_are_the_numbers_of_the_results(folders, capsys):
    assert report.attempt(folders, output_format="csv") == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    wanted = []
    for folder, document in zip(folders, documents(folders), strict=True):
        label = folder.split("/")[-2]
        for entry in document["measurements"]:
            for name, x in entry["results"].items():
                low, high = x["interval"] or (None, None)
                values = [x["value"], x["error"], x["error_kind"], low, high, x["unit"]]
                values += [x["converged"], x["count"]]
                head = [label, folder, document["step"], entry["name"], entry["kind"]]
                wanted.append([*head, entry["matrix"], name, *values])
    as_text = [["" if x is None else str(x) for x in line] for line in wanted]
    assert [list(line.values()) for line in lines] == as_text


def test_markdown_has_the_tables(folders, capsys):
    assert report.attempt(folders[:2], output_format="md") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| Step | 50 | 90 |" in lines
    first, later = (
        results(x, "hessian_trace")["trace"] for x in documents(folders[:2])
    )
    (row,) = [line for line in lines if line.startswith("| trace |")][:1]
    assert f"| {first['value']:.6g} ± {first['error']:.2g} |" in row
    assert f"| {later['value']:.6g} ± {later['error']:.2g} (" in row
    assert all(line.count("|") == 5 for line in lines if line.startswith("| trace"))
    assert report.attempt(folders[:1], output_format="md") == 0
    assert "| Step | 50 |" in capsys.readouterr().out


def test_the_same_folder_twice_is_rejected(folders, tmp_path, capsys):
    output = tmp_path / "side.html"
    twice = [folders[0], f"{folders[0]}/"]
    assert report.attempt(twice, output=str(output)) == 1
    assert f"got {folders[0]} twice" in capsys.readouterr().err
    assert not output.exists()
