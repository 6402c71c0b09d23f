"""A run that has ended, as its folder has it; read without a device or a lock."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from t5x_fwdloss.analysis.numbers import MeasurementResult, Number, result_from_json
from t5x_fwdloss.analysis.store import files, records

# The parts of `results.json` that its readers need, by the part that holds them.
FORM = {
    "": (
        *("status", "checkpoint", "step", "task", "seed", "loss", "normalizer"),
        *("num_tokens", "num_batches", "batch_shapes", "batches_hash", "dropout_seed"),
        *("matmul_precision", "activation_dtype", "parameters_checksum", "loss_value"),
        *("optimizer", "num_parameters", "parameters_left_out", "environment"),
        *("products", "preflight", "measurements", "model", "seconds", "training"),
    ),
    "normalizer": ("kind", "W", "unit", "words"),
    "model": ("class", "sizes", "parameter_dtypes"),
    "environment": (
        *("versions", "python", "commit", "device_kind", "num_devices"),
        *("num_processes", "mesh", "time"),
    ),
}
OF_FINISHED = ("kind", "settings", "notes", "seconds", "results", "arrays_sha256")
OF_NUMBER = tuple(field.name for field in dataclasses.fields(Number))


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
    missing = _missing(document)
    if missing:
        raise files.StorageError(
            f"{results} must have the form that this version writes: it has no "
            f"{missing}, so another version wrote it, whose report is left as it is."
        )
    return document


def _missing(document) -> str:
    """The first part that a reader needs and the document lacks; '' for none."""
    for part, names in FORM.items():
        lacking = _first(names, document[part] if part else document)
        if lacking:
            return f"{part}.{lacking}".lstrip(".")
    for entry in document["measurements"]:
        status = entry.get("status")
        wanted = OF_FINISHED if status == "finished" else ("status", "reason")
        lacking = _first(("name", *wanted), entry)
        for name, number in entry.get("results", {}).items():
            if not lacking and set(number) != set(OF_NUMBER):
                lacking = f"{name} of {', '.join(OF_NUMBER)}"
        if lacking:
            return f"measurements.{lacking}"
    return ""


def _first(names, found) -> str:
    if not isinstance(found, Mapping):
        return names[0]
    return next((name for name in names if name not in found), "")
