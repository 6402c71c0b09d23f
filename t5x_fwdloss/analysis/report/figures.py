"""Figures as SVG in the page's style: its font and colors, light or dark.

matplotlib draws with colors that stand for roles; in the SVG each is replaced by a CSS
variable of the page, so that a figure is legible on white and on black. For readers who
do not see it, a figure has its data in words.
"""

import html
import io
import re
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

INK, FAINT, GRID = "#010101", "#020202", "#030303"
SERIES = ("#040404", "#050505", "#060606", "#070707", "#080808")
LINE_STYLES = ("-", "--", ":", "-.")
# Numbers of one series that are said one by one; the tables have all of them.
MOST_SAID = 12
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
    """The figure as an SVG element to be put into the page, with its data in words.

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
    label = html.escape(described(figure))
    text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return re.sub(r"font: ([^;]*?)px '[^\"]*?(;|\")", r"font: \1px var(--font)\2", text)


def series(number: int) -> dict[str, Any]:
    """The look of one of several lines, each different from the others."""
    color = SERIES[number % len(SERIES)]
    return {
        "color": color,
        "linestyle": LINE_STYLES[number // len(SERIES) % len(LINE_STYLES)],
    }


def with_legend_above(axis: Axes) -> Figure:
    """The figure of an axis with a legend that covers no point: above its panels."""
    figure: Any = axis.get_figure(root=True)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure


def described(figure: Figure) -> str:
    """What a figure shows, panel by panel, with the numbers that it draws."""
    panels = [_panel(axis) for axis in figure.axes]
    if len(panels) == 1:
        return f"Figure: {panels[0]}"
    return f"Figure of {len(panels)} panels. " + " ".join(
        f"Panel {number}: {words}" for number, words in enumerate(panels, start=1)
    )


def _panel(axis: Axes) -> str:
    horizontal, vertical = axis.get_xlabel(), axis.get_ylabel()
    what = " against ".join(filter(None, (vertical, horizontal))) or "no axis named"
    title = axis.get_title("left")
    head = f"{title}: {what}" if title else what
    series = [*_of_containers(axis), *_of_lines(axis), *_of_bands(axis)]
    return f"{'; '.join([head, *series])}."


def _of_containers(axis) -> Iterator[str]:
    for container in axis.containers:
        if isinstance(container, ErrorbarContainer):
            x, y = (np.asarray(z, float) for z in container[0].get_data())
            errors = _half_widths(container, y)
            pairs = zip(_ticks(axis.xaxis, x), y, errors, strict=True)
            said = [f"{at} {value:.4g}{error}" for at, value, error in pairs]
            yield _labeled(container.get_label(), _some(said))
        elif isinstance(container, BarContainer):
            bars = container.patches
            places = [bar.get_y() + bar.get_height() / 2 for bar in bars]
            pairs = zip(_ticks(axis.yaxis, places), bars, strict=True)
            yield _some([f"{at} {bar.get_width():.4g}" for at, bar in pairs])


def _half_widths(container, y) -> list[str]:
    if not (container.has_yerr and container[2]):
        return [""] * len(y)
    ends = [np.asarray(x)[:, 1] for x in container[2][-1].get_segments()]
    return [f" ± {(high - low) / 2:.2g}" for low, high in ends]


def _of_lines(axis) -> Iterator[str]:
    parts = {x for c in axis.containers for x in c.get_children()}
    # A line of two points in one direction is an axis or a mark.
    others: list[Line2D] = []
    for line in axis.lines:
        if line in parts:
            continue
        if line.get_label().startswith("_"):
            others += [line] if len(line.get_xdata()) > 2 else []
        else:
            yield _labeled(line.get_label(), _curve(line))
    if others:
        ends = np.concatenate([np.asarray(line.get_ydata(), float) for line in others])
        noun = "line" if len(others) == 1 else "lines"
        yield f"{len(others)} unnamed {noun} {_range(ends)}"


def _curve(line) -> str:
    x, y = (np.asarray(z, float) for z in line.get_data())
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if not len(y):
        return "no point"
    if np.ptp(y) == 0:
        return f"{y[0]:.4g} throughout"
    first, last = f"{y[0]:.4g} at {x[0]:.4g}", f"{y[-1]:.4g} at {x[-1]:.4g}"
    top, low = (f"{y[i]:.4g} at {x[i]:.4g}" for i in (y.argmax(), y.argmin()))
    return f"{len(y)} points, from {first} to {last}, highest {top}, lowest {low}"


def _of_bands(axis) -> Iterator[str]:
    for band in axis.collections:
        if not band.get_label().startswith("_"):
            ends = [path.vertices[:, 1] for path in band.get_paths()]
            yield _labeled(band.get_label(), _range(np.concatenate(ends)))


def _range(values) -> str:
    values = values[np.isfinite(values)]
    return f"from {values.min():.4g} to {values.max():.4g}" if len(values) else "empty"


def _ticks(axis, places) -> list[str]:
    """The names of places on an axis; their numbers where they have none."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return [f"at {x:.4g}:" for x in places]
    names = [text.get_text() for text in axis.get_ticklabels()]
    at = np.asarray(axis.get_ticklocs(), float)
    return [names[int(np.abs(at - x).argmin())] for x in places]


def _some(said: list[str]) -> str:
    more = len(said) - MOST_SAID
    return ", ".join(said[:MOST_SAID]) + (f" and {more} more" if more > 0 else "")


def _labeled(label: Any, words: str) -> str:
    return f"{label}: {words}"
