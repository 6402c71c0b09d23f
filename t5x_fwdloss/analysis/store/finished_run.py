"""A run that has ended, as its folder has it; read without a device or a lock."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from etils import epath

from t5x_fwdloss.analysis.numbers import MeasurementResult, result_from_json
from t5x_fwdloss.analysis.store import files, records

# Of `results.json`: counted up with each change of its members, so that a reader of
# another version need not guess them.
SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that has ended.

    Attributes:
        path: its folder.
        document: the content of `results.json`.
        results: the measurements that finished, in order, with their arrays.
    """

    path: epath.Path
    document: dict[str, Any]
    results: list[MeasurementResult]


def read(path: epath.PathLike) -> FinishedRun:
    """The run in a folder, every checksum verified.

    A folder without a run that has ended, a damaged file, or another version's form
    raises `StorageError`.

    Args:
        path: the output folder of a run, local or in remote storage.
    """
    path = files.user_path(path)
    document = _document(path)
    results = [
        result_from_json(entry, records.arrays(entry, path / f"{entry['name']}.npz"))
        for entry in document["measurements"]
        if entry["status"] == "finished"
    ]
    return FinishedRun(path, document, results)


def read_all(paths: Sequence[epath.PathLike]) -> list[FinishedRun]:
    """The runs in several folders, where that of a sweep is its steps with results.

    Args:
        paths: the output folders of runs and sweeps.
    """
    return [read(run) for path in paths for run in _runs_in(files.user_path(path))]


def _runs_in(path) -> list[epath.Path]:
    sweep = path / "sweep.json"
    with files.reading(sweep):
        if not sweep.exists():
            return [path]
    steps = [path / x["folder"] for x in records.read(sweep)["steps"]]
    with files.reading(path):
        found = [step for step in steps if (step / "results.json").exists()]
    if not found:
        raise files.StorageError(
            f"{path} must be the folder of a sweep with a step that has finished: none "
            f"of its {len(steps)} steps has."
        )
    return found


def _document(path) -> dict[str, Any]:
    results = path / "results.json"
    with files.reading(path):
        ended, begun = results.exists(), (path / "unfinished" / "run.json").exists()
        is_folder, there = path.is_dir(), path.exists()
    if not ended:
        state = "there is no such folder"
        if there:
            state = "it has no results.json" if is_folder else "it is a file"
        if begun:
            state = "its run has not finished; the command that began it resumes it"
        raise files.StorageError(
            f"{path} must be the folder of a run that has finished: {state}."
        )
    document = records.read(results)
    records.check_schema(results, document, SCHEMA_VERSION)
    return document
