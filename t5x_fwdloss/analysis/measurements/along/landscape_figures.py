"""The figures of a landscape: lines, contours, a surface, the accuracy."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from t5x_fwdloss.analysis.measurements.along.readings import prefix_of
from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, INK, SERIES
from t5x_fwdloss.analysis.report.plots import Plot

NUM_LEVELS = 12
# Of a surface's axes, whose labels are short of room.
NUM_TICKS = 4


def _directions(result: MeasurementResult) -> list[tuple[str, np.ndarray]]:
    """For each direction the label of its axis, and the coefficients."""
    labels = [
        name.removesuffix("/length")
        for name in result.numbers
        if name.endswith("/length")
    ]
    return [
        (
            f"multiple of {label.replace('_', ' ')}",
            result.arrays[f"coefficients_{number + 1}"],
        )
        for number, label in enumerate(labels)
    ]


def _lines(result: MeasurementResult) -> Figure | None:
    """The loss on a line beside its quadratic model, and the accuracy."""
    found, arrays = _directions(result), result.arrays
    if len(found) != 1:
        return None
    ((label, places),) = found
    axes = figures.panels(2 if "accuracies" in arrays else 1, columns=2)
    slope, curvature = arrays["slopes"][0], arrays["hessian"][0, 0]
    fine = np.linspace(places[0], places[-1], 201)
    axes[0].plot(
        fine,
        result.numbers["loss"].value + slope * fine + curvature * fine**2 / 2,
        color=SERIES[0],
        label="quadratic model",
    )
    reach: list[float] = []
    for where, colors, mark in _splits(result):
        losses = arrays[f"{where}losses"]
        reach += [losses.min(), losses.max()]
        words = _words(result, where)
        axes[0].plot(
            places,
            losses,
            mark,
            color=colors[0],
            markersize=4,
            label=f"measured{words}",
        )
        if f"{where}barrier_height" in result.numbers:
            ends = arrays[f"{where}losses_at_marks"]
            axes[0].plot((0, 1), ends, "--", color=FAINT, label=f"chord{words}", lw=1)
        if len(axes) > 1:
            axes[1].plot(
                places,
                arrays[f"{where}accuracies"],
                f"{mark}-",
                color=colors[1],
                markersize=4,
                label=f"measured{words}",
            )
    # The model may leave what was measured far behind.
    margin = 0.1 * float(max(reach) - min(reach)) or 1.0
    axes[0].set_ylim(min(reach) - margin, max(reach) + margin)
    axes[0].set_ylabel(f"loss, {result.numbers['loss'].unit}")
    axes[0].legend(loc="best")
    if len(axes) > 1:
        axes[1].set_ylabel("share of tokens predicted")
        if len(_splits(result)) > 1:
            axes[1].legend(loc="best")
    for axis in axes:
        axis.axvline(0.0, color=FAINT, linewidth=0.6)
        axis.set_xlabel(label)
    return axes[0].get_figure(root=True)


def _contours(result: MeasurementResult) -> Figure | None:
    """The contours of the loss on a plane, and those of its quadratic model."""
    if len(_directions(result)) != 2:
        return None
    unit = result.numbers["loss"].unit
    drawn = [(result.arrays["losses"], SERIES[0], "loss", "")]
    drawn += [
        (
            result.arrays[f"{where}losses"],
            colors[0],
            f"loss{_words(result, where)}",
            where,
        )
        for where, colors, _ in _splits(result)[1:]
    ]
    levels = _levels(np.stack([values for values, *_ in drawn]))
    model = result.arrays["model"], SERIES[1], "quadratic model", ""
    drawn.insert(1, model)
    axes = figures.panels(len(drawn), columns=len(drawn), height=_height(len(drawn)))
    for axis, (values, color, title, where) in zip(axes, drawn, strict=True):
        _draw_contours(axis, result, values, levels, color, where)
        axis.set_title(f"{title}, {unit}")
    return figures.with_legend_above(axes[0])


def _accuracy(result: MeasurementResult) -> Figure | None:
    """The contours of the accuracy on a plane."""
    if len(_directions(result)) != 2 or "accuracies" not in result.arrays:
        return None
    splits = _splits(result)
    found = [result.arrays[f"{where}accuracies"] for where, *_ in splits]
    axes = figures.panels(len(found), height=4.2)
    levels = np.linspace(np.min(found), np.max(found), NUM_LEVELS)
    for axis, values, (where, colors, _) in zip(axes, found, splits, strict=True):
        _draw_contours(axis, result, values, levels, colors[1], where)
        axis.set_title(f"share of tokens predicted{_words(result, where)}")
    return figures.with_legend_above(axes[0])


def _height(num_panels: int) -> float:
    """The height at which that many panels in a row are about as high as wide."""
    return {2: 4.2, 3: 3.2}[num_panels]


def _splits(result) -> list[tuple[str, tuple[str, str], str]]:
    """For each split the prefix of its arrays, two colors and a mark."""
    found = [("", (SERIES[1], SERIES[2]), "o")]
    if result.settings.get("other_split"):
        where = prefix_of(result.settings["other_split"])
        found.append((where, (SERIES[3], SERIES[4]), "s"))
    return found


def _words(result, where: str) -> str:
    return f" on {result.settings['other_split']}" if where else ""


def _levels(losses: np.ndarray) -> np.ndarray:
    """Levels whose contours are equally spaced in a round bowl."""
    steps = np.linspace(0.0, 1.0, NUM_LEVELS + 2)[1:-1]
    return losses.min() + np.ptp(losses) * steps**2


def _draw_contours(axis: Axes, result, values, levels, color, where="") -> None:
    (first, x), (second, y) = _directions(result)
    if np.ptp(levels) > 0:  # a plane that is flat has none
        drawn = axis.contour(
            x, y, values.T, levels=levels, colors=color, linewidths=1.2
        )
        axis.clabel(drawn, fmt="%.3g", fontsize=7, colors=INK)
    centers, *others = result.arrays["marks"]
    axis.plot(*centers, "o", color=INK, markersize=5, label="this checkpoint")
    for place in others:
        axis.plot(*place, "x", color=INK, label="another checkpoint")
    lowest = [result.numbers[f"{where}smallest_loss_place_{i}"].value for i in (1, 2)]
    axis.plot(*lowest, "+", color=SERIES[4], markersize=9, label="smallest loss")
    axis.set_xlabel(first)
    axis.set_ylabel(second)


def _surface(result: MeasurementResult) -> Figure | None:
    """The loss on a plane as a surface, and its quadratic model as another."""
    if len(_directions(result)) != 2:
        return None
    (first, x), (second, y) = _directions(result)
    losses, model = result.arrays["losses"], result.arrays["model"]
    figure = Figure(figsize=(9.2, 4.2), layout="constrained")
    grid = np.meshgrid(x, y, indexing="ij")
    # Where the model leaves what was measured far behind, it would hide it.
    inside = np.clip(model, losses.min(), losses.max())
    for place, values, color, title in (
        (1, losses, SERIES[0], "loss"),
        (2, inside, SERIES[1], "quadratic model, within the range of the loss"),
    ):
        axis: Any = figure.add_subplot(1, 2, place, projection="3d")
        axis.plot_wireframe(*grid, values, color=color, linewidth=0.7)
        for side in (axis.xaxis, axis.yaxis, axis.zaxis):
            side.set_pane_color((1.0, 1.0, 1.0, 0.0))
            side.set_major_locator(MaxNLocator(NUM_TICKS))
        axis.tick_params(labelsize=7, pad=0)
        axis.set_box_aspect(None, zoom=0.85)  # or its labels are cut off
        axis.set_zlim(losses.min(), losses.max())
        axis.set_title(f"{title}, {result.numbers['loss'].unit}")
        axis.set_xlabel(first)
        axis.set_ylabel(second)
    return figure


PLOTS = (
    Plot(
        "The loss on the line, with its quadratic model at this checkpoint, and the "
        "token accuracy.",
        _lines,
    ),
    Plot(
        "The loss on the plane and its quadratic model at this checkpoint, by the same "
        "levels. In a round bowl the contours would be equally spaced.",
        _contours,
    ),
    Plot("The loss on the plane as a surface, and its quadratic model.", _surface),
    Plot("The token accuracy on the plane.", _accuracy),
)
