"""The numbers of one measurement in several runs, and their differences."""

import dataclasses
import math
from collections.abc import Sequence

from t5x_fwdloss.analysis.numbers import MeasurementResult, Number, is_statistical
from t5x_fwdloss.analysis.report.comparison.runs import Run, same_quantity

ANOTHER_QUANTITY = "another quantity"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A number minus that of the first run.

    Attributes:
        value: the difference.
        error: the joint error: the root of the sum of squares of two standard errors,
            the sum of other errors; None where neither number has an error.
        in_standard_errors: the difference in units of the joint standard error; None
            where one error is not statistical, or both are zero.
    """

    value: float
    error: float | None
    in_standard_errors: float | None


@dataclasses.dataclass(frozen=True)
class Cell:
    """A number of a run, None if the run lacks it, and its difference, if there is one."""

    number: Number | None
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A number of a measurement in every run."""

    name: str
    unit: str
    cells: tuple[Cell, ...]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measurement that two runs or more have.

    Attributes:
        name: its name.
        results: its result in each run; None where a run lacks it.
        obstacles: for each run, why its numbers do not compare with the first run's.
        rows: its numbers.
    """

    name: str
    results: tuple[MeasurementResult | None, ...]
    obstacles: tuple[tuple[str, ...], ...]
    rows: tuple[Row, ...]


def measured(runs: Sequence[Run], least: int = 2) -> list[Measured]:
    """The measurements of several runs, with all their numbers.

    Args:
        runs: the runs, the first of which is the others' reference.
        least: how many runs must have a measurement.
    """
    names = dict.fromkeys(name for run in runs for name in run.results)
    having = {name: sum(name in run.results for run in runs) for name in names}
    return [_measured(name, runs) for name in names if having[name] >= least]


def _measured(name, runs) -> Measured:
    results = tuple(run.results.get(name) for run in runs)
    first = results[0]
    obstacles = tuple(
        run.obstacles
        if first is None or found is None or same_quantity(first, found)
        else (*run.obstacles, ANOTHER_QUANTITY)
        for run, found in zip(runs, results, strict=True)
    )
    numbers: list[dict[str, Number]] = [
        {} if found is None else found.numbers for found in results
    ]
    labels = dict.fromkeys(label for of_run in numbers for label in of_run)
    rows = tuple(_row(label, numbers, obstacles) for label in labels)
    return Measured(name, results, obstacles, rows)


def _row(label, numbers, obstacles) -> Row:
    found = [of_run.get(label) for of_run in numbers]
    first, *others = found
    cells = [Cell(first)]
    for number, against in zip(others, obstacles[1:], strict=True):
        if first is None or number is None or against:
            cells.append(Cell(number))
        else:
            cells.append(Cell(number, difference(first, number)))
    unit = next(number.unit for number in found if number is not None)
    return Row(label, unit, tuple(cells))


def difference(first: Number, other: Number) -> Difference | None:
    """The other number minus the first; None if they have no difference.

    That is where their units differ, or where one is not finite.
    """
    value = other.value - first.value
    if first.unit != other.unit or not math.isfinite(value):
        return None
    errors = [x.error for x in (first, other) if x.error is not None]
    if not errors:
        return Difference(value, None, None)
    if not all(is_statistical(x.error_kind) for x in (first, other)):
        return Difference(value, sum(errors), None)
    joint = math.hypot(*errors)
    return Difference(value, joint, value / joint if joint > 0 else None)
