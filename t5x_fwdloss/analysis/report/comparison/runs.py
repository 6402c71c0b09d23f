"""The runs of a comparison: their labels, what differs, and whether they compare."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import page
from t5x_fwdloss.analysis.report.model_facts import SIZES
from t5x_fwdloss.analysis.report.terminal import DASH
from t5x_fwdloss.analysis.store.finished_run import FinishedRun

# Settings that say which quantity a measurement is of, not how well it is measured.
OF_QUANTITY = ("matrix", "group", "preconditioned", "damping", "groups")
# Settings of the loss that change its value.
OF_LOSS = ("label_smoothing", "z_loss")


@dataclasses.dataclass(frozen=True)
class Run:
    """One of the runs.

    Attributes:
        label: its name in the comparison.
        finished: the run.
        results: its measurements by name.
        obstacles: why its numbers do not compare with those of the first; empty if
            they do.
    """

    label: str
    finished: FinishedRun
    results: Mapping[str, MeasurementResult]
    obstacles: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fact:
    """What the runs were made with, one value per run."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether it is not the same in all runs."""
        return len(set(self.values)) > 1


def compared(finished: Sequence[FinishedRun]) -> list[Run]:
    """The runs with their labels.

    Args:
        finished: two runs or more, the first of which is the others' reference.

    Raises:
        ValueError: a folder is given twice.
    """
    paths = [str(run.path) for run in finished]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice:
        raise ValueError(
            f"The runs to compare must be different folders: got {twice} twice."
        )
    first = finished[0].document
    return [
        Run(
            label,
            run,
            {result.name: result for result in run.results},
            obstacles(first, run.document),
        )
        for label, run in zip(labels(paths), finished, strict=True)
    ]


def labels(paths: Sequence[str]) -> list[str]:
    """The shortest part of each path that distinguishes it from the others.

    That is one part of the path, the last that differs between all of them, or all parts
    but those that they share at the beginning and the end.
    """
    parts = [path.rstrip("/").split("/") for path in paths]
    if len({len(x) for x in parts}) == 1:
        for column in reversed(list(zip(*parts, strict=True))):
            if len(set(column)) == len(paths) and "" not in column:
                return list(column)
    start = _num_shared(parts)
    end = _num_shared([x[start:][::-1] for x in parts])
    found = ["/".join(x[start : len(x) - end]) for x in parts]
    if all(found):
        return found
    # One of them lies within another.
    return ["/".join(x[max(start - 1, 0) :]) for x in parts]


def _num_shared(parts) -> int:
    same = [len(set(column)) == 1 for column in zip(*parts, strict=False)]
    return same.index(False) if False in same else len(same)


def obstacles(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Why a run's numbers do not compare with another's, in a few words each.

    Args:
        first: the content of `results.json`.
        other: that of the other run.
    """

    def differ(*names):
        return any(first[name] != other[name] for name in names)

    normalizers = [
        (x["normalizer"]["kind"], x["normalizer"]["W"]) for x in (first, other)
    ]
    losses = [[x["loss"].get(name) for name in OF_LOSS] for x in (first, other)]
    sizes = [x["model"]["sizes"] for x in (first, other)]
    found = {
        "other batches": differ("batches_hash"),
        "another normalizer": normalizers[0] != normalizers[1],
        "another loss function": losses[0] != losses[1],
        "other dropout": differ("dropout_seed"),
        "another model size": differ("num_parameters", "parameters_left_out")
        or sizes[0] != sizes[1],
    }
    return tuple(words for words, is_one in found.items() if is_one)


def same_quantity(first: MeasurementResult, other: MeasurementResult) -> bool:
    """Whether two results of the same name are of the same quantity."""
    keys = lambda x: (x.kind, *(x.settings.get(name) for name in OF_QUANTITY))
    return keys(first) == keys(other)


def facts(runs: Sequence[Run]) -> list[Fact]:
    """What each run was made with, in words; a dash where a run does not say it."""
    found = [_facts(run.finished.document) for run in runs]
    return _aligned(found)


def settings(results: Sequence[MeasurementResult | None]) -> list[Fact]:
    """The settings of one measurement in each run that has it."""
    found = [
        {} if x is None else {k: str(v) for k, v in x.settings.items() if k != "name"}
        for x in results
    ]
    return _aligned(found)


def _aligned(found) -> list[Fact]:
    names = dict.fromkeys(name for of_run in found for name in of_run)
    return [Fact(name, tuple(x.get(name, DASH) for x in found)) for name in names]


def _facts(document) -> dict[str, str]:
    found = page.facts(document) | page.environment(document)
    # Each part of these is a fact of its own here.
    for joined in ("Loss", "Model", "Versions"):
        del found[joined]
    sizes = document["model"]["sizes"]
    found |= {"Model": document["model"]["class"] or DASH}
    found |= {SIZES[k].capitalize(): f"{v:,}" for k, v in sizes.items() if k in SIZES}
    found |= {"Parameters' checksum": document["parameters_checksum"][:16]}
    found |= {"Loss at the parameters": f"{document['loss_value']:.9g}"}
    found |= {name.replace("_", " "): str(x) for name, x in document["loss"].items()}
    machine = document["environment"]
    return found | machine["versions"] | {"Python": machine["python"]}
