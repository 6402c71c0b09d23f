"""The trace of a matrix by a randomized estimator, with its error."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, result
from t5x_fwdloss.analysis.measurements.of_matrix.matrix import MatrixMeasurement
from t5x_fwdloss.analysis.measurements.rounding import NUM_DRAWS
from t5x_fwdloss.analysis.measurements.work import Work, in_blocks
from t5x_fwdloss.analysis.numbers import STANDARD_ERROR, MeasurementResult, Number
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature import (
    HutchinsonState,
    HutchppState,
    TraceEstimate,
    XtraceState,
    hutchinson_trace,
    hutchpp_trace,
    xtrace,
)
from t5x_fwdloss.curvature.estimators import hutchinson
from t5x_fwdloss.curvature.krylov.basis import ON_DEVICE

# For each estimator its state, its function, and the settings that only some take.
ESTIMATORS: dict[str, tuple[Any, Callable[..., TraceEstimate], tuple[str, ...]]] = {
    "hutchinson": (HutchinsonState, hutchinson_trace, ("kind",)),
    "hutch++": (HutchppState, hutchpp_trace, ("sketch_size", "basis_on_host")),
    "xtrace": (XtraceState, xtrace, ("basis_on_host",)),
}
Estimator = Annotated[str, settings.one_of(*ESTIMATORS)]
CAPTIONS = {
    "hutchinson": "Hutchinson's estimator: one sample for each probe, their running mean, "
    "and the estimate with its confidence interval.",
    "hutch++": "Hutch++: for each probe the trace on the subspace plus the probe's sample "
    "outside of it, and the estimate with its confidence interval.",
    "xtrace": "XTrace: the estimates that leave out one probe each, and the estimate with "
    "its confidence interval.",
}


@dataclasses.dataclass(frozen=True)
class Trace(MatrixMeasurement):
    """The trace of a matrix, the sum of its eigenvalues, by a randomized estimator.

    Attributes:
        num_probes: number of random vectors, at most. Hutchinson's estimator takes one
            product for each, Hutch++ one and two for each vector of its sketch, XTrace
            two.
        block_size: probes in one compiled, vmapped product.
        estimator: 'hutchinson' keeps no vectors; 'hutch++' and 'xtrace' keep one or two
            for each random vector, and their error falls much faster where the spectrum
            does.
        sketch_size: vectors of the sketch of Hutch++.
        kind: 'rademacher' (random signs, less variance) or 'normal'; Hutchinson only.
        relative_error: stop as soon as half the confidence interval is at most this
            part of the mean; None: use every probe.
        confidence: level of the confidence interval. The interval is Student's, wider on
            the side of the long tail where few eigenvalues dominate; a note says where
            it may still be too short, with fewer than 16 probes.
        basis_on_host: whether the kept vectors are in host memory.
    """

    num_probes: settings.Several = 32
    block_size: settings.Positive = 4
    estimator: Estimator = "hutchinson"
    sketch_size: settings.Positive = 10
    kind: Annotated[str, settings.one_of("rademacher", "normal")] = "rademacher"
    relative_error: settings.Above | None = None
    confidence: settings.Fraction = 0.95
    basis_on_host: bool = False

    @property
    def _num_products(self) -> int:
        return {
            "hutchinson": self.num_probes,
            "hutch++": 2 * self.sketch_size + self.num_probes,
            "xtrace": 2 * self.num_probes,
        }[self.estimator]

    def work(self, params: PyTree) -> Work:
        """The products of its estimator, and the vectors that this one keeps."""
        del params
        kept = {"hutch++": self.sketch_size, "xtrace": 2 * self.num_probes}
        basis, bases = kept.get(self.estimator, 0), 1 + (self.estimator == "xtrace")
        return self.planned(
            self._num_products,
            block_size=self.block_size,
            basis=basis,
            on_host=max(basis - bases * ON_DEVICE, 0) if self.basis_on_host else 0,
            working=in_blocks(self.block_size),
            rounded_products=NUM_DRAWS + 1,
            num_results=basis,
        )

    def run(self, context: Context) -> MeasurementResult:
        """Draw the probes, from the saved state on if there is one."""
        found = self._estimate(context)
        size, unit = self.dimension(context), self.unit(context)
        converged = found.converged is not False
        low, high = found.interval
        numbers = {
            "trace": Number(
                found.mean,
                unit,
                found.standard_error,
                STANDARD_ERROR,
                converged=converged,
                interval=found.interval,
                count=found.num_probes,
            ),
            "mean_eigenvalue": Number(
                found.mean / size,
                unit,
                found.standard_error / size,
                STANDARD_ERROR,
                converged=converged,
                interval=(low / size, high / size),
                count=found.num_probes,
            ),
        }
        numbers = self._with_rounding(context, numbers)
        notes = context.rounding.notes + self.optimizer_notes(context)
        notes += skewness_notes({"trace": found})
        if found.rank is not None:
            notes += (
                f"The subspace holds the whole range of the matrix, of rank {found.rank}:"
                " the trace is exact up to rounding.",
            )
        return result(self, numbers, arrays={"samples": found.samples}, notes=notes)

    def plots(self) -> Sequence[Plot]:
        """The samples, and which estimator they are from."""
        return (Plot(CAPTIONS[self.estimator], _samples),)

    def _estimate(self, context) -> TraceEstimate:
        state_class, estimator, own = ESTIMATORS[self.estimator]
        shared = ("num_probes", "relative_error", "confidence", "block_size")
        return context.resumed(
            self.name,
            state_class,
            self._num_products,
            functools.partial(
                estimator,
                self.product(context, self.block_size),
                context.params,
                context.key(f"{self.name}/probes"),
                **{name: getattr(self, name) for name in (*shared, *own)},
            ),
        )

    def _with_rounding(self, context, numbers) -> dict[str, Number]:
        size = self.dimension(context)

        def at(params):
            trace = self.one_probe(context, params).trace.mean
            return {"trace": trace, "mean_eigenvalue": trace / size}

        numbers = context.rounding.include(numbers, at)
        if self.relative_error is None:
            return numbers
        # More probes do not reduce the rounding, whether they are requested or not.
        low, high = numbers["trace"].interval
        met = (high - low) / 2 <= self.relative_error * abs(numbers["trace"].value)
        return {
            name: dataclasses.replace(x, converged=x.converged and met)
            for name, x in numbers.items()
        }


def skewness_notes(estimates: Mapping[str, TraceEstimate]) -> tuple[str, ...]:
    """A note that names the estimates whose intervals may cover too seldom, or none."""
    names = [
        f"{name} (skewness {found.skewness:.1f})"
        for name, found in estimates.items()
        if found.too_skewed
    ]
    if not names:
        return ()
    return (
        "Few eigenvalues dominate: the confidence intervals, although widened for skewed "
        f"samples, may still be too short: {', '.join(names[:3])}. At least "
        f"{hutchinson.FEW_PROBES} probes make them reliable; Hutch++ and XTrace make "
        "them shorter.",
    )


def _samples(result: MeasurementResult) -> Figure | None:
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
