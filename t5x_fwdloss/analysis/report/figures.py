"""Figures as SVG in the page's style: its font and colors, light or dark.

matplotlib draws with colors that stand for roles; in the SVG each is replaced by a CSS
variable of the page, so that a figure is legible on white and on black.
"""

import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, FAINT, GRID = "#010101", "#020202", "#030303"
SERIES = ("#040404", "#050505", "#060606", "#070707", "#080808")
_VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid"} | {
    color: f"--series-{i}" for i, color in enumerate(SERIES)
}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "axes.formatter.limits": (-3, 4),
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def settings():
    """The context in which a figure must be created and drawn."""
    return matplotlib.rc_context(_SETTINGS)


def panels(num: int, *, columns: int = 3, height: float = 2.6) -> list[Axes]:
    """The axes of one figure of `num` panels, in rows of at most `columns`."""
    columns = min(num, columns)
    rows = -(-num // columns)
    # One width for all: the page scales figures to its own, and their text with them.
    figure = Figure(figsize=(9.2, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in axes[num:]:
        unused.remove()
    return list(axes[:num])


def count_along(axis: Axes) -> None:
    """Ticks at whole numbers, for an axis that counts."""
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def to_svg(figure: Figure, salt: str) -> str:
    """The figure as an SVG element to be put into the page.

    Args:
        figure: a figure created under `settings`.
        salt: the figure's name in its page, so that ids do not collide.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    # Ids that matplotlib numbers by order, such as figure_1, repeat in every figure.
    text = re.sub(r'<g id="([a-z]+[0-9a-z.]*_\d+)"', f'<g id="{salt}-\\1"', text)
    text = re.sub(r'^<svg ([^>]*)width="[^"]*"', r"<svg \1", text)
    text = re.sub(r'^<svg ([^>]*)height="[^"]*"', r"<svg \1", text)
    return re.sub(r"font: ([^;]*?)px '[^\"]*?(;|\")", r"font: \1px var(--font)\2", text)
