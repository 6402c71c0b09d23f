"""A measured number and a measurement's result, as they are reported and stored.

No number is reported alone: each has its unit, its error or the statement that it is
exact up to rounding, and whether it is converged.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

EXACT = "exact up to rounding"
INSIDE = "a bound from inside the spectrum"
WITHOUT_ERROR = (EXACT, INSIDE)
RESIDUAL = "residual norm: an eigenvalue lies this near"
STANDARD_ERROR = "standard error of the mean"


def is_statistical(kind: str) -> bool:
    """Whether an error is the standard deviation of an estimate, and nothing else.

    Args:
        kind: the kind of the error; one that includes rounding is not statistical.
    """
    return kind.startswith("standard error") and "rounding" not in kind


@dataclasses.dataclass(frozen=True)
class Number:
    """One number of a report.

    Attributes:
        value: the number.
        unit: its unit, '1' for a pure number.
        error: half-width of its error bar; None if there is none.
        error_kind: the meaning of the error, or why there is none.
        converged: whether the method reached its requested accuracy.
        interval: confidence interval, if there is one.
        count: number of samples, steps or products behind it.
    """

    value: float
    unit: str
    error: float | None = None
    error_kind: str = EXACT
    converged: bool = True
    interval: tuple[float, float] | None = None
    count: int | None = None


@dataclasses.dataclass(frozen=True)
class MeasurementResult:
    """The result of one measurement.

    Attributes:
        name: the measurement's name, unique in its run.
        kind: the measurement's class.
        settings: the measurement's constructor arguments.
        numbers: the numbers by name, in the order of the report.
        arrays: the arrays of the .npz file.
        notes: notes for the reader, in sentences.
        seconds: wall time, compilation included.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    numbers: dict[str, Number]
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def converged(self) -> bool:
        """Whether every number is converged."""
        return all(number.converged for number in self.numbers.values())


@dataclasses.dataclass(frozen=True)
class Failure:
    """A measurement that was stopped by an impossible number."""

    name: str
    kind: str
    settings: dict[str, Any]
    reason: str


def to_json(value: Any) -> Any:
    """The value in JSON's types; NaN and infinities, which JSON lacks, become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json(
            {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        )
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_json(value.tolist())
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def result_to_json(result: MeasurementResult) -> dict[str, Any]:
    """The result with the checksum of its arrays, which are stored beside it."""
    found = to_json(dataclasses.replace(result, arrays={}))
    del found["arrays"]
    numbers = found.pop("numbers")
    return found | {
        "results": numbers,
        "matrix": result.settings.get("matrix"),
        "arrays_sha256": arrays_digest(result.arrays),
        "converged": result.converged,
        "status": "finished",
    }


def arrays_digest(arrays: Mapping[str, Any]) -> str:
    """SHA-256 of the names, types, shapes and bytes of arrays."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        x = np.ascontiguousarray(arrays[name])
        total.update(f"{name}|{x.dtype}|{np.shape(arrays[name])}|".encode())
        total.update(x.tobytes())
    return total.hexdigest()


def result_from_json(
    found: dict[str, Any], arrays: dict[str, np.ndarray]
) -> MeasurementResult:
    """The inverse of `result_to_json`; null values become NaN again."""
    numbers = {name: _number(x) for name, x in found["results"].items()}
    return MeasurementResult(
        name=found["name"],
        kind=found["kind"],
        settings=found["settings"],
        numbers=numbers,
        arrays=arrays,
        notes=tuple(found["notes"]),
        seconds=found["seconds"],
    )


def _number(found: dict[str, Any]) -> Number:
    interval = found["interval"]
    # An infinite or NaN error is still an error, not the absence of one.
    none = found["error"] is None and found["error_kind"] in WITHOUT_ERROR
    return Number(
        **found
        | {
            "value": _nan_if_none(found["value"]),
            "error": None if none else _nan_if_none(found["error"]),
            "interval": None
            if interval is None
            else tuple(map(_nan_if_none, interval)),
        }
    )


def _nan_if_none(value: float | None) -> float:
    return math.nan if value is None else value
