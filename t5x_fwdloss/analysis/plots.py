"""The plots of each kind of measurement."""

import re
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import figures
from t5x_fwdloss.analysis.figures import FAINT, SERIES
from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.whole_spectrum_plots import density, group_traces

Plot = Callable[[MeasurementResult], Figure | None]


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
                found.append((caption, figures.to_svg(figure, salt)))
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
    """The eigenvalues in order, with their residuals as error bars."""
    values, residuals = result.arrays["eigenvalues"], result.arrays["residuals"]
    names = [n for n in result.numbers if n.startswith(("largest_", "smallest_"))]
    converged = np.asarray([result.numbers[n].converged for n in names])
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
                yerr=residuals[order][keep],
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
        axis.set_xlabel("products")
    left.legend(loc="best")
    return left.get_figure(root=True)


def trace_samples(result: MeasurementResult) -> Figure | None:
    """The samples, their running mean, and its confidence interval."""
    from scipy import stats

    samples = result.arrays["samples"]
    count = np.arange(1, len(samples) + 1)
    mean = np.cumsum(samples) / count
    spread = np.asarray(
        [np.std(samples[:n], ddof=1) if n > 1 else np.nan for n in count]
    )
    level = result.settings["confidence"]
    quantile = stats.t.ppf(0.5 + level / 2, np.maximum(count - 1, 1))
    half = quantile * spread / np.sqrt(count)
    (axis,) = figures.panels(1)
    axis.plot(count, samples, "o", color=FAINT, markersize=3, label="one probe")
    axis.plot(count, mean, color=SERIES[0], label="running mean")
    axis.fill_between(
        count,
        mean - half,
        mean + half,
        color=SERIES[0],
        alpha=0.2,
        linewidth=0,
        label=f"{level:.0%} confidence interval",
    )
    # The first intervals are wider than the page: let the samples set the scale.
    low, high = samples.min(), samples.max()
    margin = 0.25 * (high - low) or 1.0
    axis.set_ylim(low - margin, high + margin)
    axis.set_xlabel("probes")
    axis.set_ylabel(f"trace, {result.numbers['trace'].unit}")
    axis.legend(loc="best")
    return axis.get_figure(root=True)


# By the end of the measurement's class name: one family, one set of plots.
PLOTS: dict[str, tuple[tuple[str, Plot], ...]] = {
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
    "Trace": (
        (
            "Hutchinson's estimator: one sample a probe, and what their mean knows.",
            trace_samples,
        ),
    ),
}
