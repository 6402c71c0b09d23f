"""The plots of what concerns all eigenvalues: their density, and where they sit."""

import numpy as np
from matplotlib.figure import Figure

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.curvature.estimators import smoothing
from t5x_fwdloss.curvature.estimators.slq import SpectralSamples
from t5x_fwdloss.curvature.estimators.smoothing import log_magnitudes


def density(result: MeasurementResult) -> Figure | None:
    """The density of the eigenvalues with its band, as it is and by magnitude."""
    found = spectral_samples(result)
    left, right = figures.panels(2, columns=2)
    for axis, samples in ((left, found), (right, log_magnitudes(found, 1e-8))):
        curve = smoothing.density(samples)
        axis.plot(curve.grid, curve.mean, color=SERIES[0], label="mean over probes")
        top = curve.mean.max()
        if samples.num_probes > 1:
            top = curve.high.max()
            axis.fill_between(
                curve.grid,
                curve.low,
                curve.high,
                color=SERIES[0],
                alpha=0.2,
                linewidth=0,
                label=f"{curve.confidence:.0%} band",
            )
        axis.set_ylim(bottom=_floor(curve.mean), top=2 * top)
        axis.set_yscale("log")
    left.set_ylabel("density")
    left.set_xlabel(f"eigenvalue, {result.numbers['trace'].unit}")
    right.set_xlabel("log10 of its magnitude")
    left.legend(loc="best")
    return left.get_figure(root=True)


def spectral_samples(result: MeasurementResult) -> SpectralSamples:
    """The nodes and weights that a density's arrays hold."""
    nodes, weights = result.arrays["nodes"], result.arrays["weights"]
    return SpectralSamples(
        nodes=[row[~np.isnan(row)] for row in nodes],
        weights=[row[~np.isnan(row)] for row in weights],
        dimension=int(result.arrays["dimension"]),
        num_products=int(np.isfinite(nodes).sum()),
        num_exhausted=0,
    )


def _floor(values):
    # Below one part in a million of the peak a smooth density is its smoothing.
    return max(values.max() * 1e-6, values[values > 0].min())


def group_traces(result: MeasurementResult) -> Figure | None:
    """The traces of the groups, with their confidence intervals."""
    names = [n for n in result.numbers if n.endswith("/trace")]
    labels = [n.removesuffix("/trace") for n in names]
    numbers = [result.numbers[n] for n in names]
    (axis,) = figures.panels(1, height=0.8 + 0.26 * len(names))
    places = np.arange(len(names))[::-1]
    axis.barh(places, [x.value for x in numbers], height=0.6, color=SERIES[0])
    for place, x in zip(places, numbers, strict=True):
        if x.interval is not None:
            axis.plot(x.interval, [place, place], color=SERIES[1], linewidth=2)
    axis.axvline(0.0, color=FAINT, linewidth=0.8)
    axis.set_yticks(places, labels)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel(f"trace, {numbers[0].unit}")
    return axis.get_figure(root=True)
