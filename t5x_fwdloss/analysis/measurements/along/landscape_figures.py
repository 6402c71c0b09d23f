"""The figures of a landscape: lines, contours, a surface, the accuracy."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, INK, SERIES
from t5x_fwdloss.analysis.report.plots import Plot

NUM_LEVELS = 12


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
    losses, center = arrays["losses"], result.numbers["loss"].value
    axes[0].plot(
        fine,
        center + slope * fine + curvature * fine**2 / 2,
        color=SERIES[0],
        label="quadratic model",
    )
    axes[0].plot(places, losses, "o", color=SERIES[1], markersize=4, label="measured")
    if "barrier_height" in result.numbers:
        ends = arrays["losses_at_marks"]
        axes[0].plot((0, 1), ends, "--", color=FAINT, label="chord", linewidth=1)
    # The model may leave what was measured far behind.
    margin = 0.1 * float(np.ptp(losses)) or 1.0
    axes[0].set_ylim(losses.min() - margin, losses.max() + margin)
    axes[0].set_ylabel(f"loss, {result.numbers['loss'].unit}")
    axes[0].legend(loc="best")
    if len(axes) > 1:
        axes[1].plot(places, arrays["accuracies"], "o-", color=SERIES[2], markersize=4)
        axes[1].set_ylabel("share of tokens predicted")
    for axis in axes:
        axis.axvline(0.0, color=FAINT, linewidth=0.6)
        axis.set_xlabel(label)
    return axes[0].get_figure(root=True)


def _contours(result: MeasurementResult) -> Figure | None:
    """The contours of the loss on a plane, and those of its quadratic model."""
    if len(_directions(result)) != 2:
        return None
    losses, model = result.arrays["losses"], result.arrays["model"]
    axes = figures.panels(2, columns=2, height=4.2)
    levels = _levels(losses)
    for axis, values, color, title in (
        (axes[0], losses, SERIES[0], "loss"),
        (axes[1], model, SERIES[1], "quadratic model, same levels"),
    ):
        _draw_contours(axis, result, values, levels, color)
        axis.set_title(f"{title}, {result.numbers['loss'].unit}")
    axes[0].legend(loc="best")
    return axes[0].get_figure(root=True)


def _accuracy(result: MeasurementResult) -> Figure | None:
    """The contours of the accuracy on a plane."""
    if len(_directions(result)) != 2 or "accuracies" not in result.arrays:
        return None
    values = result.arrays["accuracies"]
    (axis,) = figures.panels(1, height=4.2)
    levels = np.linspace(values.min(), values.max(), NUM_LEVELS)
    _draw_contours(axis, result, values, levels, SERIES[2])
    axis.set_title("share of tokens predicted")
    axis.legend(loc="best")
    return axis.get_figure(root=True)


def _levels(losses: np.ndarray) -> np.ndarray:
    """Levels whose contours are equally spaced in a round bowl."""
    steps = np.linspace(0.0, 1.0, NUM_LEVELS + 2)[1:-1]
    return losses.min() + np.ptp(losses) * steps**2


def _draw_contours(axis: Axes, result, values, levels, color) -> None:
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
    lowest = [result.numbers[f"smallest_loss_place_{i}"].value for i in (1, 2)]
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
        "The loss on the plane and its quadratic model at this checkpoint. In a round "
        "bowl the contours would be equally spaced.",
        _contours,
    ),
    Plot("The loss on the plane as a surface, and its quadratic model.", _surface),
    Plot("The token accuracy on the plane.", _accuracy),
)
