"""The plane that directions span, and the loss as a function of their coefficients."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.along.named import moved
from t5x_fwdloss.analysis.measurements.context import Context
from t5x_fwdloss.curvature.vectors import trees

# The part of a direction that another leaves, below which rounding decides where it points.
PARALLEL = 1e-3


@dataclasses.dataclass(frozen=True)
class Axis:
    """A direction of the plane.

    Attributes:
        label: its name in the results.
        vector: the direction.
        length: its norm.
        coefficients: the multiples of it on the grid.
        is_checkpoint: whether it leads to another checkpoint.
        angle: between it and the first direction, in degrees, before that was taken out.
        part_of_first: the multiple of the first direction that was taken out.
    """

    label: str
    vector: PyTree
    length: float
    coefficients: np.ndarray
    is_checkpoint: bool
    angle: float = 0.0
    part_of_first: float = 0.0


def spanned(first: Axis, second: Axis, *, orthogonalize: bool) -> Axis | None:
    """The second direction with its angle, made orthogonal; None if it is parallel."""
    part = float(trees.inner(first.vector, second.vector)) / first.length**2
    rest = trees.axpy(-part, first.vector, second.vector)
    # Once more: rounding leaves some of it, where most was taken out.
    again = float(trees.inner(first.vector, rest)) / first.length**2
    rest = trees.axpy(-again, first.vector, rest)
    height = float(trees.norm(rest))
    if height <= PARALLEL * second.length:
        return None
    angle = math.degrees(math.atan2(height, (part + again) * first.length))
    if not orthogonalize:
        return dataclasses.replace(second, angle=angle)
    length = height
    if not second.is_checkpoint:
        length = second.length
        rest = trees.scale(length / height, rest)
    return dataclasses.replace(
        second, vector=rest, length=length, angle=angle, part_of_first=part + again
    )


class Plane:
    """The loss as a function of the coefficients of one or two directions.

    Attributes:
        axes: the directions.
        objectives: the run's loss and, if another split is asked for, that split's.
        coefficients: the multiples on the grid, for each direction.
        marks: places besides the grid by name: the center and other checkpoints.
    """

    def __init__(self, context: Context, axes: list[Axis], other: str | None = None):
        """Computes nothing yet.

        Args:
            context: the run.
            axes: the directions.
            other: the name of another split of the data, if its loss is measured too.
        """
        self.axes, self._context = axes, context
        self.objectives = [context.objective]
        if other is not None:
            self.objectives.append(context.objective.on_split(other))
        self.coefficients = [axis.coefficients.tolist() for axis in axes]
        self.marks = {"": (0.0,) * len(axes)}
        for number, axis in enumerate(axes):
            if axis.is_checkpoint:
                place = [0.0] * len(axes)
                place[0], place[number] = axis.part_of_first, 1.0
                if number == 0:
                    place[0] = 1.0
                self.marks[axis.label] = tuple(place)

    @property
    def is_line_to_checkpoint(self) -> bool:
        """Whether there is one direction, to another checkpoint."""
        return len(self.axes) == 1 and self.axes[0].is_checkpoint

    def at(self, place: Sequence[float], params: PyTree | None = None) -> list[float]:
        """The loss and, if it is known, the accuracy at a place, on each split.

        Args:
            place: the coefficients.
            params: the point of coefficients zero; None: the checkpoint.
        """
        origin = self._context.params if params is None else params
        point = moved(origin, place, [axis.vector for axis in self.axes])
        row: list[float] = []
        for objective in self.objectives:
            loss, accuracy = objective.value_and_accuracy(point)
            row += [loss] if accuracy is None else [loss, accuracy]
        return row

    def derivatives(self, params: PyTree) -> tuple[np.ndarray, np.ndarray]:
        """The first and second derivatives in the coefficients, at zero."""
        count = len(self.axes)
        slopes, matrix = np.zeros(count), np.zeros((count, count))
        for i, one in enumerate(self.axes):
            for j, other in enumerate(self.axes[: i + 1]):
                slopes[i], matrix[i, j] = self._context.objective.mixed(
                    params, one.vector, other.vector
                )
                matrix[j, i] = matrix[i, j]
        return slopes, matrix
