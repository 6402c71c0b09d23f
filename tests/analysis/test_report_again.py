"""A finished folder alone gives the report that its run wrote, or one sentence."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest

from t5x_fwdloss import report
from t5x_fwdloss.analysis import (
    GroupTraces,
    NonFiniteLossError,
    SpectralDensity,
    Trace,
)
from t5x_fwdloss.analysis.measurements import Measurement
from t5x_fwdloss.analysis.measurements.context import result
from t5x_fwdloss.analysis.numbers import Number
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.analysis.store import records

from . import runs
from .test_training_record import PROBES, write


@dataclasses.dataclass(frozen=True)
class Odd(Measurement):
    """Numbers that JSON lacks, settings that it changes, a figure of its own."""

    name: str = "odd"
    values: tuple[float, ...] = (1.0, 2.0)

    def run(self, context):
        inf = float("inf")
        return result(
            self,
            {
                "infinite": Number(inf, "1", inf, "spread", interval=(0.5, inf)),
                "unknown": Number(float("nan"), "nat", float("nan"), "spread"),
            },
        )

    def plots(self):
        return (Plot("The values.", self._draw),)

    def _draw(self, _):
        (axis,) = figures.panels(1)
        axis.plot([0, 1], self.values, label="values")
        return axis.figure


@dataclasses.dataclass(frozen=True)
class Broken(Measurement):
    """A measurement that meets an impossible number."""

    name: str = "broken"

    def run(self, context):
        raise NonFiniteLossError("the loss must be finite: got nan.")


@pytest.fixture
def folder(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "run")


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_page_is_the_same_bytes_and_nothing_else_changes(folder, capsys):
    before = content(folder)
    (folder / "report.html").write_text("lost")
    assert report.attempt([str(folder)]) == 0
    assert content(folder) == before
    assert f"Report: {folder}/report.html" in capsys.readouterr().out


def test_it_is_the_same_with_every_part_that_a_report_may_have(tmp_path):
    write(tmp_path / "model", PROBES)
    host = runs.host(checkpoint=str(tmp_path / "model" / "checkpoint_50"))
    measured = [Trace(num_probes=2), SpectralDensity(num_probes=2, num_steps=3)]
    measured += [GroupTraces(num_probes=4), Odd(), Broken()]
    path = tmp_path / "run"
    # The run has ended, with a measurement that failed.
    assert runs.run(path, host=host, measurements=measured) == 1
    before = (path / "report.html").read_bytes()
    assert b"Stopped: the loss must be finite" in before
    assert "[0.5, \N{EN DASH}]".encode() in before
    again = tmp_path / "again.html"
    modules = [__name__]
    assert report.attempt([str(path)], output=str(again), modules=modules) == 0
    assert again.read_bytes() == before


def test_a_class_that_is_not_known_is_asked_for(tmp_path, capsys):
    assert runs.run(tmp_path, measurements=[Odd()]) == 0
    before = content(tmp_path)
    assert report.attempt([str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--import=MODULE with the module that defines Odd" in said
    assert report.attempt([str(tmp_path)], modules=["no.such.module"]) == 1
    assert "got 'no.such.module'" in capsys.readouterr().err
    assert content(tmp_path) == before


def changed(folder, change):
    """The folder with another document, sealed again."""
    document = records.read(folder / "results.json")
    change(document)
    records.write(folder / "results.json", document)


def unlink(name):
    return lambda folder: (folder / name).unlink()


def begun(folder):
    (folder / "results.json").unlink()
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "run.json").write_text("{}")


def other_digit(folder):
    path = folder / "results.json"
    path.write_text(path.read_text().replace('"step": 50', '"step": 51', 1))


def other_arrays(folder):
    shutil.copy(folder / "hessian_trace.npz", folder / "hessian_eigenpairs.npz")


def truncated(folder):
    path = folder / "hessian_trace.npz"
    path.write_bytes(path.read_bytes()[:40])


def other_setting(document):
    document["measurements"][2]["settings"]["num_samples"] = 3


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "there is no such folder"),
        (unlink("results.json"), "it has no results.json"),
        (begun, "its run has not finished; the command that began it resumes it"),
        (other_digit, "its checksum is missing or differs"),
        (other_arrays, "hessian_eigenpairs.npz must hold the arrays"),
        (truncated, "hessian_trace.npz must be whole and readable"),
        (unlink("hessian_trace.npz"), "hessian_trace.npz must be whole and readable"),
        (
            lambda folder: changed(folder, lambda found: found.pop("schema_version")),
            "must have the schema_version of this version, 1: got none; another version",
        ),
        (
            lambda folder: changed(
                folder, lambda found: found.update(schema_version=2)
            ),
            "must have the schema_version of this version, 1: got 2; another version",
        ),
        (
            lambda folder: changed(folder, other_setting),
            "the settings that Trace has in this version",
        ),
    ],
)
def test_what_is_no_finished_run_is_said_and_left(folder, capsys, damage, words):
    damage(folder)
    before = content(folder) if folder.exists() else None
    assert report.attempt([str(folder)]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    (line,) = found.err.splitlines()
    assert line.startswith("t5x_fwdloss.report: ")
    assert str(folder) in line or "Trace" in line
    assert words in line
    assert (content(folder) if folder.exists() else None) == before


def test_a_path_that_is_no_folder_and_none_at_all_are_said(folder, capsys):
    assert report.attempt([str(folder / "results.json")]) == 1
    assert "results.json must be the folder of a run" in capsys.readouterr().err
    assert report.attempt([]) == 1
    assert "got none" in capsys.readouterr().err


PROBE = """
import sys
sys.argv = ["report", *{arguments!r}]
import runpy
try:
    runpy.run_module("t5x_fwdloss.report", run_name="__main__", alter_sys=True)
except SystemExit as stopped:
    assert not stopped.code, stopped.code
from jax._src import xla_bridge
print([m for m in ("t5x", "tensorflow", "seqio") if m in sys.modules])
print(dict(xla_bridge._backends))
"""


def test_the_command_needs_no_host_and_no_device(folder):
    arguments = [str(folder), "--format=csv", f"--output={folder}/numbers.csv"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(arguments=arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    said = done.stdout.splitlines()
    assert said == [f"Report: {folder}/numbers.csv", "[]", "{}"]
    lines = (folder / "numbers.csv").read_text().splitlines()
    document = json.loads((folder / "results.json").read_text())
    assert len(lines) == 1 + sum(len(x["results"]) for x in document["measurements"])
