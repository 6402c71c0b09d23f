"""What a landscape reads off the losses at its points, on one split of the data."""

import re
from typing import Any

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.along import barriers
from t5x_fwdloss.analysis.measurements.along.plane import Plane
from t5x_fwdloss.analysis.numbers import Number


def prefix_of(split: str | None) -> str:
    """What the names of another split's numbers and arrays begin with; '' for None."""
    return "" if split is None else f"on_{re.sub(r'[^A-Za-z0-9]+', '_', split)}/"


class Readings:
    """The numbers and arrays of one split.

    Attributes:
        loss: the loss at the center.
    """

    def __init__(self, plane: Plane, rows: np.ndarray, number: int, split: str | None):
        """Reads its columns of all points.

        Args:
            plane: the plane.
            rows: for each mark and then each point of the grid, what `plane.at` gave.
            number: the split's place among the plane's objectives.
            split: the name of another split; None: the run's own.
        """
        self._plane, self._prefix = plane, prefix_of(split)
        self._width = rows.shape[1] // len(plane.objectives)
        self._number = number
        rows = self._columns(rows)
        shape = tuple(map(len, plane.coefficients))
        self._at_marks, on_grid = np.split(rows, [len(plane.marks)])
        self._losses = on_grid[:, 0].reshape(shape)
        self._accuracies = on_grid[:, 1:].reshape(*shape, -1)
        self.loss = self._at_marks[0, 0]
        where = np.unravel_index(np.argmin(self._losses), shape)
        self._smallest = tuple(
            float(x[i]) for x, i in zip(plane.coefficients, where, strict=True)
        )
        self._barrier = self._found_barrier()

    def numbers(self, unit: str) -> dict[str, Number]:
        """The numbers by name, the loss first.

        Args:
            unit: that of the loss.
        """
        units = {"loss": unit, "accuracy": "1"}
        found = {
            name: Number(value, units[name.rpartition("/")[2]])
            for name, value in self._marked(self._at_marks).items()
        }
        if self._barrier:
            found |= self._barrier.numbers(unit)
        found["smallest_loss"] = Number(float(self._losses.min()), unit)
        for number, x in enumerate(self._smallest):
            found[f"smallest_loss_place_{number + 1}"] = Number(x, "1")
        return self._named(found)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        found = {"losses": self._losses, "losses_at_marks": self._at_marks[:, 0]}
        if self._width > 1:
            found["accuracies"] = self._accuracies[..., 0]
        return self._named(found)

    def again(self, params: PyTree, marked: np.ndarray) -> dict[str, float]:
        """The same numbers around other parameters, at the places that were found.

        Args:
            params: the point of coefficients zero.
            marked: what `plane.at` gives there at the marks.
        """
        marked = self._columns(marked)
        at = lambda place: float(self._columns(self._row(place, params))[0, 0])
        found = self._marked(marked)
        found["smallest_loss"] = at(self._smallest)
        if self._barrier:
            chord = np.interp(self._barrier.place, (0, 1), marked[:, 0])
            found["barrier_height"] = at((self._barrier.place,)) - float(chord)
        return self._named(found)

    def _row(self, place, params):
        return np.array([self._plane.at(place, params)])

    def _columns(self, rows):
        return rows[:, self._number * self._width :][:, : self._width]

    def _named(self, found: dict[str, Any]) -> dict[str, Any]:
        return {f"{self._prefix}{name}": x for name, x in found.items()}

    def _marked(self, rows) -> dict[str, float]:
        """Loss and accuracy at the center and at other checkpoints, by name."""
        names = ("loss", "accuracy")[: self._width]
        return {
            f"{label}/{name}" if label else name: float(x)
            for label, row in zip(self._plane.marks, rows, strict=True)
            for name, x in zip(names, row, strict=True)
        }

    def _found_barrier(self) -> barriers.Barrier | None:
        if not self._plane.is_line_to_checkpoint:
            return None
        places = self._plane.axes[0].coefficients
        inside = (places > 0) & (places < 1)
        if not inside.any():
            return None
        ends = self._at_marks[:, 0]
        return barriers.barrier(
            np.concatenate([[0.0], places[inside], [1.0]]),
            np.concatenate([ends[:1], self._losses[inside], ends[1:]]),
        )
