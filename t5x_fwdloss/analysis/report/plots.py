"""A plot of a measurement's result, and its drawing for the report."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import figures


@dataclasses.dataclass(frozen=True)
class Plot:
    """One plot of a class of measurements.

    Attributes:
        caption: its caption.
        draw: draws the figure of a result; returns None if there is nothing to draw.
        overlay: draws the results of several runs, by the runs' labels, in one figure.
    """

    caption: str
    draw: Callable[[MeasurementResult], Figure | None]
    overlay: Callable[[Mapping[str, MeasurementResult]], Figure | None] | None = None


def drawn(result: MeasurementResult, plots: Sequence[Plot]) -> list[tuple[str, str]]:
    """The plots of a result as `(caption, svg)`."""
    found = []
    for number, plot in enumerate(plots):
        with figures.settings():
            figure = plot.draw(result)
            if figure is not None:
                svg = figures.to_svg(figure, salt_of(result.name, number))
                found.append((plot.caption, svg))
    return found


def salt_of(name: str, number: int) -> str:
    """The name of one of a measurement's figures, for the ids in it."""
    return re.sub(r"\W", "-", f"{name}-{number}")
