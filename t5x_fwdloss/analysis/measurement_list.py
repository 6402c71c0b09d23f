"""The list of measurements of a run, checked as a whole before anything is read."""

import re
from collections.abc import Sequence
from typing import Any

from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Measurement
from t5x_fwdloss.analysis.objective import preflight
from t5x_fwdloss.curvature.vectors import groups
from t5x_fwdloss.losses import LossSettings

MAX_NAME = 100
# Names of the other files in the folder of the measurements' files.
RESERVED = ("config", "events", "lock", "report", "results", "run", "unfinished")
SUFFIXES = (".json", ".npz", ".part", ".state", "_vectors")


def check(name: str, measurements: Any) -> None:
    """Checks the list of measurements, every setting of each, and their names.

    Args:
        name: name of the list, as the user writes it.
        measurements: each a `Measurement`.

    Raises:
        ValueError: it is not a list of at least one measurement, or a setting does not
            fit.
    """
    wanted = "a list of at least one measurement, such as [@Trace()] in gin"
    if not settings.is_list(measurements) or not len(measurements):
        raise ValueError(
            f"{name} must be {wanted}: got {settings.shown(measurements)}."
        )
    for number, measurement in enumerate(measurements):
        if isinstance(measurement, type) or not isinstance(measurement, Measurement):
            raise ValueError(
                f"{name} must be {wanted}: entry {number} is "
                f"{settings.shown(measurement)}."
            )
        settings.check_fields(measurement)
        measurement.check_settings(measurements[:number])
    check_names([measurement.name for measurement in measurements])


def check_groups(measurements: Sequence[Measurement], params: PyTree) -> None:
    """Reject group patterns that match no parameter; compiles nothing.

    Args:
        measurements: some have `patterns_of_groups`.
        params: the parameters, or their shapes.

    `ValueError` names the first such pattern.
    """
    for measurement in measurements:
        for pattern in measurement.patterns_of_groups:
            groups.group_mask(params, pattern)


def check_forward_mode(
    measurements: Sequence[Measurement], loss_settings: LossSettings
) -> None:
    """Reject a loss without forward mode if a measurement needs forward mode.

    Args:
        measurements: some have `needs_forward_mode`.
        loss_settings: the model's settings.

    Raises:
        PreflightError: it names the first such measurement, and the loss to choose.
    """
    if loss_settings.implementation.has_forward_mode:
        return
    for measurement in measurements:
        if measurement.needs_forward_mode:
            raise preflight.PreflightError(preflight.no_forward_loss(measurement.name))


def check_names(names: Sequence[Any]) -> None:
    """Reject names of measurements that are not valid or not unique file names.

    Raises:
        ValueError: it says which name is wrong, and why.
    """
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(
            rf"[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{MAX_NAME - 1}}}", name
        ):
            raise ValueError(
                "The name of a measurement must be the name of a file, at most "
                f"{MAX_NAME} of the characters A-Z, a-z, 0-9, '_', '-' and '.', the first "
                f"no '.': got {settings.shown(name)}."
            )
        if name.lower() in RESERVED:
            raise ValueError(
                f"The name of a measurement must not be one of {', '.join(RESERVED)}: "
                f"got {name!r}."
            )
    if not names or len({name.lower() for name in names}) < len(names):
        raise ValueError(
            "measurements must be a list of at least one, each with its own name: got "
            f"{', '.join(names) or 'none'}."
        )
    taken = {name.lower() + suffix: name for name in names for suffix in SUFFIXES}
    for name in names:
        if name.lower() in taken:
            raise ValueError(
                "The names of measurements must differ by more than "
                f"{', '.join(SUFFIXES)}: got {taken[name.lower()]!r} and {name!r}."
            )
