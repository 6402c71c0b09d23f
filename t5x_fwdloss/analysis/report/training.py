"""The report's section on the curvature while training, from the training's own events.

Both hosts write the numbers of their probes under `curvature/`, the standalone training
beside its checkpoints, T5X's in `train/` there.
"""

from collections.abc import Mapping
from typing import Any

from absl import logging
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from t5x_fwdloss.analysis.report import events, figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.tables import escaped

PREFIX = "curvature/"
FOLDERS = ("", "train")
TITLE, SECTION = "Curvature while training", "training"
SHARPNESS = ("critical_sharpness", "directional_sharpness")
CAPTION = (
    "The probes of the training run, at the parameters before each probed step: the loss "
    "of the step's batch, and 2 over the learning rate at which the loss itself (critical, "
    "to 10 %) or its quadratic model (directional) would be back at its value before the "
    "step. Above 2 over the learning rate of the step, the step was too long and the loss "
    "of its batch rose."
)

# Name of a number to its steps and values.
Record = Mapping[str, Mapping[str, list[Any]]]


def record(checkpoint: str) -> dict[str, dict[str, list[Any]]]:
    """What the training run of a checkpoint measured of the curvature.

    Args:
        checkpoint: path of a folder that the training wrote.

    Returns:
        For each name the steps and the values; empty if there were no probes. Event
        files that cannot be read are logged and count as none.
    """
    if not checkpoint:
        return {}
    folders = [epath.Path(checkpoint).parent / name for name in FOLDERS]
    try:
        found = events.read(folders, PREFIX)
    except Exception as error:  # of a file system, TensorFlow or a parser
        logging.warning("The training's events are not in the report: %s", error)
        return {}
    return {
        name: {"steps": sorted(values), "values": [values[x] for x in sorted(values)]}
        for name, values in found.items()
    }


def section(found: Record, step: int | None) -> str:
    """The section as HTML; empty without a record.

    Args:
        found: the result of `record`.
        step: the analyzed checkpoint's step, which is marked.
    """
    if not found:
        return ""
    with figures.settings():
        svg = figures.to_svg(draw(found, step), SECTION)
    caption = CAPTION
    if step is not None:
        caption += (
            f" The vertical line is the checkpoint analyzed here, of step {step:,}."
        )
    return (
        f"<section id='{SECTION}'><h2>{TITLE}</h2><figure>{svg}"
        f"<figcaption>{escaped(caption)}</figcaption></figure></section>"
    )


def draw(found: Record, step: int | None) -> Figure:
    """The loss and the sharpness against the step; arguments as in `section`."""
    loss, sharpness = figures.panels(2)
    _draw_loss(loss, found)
    _draw_sharpness(sharpness, found)
    for axis in (loss, sharpness):
        if step is not None:
            axis.axvline(step, color=FAINT, linewidth=0.8)
        figures.count_along(axis)
        axis.set_xlabel("training step")
    figure: Any = loss.get_figure(root=True)
    return figure


def thresholds(found: Record) -> tuple[list[int], list[float]]:
    """The steps with a critical sharpness, and 2 over the learning rate of each.

    The two critical numbers of a step multiply to it.
    """
    none = {"steps": [], "values": []}
    multiples = found.get("critical_multiple", none)
    of_step = dict(zip(multiples["steps"], multiples["values"], strict=True))
    steps, values = found.get(SHARPNESS[0], none).values()
    return steps, [x * of_step[at] for at, x in zip(steps, values, strict=True)]


def _draw_loss(axis: Axes, found: Record) -> None:
    if "loss" in found:
        axis.plot(*found["loss"].values(), color=SERIES[0])
    axis.set_ylabel("loss of the step's batch")


def _draw_sharpness(axis: Axes, found: Record) -> None:
    for name, color in zip(SHARPNESS, SERIES, strict=False):
        if name in found:
            label = name.replace("_", " ")
            axis.plot(*found[name].values(), ".-", color=color, label=label)
    steps, edge = thresholds(found)
    if steps:
        axis.plot(steps, edge, "--", color=FAINT, label="2 / learning rate")
        axis.legend(loc="best")
    axis.set_ylabel("sharpness")
