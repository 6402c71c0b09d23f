"""The plots of each kind of measurement."""

import re
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.whole_spectrum_plots import density, group_traces

Plot = Callable[[MeasurementResult], Figure | None]
Caption = str | Callable[[MeasurementResult], str]


def plots_of(result: MeasurementResult) -> list[tuple[str, str]]:
    """The result's plots as `(caption, svg)`; none for a kind that has none."""
    found = []
    plots = [
        plot
        for end, of_end in PLOTS.items()
        if result.kind.endswith(end)
        for plot in of_end
    ]
    for number, (caption, plot) in enumerate(plots):
        with figures.settings():
            figure = plot(result)
            if figure is not None:
                salt = re.sub(r"\W", "-", f"{result.name}-{number}")
                text = caption if isinstance(caption, str) else caption(result)
                found.append((text, figures.to_svg(figure, salt)))
    return found


def directions(result: MeasurementResult) -> Figure | None:
    """The loss along each direction beside its second-order model."""
    labels = [k.removesuffix("/steps") for k in result.arrays if k.endswith("/steps")]
    if not labels:
        return None
    axes = figures.panels(len(labels))
    loss = result.numbers["loss"]
    for axis, label in zip(axes, labels, strict=True):
        steps = result.arrays[f"{label}/steps"]
        slope = result.numbers[f"{label}/slope"].value
        curvature = result.numbers[f"{label}/curvature"].value
        fine = np.linspace(steps[0], steps[-1], 101)
        model = slope * fine + curvature * fine**2 / 2
        measured = result.arrays[f"{label}/losses"] - loss.value
        axis.axhline(0.0, color=FAINT, linewidth=0.6)
        axis.plot(fine, model, color=SERIES[0], label="second-order model")
        axis.plot(steps, measured, "o", color=SERIES[1], markersize=4, label="measured")
        axis.set_title(label.replace("_", " "))
        axis.set_xlabel("step along the unit direction, θ")
    axes[0].set_ylabel(f"change of the loss, {loss.unit}")
    axes[0].legend(loc="best")
    return axes[0].get_figure(root=True)


def eigenvalues(result: MeasurementResult) -> Figure | None:
    """The eigenvalues in order, with their errors as bars."""
    names = [n for n in result.numbers if re.fullmatch(r"(largest|smallest)_\d+", n)]
    numbers = [result.numbers[n] for n in names]
    values = np.asarray([number.value for number in numbers])
    errors = np.asarray([number.error for number in numbers])
    converged = np.asarray([number.converged for number in numbers])
    order = np.argsort(-values)
    (axis,) = figures.panels(1)
    axis.axhline(0.0, color=FAINT, linewidth=0.8)
    for chosen, fill, label in (
        (converged, SERIES[0], "converged"),
        (~converged, "none", "not converged"),
    ):
        keep = [i for i, index in enumerate(order) if chosen[index]]
        if keep:
            axis.errorbar(
                keep,
                values[order][keep],
                yerr=errors[order][keep],
                fmt="o",
                color=SERIES[0],
                markerfacecolor=fill,
                capsize=3,
                label=label,
            )
    axis.set_xticks(range(len(order)), [names[i].replace("_", " ") for i in order])
    axis.tick_params(axis="x", rotation=30)
    axis.set_ylabel(f"eigenvalue, {result.numbers[names[0]].unit}")
    axis.legend(loc="best")
    return axis.get_figure(root=True)


def convergence(result: MeasurementResult) -> Figure | None:
    """Ritz values and estimated residuals over the steps of Lanczos."""
    history = result.arrays["history"]
    if len(history) < 2:
        return None
    largest = sum(name.startswith("largest_") for name in result.numbers)
    left, right = figures.panels(2, columns=2)
    steps, pairs = history[:, 0], len(result.arrays["allowed"])
    for i in range(pairs):
        color = SERIES[0] if i < largest else SERIES[1]
        label = None
        if i in (0, largest):
            label = "largest" if i < largest else "smallest"
        values, errors = history[:, 1 + 2 * i], history[:, 2 + 2 * i]
        errors = errors / result.arrays["allowed"][i]
        left.plot(steps, values, color=color, label=label, linewidth=1.2)
        right.semilogy(
            steps, np.where(errors > 0, errors, np.nan), color=color, linewidth=1.2
        )
    right.axhline(1.0, color=FAINT, linestyle="--", linewidth=1)
    left.set_title("Ritz values")
    right.set_title("estimated residuals; dashed: allowed")
    right.set_ylabel("relative to what is allowed")
    for axis in (left, right):
        figures.count_along(axis)
        axis.set_xlabel("products")
    left.legend(loc="best")
    return left.get_figure(root=True)


def trace_samples(result: MeasurementResult) -> Figure | None:
    """The samples beside the reported trace and its confidence interval."""
    samples, trace = result.arrays["samples"], result.numbers["trace"]
    count = np.arange(1, len(samples) + 1)
    ends = [count[0], count[-1]]
    (axis,) = figures.panels(1)
    axis.plot(count, samples, "o", color=FAINT, markersize=3, label="one probe")
    if result.settings["estimator"] == "hutchinson":
        mean = np.cumsum(samples) / count
        axis.plot(count, mean, color=FAINT, linewidth=1, label="running mean")
    axis.plot(ends, [trace.value] * 2, color=SERIES[0], label="estimate")
    if trace.interval is not None:
        low, high = trace.interval
        axis.fill_between(
            ends,
            [low] * 2,
            [high] * 2,
            color=SERIES[0],
            alpha=0.2,
            linewidth=0,
            label=f"{result.settings['confidence']:.0%} confidence interval",
        )
    figures.count_along(axis)
    axis.set_xlabel("probes")
    axis.set_ylabel(f"trace, {trace.unit}")
    axis.legend(loc="best")
    return axis.get_figure(root=True)


TRACE_CAPTIONS = {
    "hutchinson": "Hutchinson's estimator: one sample for each probe, their running mean, "
    "and the estimate with its confidence interval.",
    "hutch++": "Hutch++: for each probe the trace on the subspace plus the probe's sample "
    "outside of it, and the estimate with its confidence interval.",
    "xtrace": "XTrace: the estimates that leave out one probe each, and the estimate with "
    "its confidence interval.",
}


def trace_caption(result: MeasurementResult) -> str:
    """Which estimator the samples come from."""
    return TRACE_CAPTIONS[result.settings["estimator"]]


# By the end of the measurement's class name: one family, one set of plots.
PLOTS: dict[str, tuple[tuple[Caption, Plot], ...]] = {
    "DirectionalDerivatives": (
        (
            "The change of the loss along unit directions. Where points leave the "
            "curve, third and higher derivatives matter.",
            directions,
        ),
    ),
    "Eigenpairs": (
        (
            "Eigenvalues; the bar is the true residual: an eigenvalue lies within it.",
            eigenvalues,
        ),
        (
            "Convergence: the wanted pairs after every product.",
            convergence,
        ),
    ),
    "SpectralDensity": (
        (
            "The density of the eigenvalues, smoothed; nodes and weights are in the "
            ".npz file, for other widths and grids.",
            density,
        ),
    ),
    "GroupTraces": (
        (
            "The trace by group of parameters, with its confidence interval.",
            group_traces,
        ),
    ),
    "Trace": ((trace_caption, trace_samples),),
}
