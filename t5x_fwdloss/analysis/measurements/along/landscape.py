r"""The loss on a line or a plane through the parameters, beside its quadratic model.

With directions $d_1, d_2$ the loss is measured at $\theta + a d_1 + b d_2$ on a grid. With
the slopes $s_i = \langle g, d_i \rangle$ and $M_{ij} = \langle d_i, H d_j \rangle$, both by
forward mode, its model of second order is $L + s^T c + \tfrac12 c^T M c$, $c = (a, b)$.

On the line $\theta_a = (1 - a) \theta_0 + a \theta_1$ between two checkpoints the barrier is

$$ \max_{0 \le a \le 1} L(\theta_a) - (1 - a) L(\theta_0) - a L(\theta_1), $$

which is zero if the line never rises above the chord.

References:
  Goodfellow, Vinyals, Saxe 2015, Qualitatively characterizing neural network
  optimization problems (the line between two points).
  Li, Xu, Taylor, Studer, Goldstein 2018, Visualizing the loss landscape, section 4.
  Frankle, Dziugaite, Roy, Carbin 2020, Linear mode connectivity and the lottery ticket
  hypothesis, section 2 (the barrier; they subtract the mean of the two losses).
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import numpy as np

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.along import landscape_figures, named
from t5x_fwdloss.analysis.measurements.along.named import NORMALIZATIONS, Direction
from t5x_fwdloss.analysis.measurements.along.plane import Axis, Plane, spanned
from t5x_fwdloss.analysis.measurements.along.readings import Readings
from t5x_fwdloss.analysis.measurements.context import Context, Measurement, result
from t5x_fwdloss.analysis.numbers import MeasurementResult, Number
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature.vectors import trees

# Where no range is given: the first and the last multiple of a direction.
RANGES = {"random": (-1.0, 1.0), "checkpoint": (-0.5, 1.5)}
OTHER_RANGE = (-0.02, 0.02)


@dataclasses.dataclass
class GridState:
    """The loss and, if it is known, the accuracy at each point so far, on each split."""

    rows: list[list[float]]

    @property
    def num_products(self) -> int:
        """Points so far."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True)
class Landscape(Measurement):
    """The loss and the token accuracy on a line or a plane through the parameters.

    A direction is 'gradient', 'preconditioned_gradient', 'random:0', 'random:1' and so
    on, 'eigenvector:<measurement>:<place>' or 'checkpoint:<path>', the other checkpoint's
    parameters minus these. All but the last are as long as the parameters: coefficients
    are multiples of a direction, and 1 on the line to a checkpoint is that checkpoint.

    The optimizer's update has two directions: 'preconditioned_gradient' is that of the
    next step without momentum and weight decay, on these batches, with the opposite sign
    (negative coefficients go where the optimizer goes; the learning rate is only its
    length), and 'checkpoint:<path>' of a later checkpoint is the sum of all updates in
    between, as they were made.

    Random directions are normalized by filter, as in Li et al. 2018: each filter of the
    direction has the norm of the parameters' filter, so that filters of zeros stay zeros.
    A filter is the weights of one output of a kernel, or one token's embedding. On
    parameters without a second axis (scales of norms, biases) they are zero, as with the
    option `biasbn` of the reference implementation; `ignore_vectors = False` gives these
    parameters a direction of their own norm instead (the reference moves them along
    themselves).

    Results: `loss` and `accuracy` at the checkpoint; `smallest_loss` of all points, with
    its place; `angle` between two directions before the second is orthogonalized; along
    each direction, per unit of length, slope and curvature, and their mixed derivative
    `mixed_curvature`; at another checkpoint its loss and accuracy. The line to a checkpoint
    has `barrier_height`, the largest of its points from 0 to 1 above the chord; the error
    is what parabolas through neighboring points rise above it, at most. The accuracy is the
    share of the tokens that the loss counts whose label has the largest logit.

    With `other_split` every point is measured on as many batches of that split, too:
    losses, accuracies, smallest loss and barrier have names that begin with
    `on_<split>/`, and values that a run on that split would have. Directions, slopes and
    curvatures remain those of the run's own batches.

    Attributes:
        name: name in the results.
        directions: one or two directions.
        ranges: for each direction its first and its last coefficient; empty: -1 and 1 for
            random directions, -0.5 and 1.5 for checkpoints, else -0.02 and 0.02.
        num_points: points along each direction.
        orthogonalize: whether the second direction's part along the first is taken out.
        random_normalization: 'filter', 'leaf' or 'vector', as in
            `DirectionalDerivatives`.
        ignore_vectors: whether random directions are zero on parameters without a second
            axis.
        other_split: another split of the task, such as 'train' where the run reads
            'validation'; None: none.
    """

    needs_forward_mode: ClassVar = True

    name: settings.Words = "landscape"
    directions: Sequence[settings.Words] = ("random:0", "random:1")
    ranges: Sequence[Sequence[float]] = ()
    num_points: Annotated[int, settings.at_least(3), settings.at_most(2**15)] = 25
    orthogonalize: bool = True
    random_normalization: Annotated[str, settings.one_of(*NORMALIZATIONS)] = "filter"
    ignore_vectors: bool = True
    other_split: settings.Words | None = None

    @property
    def optimizer_setting(self) -> str:
        """The setting of the preconditioned gradient, if that is a direction."""
        wanted = "preconditioned_gradient" in self.directions
        return "directions" if wanted else ""

    @property
    def other_splits(self) -> Sequence[str]:
        """The other split, if there is one."""
        return () if self.other_split is None else (self.other_split,)

    def check_settings(self, earlier: Sequence[Measurement]) -> None:
        """Check the number and the names of directions, and their ranges.

        Args:
            earlier: the measurements before this one.

        Raises:
            ValueError: there are none or more than two, one is not known or occurs
                twice, or a range is not two increasing numbers.
        """
        if len(self.directions) not in (1, 2):
            raise ValueError(
                "Landscape.directions must be one direction or two: got "
                f"{len(self.directions)}."
            )
        if len(set(self._directions)) < len(self._directions):
            raise ValueError(
                "Landscape.directions must differ: got "
                f"{' and '.join(map(repr, self.directions))}."
            )
        for direction in self._directions:
            if direction.kind == "eigenvector":
                setting = "Landscape.directions"
                named.check_place(setting, direction, earlier)
        fits = all(len(x) == 2 and x[0] < x[1] for x in self.ranges)
        if self.ranges and (len(self.ranges) != len(self.directions) or not fits):
            raise ValueError(
                "Landscape.ranges must be empty, or for each direction two increasing "
                f"numbers: got {self.ranges!r} for {len(self.directions)} directions."
            )

    def validate(self, context: Context) -> None:
        """Check that the optimizer's state and what else is read load and fit.

        Otherwise, or where the run cannot load them, it raises `ValueError`.
        """
        for split in self.other_splits:
            context.objective.on_split(split)
        named.check_loaded(
            self._directions,
            context,
            {
                kind: f"'{kind}' in Landscape.directions"
                for kind in ("preconditioned_gradient", "checkpoint")
            },
        )

    def run(self, context: Context) -> MeasurementResult:
        """Measure point by point, from the saved state on if there is one."""
        axes, notes = self._axes(context)
        plane = Plane(context, axes, self.other_split)
        points = [*plane.marks.values(), *itertools.product(*plane.coefficients)]
        rows = context.resumed(
            self.name,
            GridState,
            len(points),
            functools.partial(_measured, plane, points),
            note=lambda state: f"loss {state.rows[-1][0]:.4g}",
        )
        context.step()
        numbers, arrays = _numbers(context, plane, np.asarray(rows), self.other_split)
        notes += context.rounding.notes
        return result(self, numbers, arrays=arrays, notes=tuple(notes))

    def plots(self) -> Sequence[Plot]:
        """The loss with its quadratic model, its surface, the accuracy."""
        return landscape_figures.PLOTS

    @property
    def _directions(self) -> list[Direction]:
        return [named.parse("Landscape.directions", x) for x in self.directions]

    def _axes(self, context) -> tuple[list["Axis"], list[str]]:
        """The directions that are there, and notes on the others."""
        axes: list[Axis] = []
        notes: list[str] = []
        length = float(trees.norm(trees.float_part(context.params)))
        for place, direction in enumerate(self._directions):
            vector = named.vector(
                direction,
                context,
                self.name,
                self.random_normalization,
                ignore_vectors=self.ignore_vectors,
            )
            size = 0.0 if vector is None else float(trees.norm(vector))
            if size == 0.0:
                notes.append(
                    f"The direction {self.directions[place]} is zero, or there is none, "
                    "and was left out."
                )
                continue
            if direction.kind not in ("checkpoint", "random") or (
                direction.kind == "random" and self.random_normalization == "vector"
            ):
                vector, size = trees.scale(length / size, vector), length
            first, last = self._range(place)
            axis = Axis(
                named.label(direction, self._directions),
                vector,
                size,
                np.linspace(first, last, self.num_points),
                is_checkpoint=direction.kind == "checkpoint",
            )
            if axes:
                axis = spanned(axes[0], axis, orthogonalize=self.orthogonalize)
            if axis is None:
                notes.append(
                    f"The direction {self.directions[place]} is parallel to the first up "
                    "to rounding and was left out."
                )
                continue
            axes.append(axis)
        return axes, notes

    def _range(self, place) -> tuple[float, float]:
        if self.ranges:
            first, last = self.ranges[place]
            return float(first), float(last)
        return RANGES.get(self._directions[place].kind, OTHER_RANGE)


def _measured(
    plane: Plane,
    points: list[tuple[float, ...]],
    on_step: Callable[[GridState], None],
    state: GridState | None,
) -> list[list[float]]:
    state = state or GridState([])
    for place in points[len(state.rows) :]:
        state.rows.append(plane.at(place))
        on_step(state)
    return state.rows


def _numbers(
    context: Context, plane: Plane, rows: np.ndarray, other_split: str | None
) -> tuple[dict[str, Number], dict[str, np.ndarray]]:
    """The numbers, with the network's rounding in their errors, and the arrays."""
    splits = [None, other_split][: len(plane.objectives)]
    readings = [Readings(plane, rows, *split) for split in enumerate(splits)]
    slopes, matrix = plane.derivatives(context.params)
    places = [np.asarray(x) for x in plane.coefficients]
    grid = np.stack(np.meshgrid(*places, indexing="ij"), -1) if places else np.zeros(0)
    arrays = {
        "model": np.asarray(
            readings[0].loss
            + grid @ slopes
            + np.einsum("...i,ij,...j", grid, matrix, grid) / 2
        ),
        "slopes": slopes,
        "hessian": matrix,
        "lengths": np.array([axis.length for axis in plane.axes]),
        "marks": np.array(list(plane.marks.values())),
    }
    arrays |= {f"coefficients_{i + 1}": x for i, x in enumerate(places)}
    numbers: dict[str, Number] = {}
    for reading in readings:
        arrays |= reading.arrays()
        numbers |= reading.numbers(context.unit)
    if len(plane.axes) == 2:
        numbers["angle"] = Number(plane.axes[1].angle, "°")
    for axis in plane.axes:
        numbers[f"{axis.label}/length"] = Number(axis.length, "θ")
    units = {"slope": context.slope_unit, "curvature": context.curvature_unit}
    for name, x in _local(plane, slopes, matrix).items():
        numbers[name] = Number(x, units[re.split("[/_]", name)[-1]])

    def at(params):
        marked = np.array([plane.at(x, params) for x in plane.marks.values()])
        found = _local(plane, *plane.derivatives(params))
        for reading in readings:
            found |= reading.again(params, marked)
        return found

    # Neither places nor lengths and angles have rounding of the network.
    exact = re.compile(r".*(place(_\d)?|length|angle)").fullmatch
    base = {name: x.value for name, x in numbers.items() if not exact(name)}
    return context.rounding.include(numbers, at, base), arrays


def _local(plane, slopes, matrix) -> dict[str, float]:
    """Slopes and curvatures at the center, per unit of length."""
    found = {}
    lengths = [axis.length for axis in plane.axes]
    for i, axis in enumerate(plane.axes):
        found[f"{axis.label}/slope"] = float(slopes[i] / lengths[i])
        found[f"{axis.label}/curvature"] = float(matrix[i, i] / lengths[i] ** 2)
    if len(lengths) == 2:
        found["mixed_curvature"] = float(matrix[0, 1] / np.prod(lengths))
    return found
