"""A finished run as its reader finds it: results.json, arrays, figures' data."""

import contextlib
import dataclasses
import io
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import HostInfo, Objective, run_analysis
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.analysis.report import figures

from . import cells, dense


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measurement of a run.

    Attributes:
        found: its part of results.json.
        arrays: its .npz file.
    """

    found: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def number(self, name: str) -> dict[str, Any]:
        return self.found["results"][name]

    def value(self, name: str) -> float:
        return self.number(name)["value"]


class Run:
    """A folder of results, what the run printed, and the figures of its report."""

    def __init__(self, path: pathlib.Path, printed: str, drawn: dict[str, Figure]):
        """Reads `results.json` once; arrays when they are asked for.

        Args:
            path: the output folder.
            printed: what the run wrote to standard output.
            drawn: the figures by measurement and number, `hessian_trace-0`.
        """
        self.path, self.printed, self.drawn = path, printed, drawn
        self.document = json.loads((path / "results.json").read_text())
        self._found = {x["name"]: x for x in self.document["measurements"]}

    @property
    def names(self) -> list[str]:
        return list(self._found)

    def __getitem__(self, name: str) -> Entry:
        """The measurement of this name."""
        with np.load(self.path / f"{name}.npz") as arrays:
            return Entry(self._found[name], {k: arrays[k] for k in arrays.files})

    def axes(self, name: str, number: int = 0):
        """The axes of one figure of a measurement."""
        return self.drawn[f"{name}-{number}"].axes


def run(path, measurements, memory_budget=None, **fields) -> Run:
    """A real run on the tiny T5."""
    drawn, printed = {}, io.StringIO()

    def keep(figure, salt):
        # Drawing takes seconds: the data of the report's own figures are looked at.
        drawn[salt] = figure
        return "<svg/>"

    given = {
        "objective": Objective.from_model(
            dense.model(),
            dense.batches(),
            load_batches=lambda split: dense.batches(seed=len(split)),
        ),
        "params": dense.parameters(),
        "measurements": measurements,
        "seed": cells.SEED,
        "host": HostInfo(
            checkpoint="/models/tiny",
            step=70,
            load_params=lambda _: dense.parameters(3),
            load_preconditioner=lambda: Preconditioner(
                dense.diagonal(),
                "an optimizer",
                learning_rate=cells.LEARNING_RATE,
                threshold=cells.THRESHOLD,
            ),
        ),
        "memory_budget": memory_budget,
    } | fields
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(figures, "to_svg", keep)
        status = run_analysis(
            given.pop("objective"), given.pop("params"), output_dir=path, **given
        )
    assert status == 0
    return Run(path, printed.getvalue(), drawn)
