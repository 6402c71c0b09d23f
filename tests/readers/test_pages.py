"""TensorBoard, the printed table and the report show the numbers of results.json."""

import html
import re

import numpy as np
import pytest


def numbers_of(run):
    for measurement in run.document["measurements"]:
        for name, number in measurement["results"].items():
            yield measurement["name"], name, number


def test_events_hold_every_number_and_its_error(kept):
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    events = event_accumulator.EventAccumulator(
        str(kept.path), size_guidance={"tensors": 0}
    )
    events.Reload()
    wanted = {}
    for measurement, name, number in numbers_of(kept):
        wanted[f"{measurement}/{name}"] = number["value"]
        if number["error"] is not None:
            wanted[f"{measurement}/{name}/error"] = number["error"]
    assert set(events.Tags()["tensors"]) == set(wanted)
    for tag, value in wanted.items():
        (event,) = events.Tensors(tag)
        assert event.step == kept.document["step"]
        found = float(tensor_util.make_ndarray(event.tensor_proto))
        assert found == float(np.float32(value)), tag


def shown(number):
    """A number as it must be written: six digits, and two of its error."""
    value = number["value"]
    whole = number["unit"] == "1" and value == int(value)
    text = str(int(value)) if whole else f"{value:.6g}"
    return text, "" if number["error"] is None else f"± {number['error']:.2g}"


def test_the_printed_table_has_every_number(kept):
    blocks = re.split(r"\n\n(?=\S+ \([\d.]+ s\)\n)", kept.printed)
    found = {block.split(" ", 1)[0]: block.splitlines()[1:] for block in blocks[1:]}
    for measurement, name, number in numbers_of(kept):
        (row,) = [x for x in found[measurement] if x.startswith(f"  {name} ")]
        value, error = shown(number)
        unit = number["unit"]
        state = "" if number["converged"] else "not converged"
        expected = " ".join(f"{name} {value} {error} {unit} {state}".split())
        assert " ".join(row.split()) == expected


def text_of(page):
    """The page as words, tags left out."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_the_report_has_every_number(kept):
    page = (kept.path / "report.html").read_text()
    measured = kept.document["measurements"]
    # Those of the run itself come first or last.
    sections = [
        section
        for section in re.findall(r"<section[ >].*?</section>", page, re.DOTALL)
        if any(f"<p class='small'>{m['kind']}:" in section for m in measured)
    ]
    assert len(sections) == len(measured)
    for section, measurement in zip(sections, measured, strict=True):
        words = text_of(section)
        for name, number in measurement["results"].items():
            value, error = shown(number)
            row, _, column = name.rpartition("/")
            label = (row or column).replace("_", " ")
            assert f"{label} {value} {error}".strip() in words or (
                row and f" {value} {error}".rstrip() in words
            ), (measurement["name"], name)
            if number["interval"] is not None and not row:
                low, high = number["interval"]
                assert f"[{low:.6g}, {high:.6g}]" in words


def test_the_report_shows_the_checks(kept):
    page = (kept.path / "report.html").read_text()
    names = [check["name"] for check in kept.document["preflight"]]
    for matrix in ("the sampled Fisher matrix", "the Hessian", "the Fisher matrix"):
        assert f"{matrix}, 4 vectors at once equal one by one" in names
    for check in kept.document["preflight"]:
        difference = abs(check["first"] - check["second"])
        assert difference <= check["tolerance"]
        cells = f"<td class='n'>{difference:.2g}</td><td class='n'>"
        assert f"{html.escape(check['name'])}</th>" in page
        assert f"{cells}{check['tolerance']:.2g}</td>" in page


@pytest.mark.parametrize("what", ["theta", "gradient"])
def test_the_reference_is_that_of_the_run(kept, truth, what):
    """What the table is compared with is of the same model."""
    loss = kept["directional_derivatives"].value("loss")
    assert loss == pytest.approx(truth.shares.sum(), rel=1e-5)
    assert len(getattr(truth, what)) == kept.document["num_parameters"]
