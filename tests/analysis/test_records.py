"""Records of runs and sweeps are the numbers of their files, one for each."""

import importlib.util
import json
import math
import pathlib
import shutil

import pytest

from t5x_fwdloss import analysis, report
from t5x_fwdloss.analysis.numbers import Number
from t5x_fwdloss.analysis.store import files, records

from . import sweeps


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    model_dir = sweeps.model_folder(folder / "model", (100, 200))
    trace = [analysis.Trace(num_probes=2, block_size=2)]
    assert sweeps.run(model_dir, folder / "out", measurements=trace) == 0
    return folder / "out"


def numbers(folder):
    """Each number of a results.json, with its measurement and its name."""
    document = json.loads((folder / "results.json").read_text())
    return document, [
        (entry, name, x)
        for entry in document["measurements"]
        for name, x in entry["results"].items()
    ]


def test_a_run_has_a_record_for_each_number_of_its_file(finished_run):
    document, wanted = numbers(finished_run)
    found = analysis.records(finished_run)
    assert len(found) == len(wanted) > 10
    for record, (entry, name, x) in zip(found, wanted, strict=True):
        low, high = x["interval"] or (None, None)
        assert record == {
            "run": finished_run.name,
            "path": str(finished_run),
            "step": document["step"],
            "measurement": entry["name"],
            "kind": entry["kind"],
            "matrix": entry["matrix"],
            "number": name,
            "value": x["value"],
            "error": x["error"],
            "error_kind": x["error_kind"],
            "interval_low": low,
            "interval_high": high,
            "unit": x["unit"],
            "converged": x["converged"],
            "count": x["count"],
        }
        assert isinstance(record["value"], float)
    assert {record["matrix"] for record in found} == {None, "hessian"}


def test_a_sweep_has_the_records_of_its_steps_and_so_have_their_folders(sweep):
    found = analysis.records(str(sweep))
    steps = [sweep / "step_100", sweep / "step_200"]
    assert found == analysis.records(steps)
    _, wanted = zip(*map(numbers, steps), strict=True)
    assert [x["value"] for x in found] == [x["value"] for s in wanted for *_, x in s]
    assert [x["step"] for x in found] == [100] * len(wanted[0]) + [200] * len(wanted[1])
    assert {x["run"] for x in found} == {"step_100", "step_200"}


def test_a_sweep_stands_beside_a_run(sweep, finished_run):
    found = analysis.records([finished_run, sweep])
    assert [x["step"] for x in found if x["number"] == "trace"] == [50, 100, 200]
    assert len({x["run"] for x in found}) == 3


def test_steps_without_results_are_left_out_and_a_sweep_without_any_is_refused(
    sweep, tmp_path
):
    shutil.copytree(sweep, tmp_path / "part")
    (tmp_path / "part" / "step_100" / "results.json").unlink()
    assert {x["step"] for x in analysis.records(tmp_path / "part")} == {200}
    (tmp_path / "part" / "step_200" / "results.json").unlink()
    with pytest.raises(files.StorageError, match=r"sweep .* none of its 2 steps has"):
        analysis.records(tmp_path / "part")


def test_a_missing_folder_and_one_given_twice_are_refused(tmp_path, finished_run):
    with pytest.raises(files.StorageError, match="there is no such folder"):
        analysis.records(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must be different folders"):
        analysis.records([finished_run, finished_run])


def test_the_command_takes_a_sweep_as_its_steps(sweep, capsys):
    assert report.attempt([str(sweep)], output_format="csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(analysis.records(sweep))
    assert lines[0] == ",".join(analysis.records(sweep)[0])


def test_an_unknown_value_is_nan_and_a_missing_error_is_none(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    document = records.read(folder / "results.json")
    first = document["measurements"][0]["results"]
    name = next(iter(first))
    first[name] = vars(Number(math.nan, "nat", error=math.nan, error_kind="unknown"))
    records.write(folder / "results.json", document)
    found = analysis.records(folder)
    assert math.isnan(found[0]["value"])
    assert math.isnan(found[0]["error"])
    assert found[0]["interval_low"] is None
    exact = [x for x in found if x["error_kind"] == "exact up to rounding"]
    assert exact
    assert {x["error"] for x in exact} == {None}


def test_pandas_makes_a_table_of_them(finished_run):
    if importlib.util.find_spec("pandas") is None:
        # Without pandas: what its columns of one type need.
        for record in analysis.records(finished_run):
            assert [type(record[x]) for x in ("value", "converged", "step")] == [
                float,
                bool,
                int,
            ]
        return
    import pandas  # pyright: ignore[reportMissingImports]

    table = pandas.DataFrame(analysis.records(finished_run))
    assert str(table["value"].dtype) == "float64"
    assert str(table["error"].dtype) == "float64"
    assert str(table["converged"].dtype) == "bool"
    assert pathlib.Path(table["path"].iloc[0]) == finished_run
