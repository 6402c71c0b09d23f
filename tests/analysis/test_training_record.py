"""The report's curve of the training: the numbers of its event files, step by step."""

import json

import numpy as np
import pytest
from clu import metric_writers

from t5x_fwdloss.analysis import Trace
from t5x_fwdloss.analysis.report import training

from . import runs

PROBES = {
    20: {
        "loss": 2.5,
        "critical_sharpness": 3.25,
        "directional_sharpness": 3.0,
        "critical_multiple": 4.0,
    },
    # Neither the search nor the learning rate gave a number here.
    40: {"loss": 2.0, "slope": -1.0},
    60: {
        "loss": 1.75,
        "critical_sharpness": 7.0,
        "directional_sharpness": 6.5,
        "critical_multiple": 0.5,
    },
}


def write(folder, probes):
    """Event files as the standalone training writes them."""
    writer = metric_writers.SummaryWriter(str(folder))
    for step, numbers in probes.items():
        tags = {f"curvature/{name}": x for name, x in numbers.items()}
        writer.write_scalars(step, {"train/loss": 9.0} | tags)
    writer.close()


def values(record):
    return {
        name: dict(zip(x["steps"], x["values"], strict=True))
        for name, x in record.items()
    }


def expected(probes):
    names = {name for numbers in probes.values() for name in numbers}
    return {
        name: {step: x[name] for step, x in probes.items() if name in x}
        for name in names
    }


@pytest.mark.parametrize("inside", ["", "train"])
def test_the_record_is_that_of_the_events_beside_the_checkpoint(tmp_path, inside):
    write(tmp_path / inside, PROBES)
    found = training.record(str(tmp_path / "checkpoint_60"))
    assert values(found) == expected(PROBES)
    assert found["loss"]["steps"] == [20, 40, 60]


def test_a_step_that_was_trained_again_has_its_later_numbers(tmp_path):
    write(tmp_path, PROBES)
    (first,) = tmp_path.glob("events.*")
    first.rename(tmp_path / "events.out.tfevents.1")  # names begin with their time
    write(tmp_path, {60: {"loss": 1.5}, 80: {"loss": 1.25}})
    found = training.record(str(tmp_path / "checkpoint_80"))
    assert values(found)["loss"] == {20: 2.5, 40: 2.0, 60: 1.5, 80: 1.25}


def test_a_file_that_was_cut_off_counts_up_to_there(tmp_path, caplog):
    write(tmp_path, PROBES)
    (path,) = tmp_path.glob("events.*")
    path.write_bytes(path.read_bytes()[:-9])
    found = values(training.record(str(tmp_path / "checkpoint_60")))
    assert {20: 2.5, 40: 2.0}.items() <= found["loss"].items()
    assert found["critical_multiple"] == {20: 4.0}
    assert not caplog.messages


def test_events_that_cannot_be_read_are_said_and_stop_nothing(tmp_path, caplog):
    (tmp_path / "events.out.tfevents.1").mkdir()
    assert training.record(str(tmp_path / "checkpoint_60")) == {}
    assert "The training's events are not in the report" in caplog.text


def test_every_curve_of_the_figure_has_the_record_s_numbers(tmp_path):
    write(tmp_path, PROBES)
    found = training.record(str(tmp_path / "checkpoint_60"))
    loss, sharpness = training.draw(found, 60).axes
    curve = lambda line: dict(
        zip(*map(np.ndarray.tolist, line.get_data()), strict=True)
    )
    curves = {line.get_label(): curve(line) for line in sharpness.lines[:3]}
    wanted = values(found)
    assert curves == {
        "critical sharpness": wanted["critical_sharpness"],
        "directional sharpness": wanted["directional_sharpness"],
        # The learning rate of a step is 2 over this: 3.25 * 4 and 7 * 0.5.
        "2 / learning rate": {20: 13.0, 60: 3.5},
    }
    assert curve(loss.lines[0]) == wanted["loss"]
    assert [axis.lines[-1].get_xdata() for axis in (loss, sharpness)] == [[60, 60]] * 2


def test_a_run_on_a_probed_checkpoint_keeps_and_draws_the_record(tmp_path):
    write(tmp_path / "model", PROBES)
    host = runs.host(checkpoint=str(tmp_path / "model" / "checkpoint_50"))
    measured = [Trace(num_probes=2)]
    assert runs.run(tmp_path / "run", host=host, measurements=measured) == 0
    document = json.loads((tmp_path / "run" / "results.json").read_text())
    assert values(document["training"]) == expected(PROBES)
    page = (tmp_path / "run" / "report.html").read_text()
    section = page[page.index("<section id='training'>") :]
    assert section.index("<svg") < section.index("</section>")
    assert "checkpoint analyzed here, of step 50." in section


def test_without_probes_the_report_says_nothing_of_them(finished_run):
    document = json.loads((finished_run / "results.json").read_text())
    assert document["training"] == {}
    assert "Curvature while training" not in (finished_run / "report.html").read_text()
