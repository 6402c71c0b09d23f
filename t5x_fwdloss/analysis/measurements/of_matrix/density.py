"""The density of a matrix's eigenvalues, by stochastic Lanczos quadrature."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import PyTree
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, Measurement, result
from t5x_fwdloss.analysis.measurements.of_matrix.matrix import MatrixMeasurement
from t5x_fwdloss.analysis.measurements.rounding import NUM_DRAWS
from t5x_fwdloss.analysis.measurements.work import Work
from t5x_fwdloss.analysis.numbers import (
    INSIDE,
    STANDARD_ERROR,
    MeasurementResult,
    Number,
)
from t5x_fwdloss.analysis.objective import matrices
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature.estimators import damped_sums, smoothing
from t5x_fwdloss.curvature.estimators.slq import (
    SlqState,
    SpectralSamples,
    slq,
    spectral_sum,
)
from t5x_fwdloss.curvature.krylov.basis import ON_DEVICE
from t5x_fwdloss.curvature.vectors import probes, trees

OVER_PROBES = f"{STANDARD_ERROR}, over probes"
WITH_GAP = f"{OVER_PROBES}, plus half the distance of Gauss and Gauss-Radau quadratures"
# A gap below this fraction of a sum does not call for more steps.
SMALL_GAP = 0.01


def lanczos_work(measurement: Any, params: PyTree, num_searches: int) -> Work:
    """The work of Lanczos from one probe after the other.

    Args:
        measurement: a `MatrixMeasurement` with `num_steps` and `basis_on_host`.
        params: the parameters, or their shapes.
        num_searches: the number of probes.
    """
    steps = min(measurement.num_steps, trees.dimension(params))
    return measurement.planned(
        num_searches * steps,
        basis=steps + 1,
        on_host=max(steps + 1 - ON_DEVICE, 0) if measurement.basis_on_host else 0,
        working=2,  # the probe, and a vector that gives shapes
        rounded_products=2 + NUM_DRAWS + 1,
        num_results=1,
    )


@dataclasses.dataclass(frozen=True)
class SpectralDensity(MatrixMeasurement):
    """The density of a matrix's eigenvalues, by stochastic Lanczos quadrature.

    Nodes and weights of every probe go into the .npz file: width, grid and axes of a
    plot can be chosen afterwards (`t5x_fwdloss.curvature.estimators.smoothing`).

    Results: `trace` and `frobenius_norm`; `negative_fraction`, the fraction of
    eigenvalues below `-zero_level`; `zero_fraction`, the fraction within `zero_level`
    of zero, which are zero up to rounding; `zero_level` itself, 10 eps sqrt(steps)
    times the largest magnitude of a node, with eps the unit of rounding of the vectors,
    or the measured rounding of products in a narrower type; the largest and the
    smallest node. Errors are standard errors over probes, without the error of too few
    steps: an eigenvalue gets the sign of the node that stands for it.

    For each $a$ in `effective_dimension_at`: `effective_dimension_at_<a>`, the sum over
    eigenvalues of λ / (λ + a), and `log_determinant_at_<a>`, that of log(λ + a) with λ
    and a in the unit of the matrix. Their errors bound the error of too few steps, too,
    and they are not converged where that is the larger part and above one percent; the
    rounding of a network narrower than float32 is in them as far as `zero_level`.

    Attributes:
        num_probes: number of random probes; the band of the density is over them.
        num_steps: products for each probe.
        kind: 'rademacher' or 'normal'.
        basis_on_host: whether the Lanczos vectors are kept in host memory.
        effective_dimension_at: dampings $a$ above 0; of any matrix but the Hessian,
            which has negative eigenvalues.
    """

    num_probes: settings.Positive = 4
    num_steps: settings.Positive = 40
    kind: Annotated[str, settings.one_of("rademacher", "normal")] = "rademacher"
    basis_on_host: bool = False
    effective_dimension_at: Sequence[settings.Above] = ()

    def check_settings(self, earlier: Sequence[Measurement]) -> None:
        """Check that the matrix has an effective dimension, if one is wanted.

        Args:
            earlier: the measurements before this one.

        Raises:
            ValueError: the matrix is the Hessian.
        """
        super().check_settings(earlier)
        if self.effective_dimension_at and self.matrix == "hessian":
            others = ", ".join(name for name in matrices.WORDS if name != "hessian")
            raise ValueError(
                "SpectralDensity.effective_dimension_at needs a matrix without negative "
                f"eigenvalues, one of {others}: got matrix='hessian'."
            )

    def work(self, params: PyTree) -> Work:
        """The steps of Lanczos, probe by probe."""
        return lanczos_work(self, params, self.num_probes)

    def run(self, context: Context) -> MeasurementResult:
        """Run Lanczos probe by probe, from the saved state if there is one."""
        key = context.key(f"{self.name}/probes")
        like = probes.random_like(key, context.params)
        samples = context.resumed(
            self.name,
            SlqState,
            self.num_probes * self.num_steps,
            functools.partial(
                slq,
                self.product(context),
                like,
                key,
                num_probes=self.num_probes,
                num_steps=self.num_steps,
                kind=self.kind,
                mask=self.mask(context),
                basis_on_host=self.basis_on_host,
            ),
            note=lambda state: f"probe {len(state.nodes) + 1}",
        )

        def at(params):
            found = self.one_probe(context, params)
            return {"trace": found.trace.mean, "frobenius_norm": found.frobenius_norm}

        noise = context.rounding.of_product(self.product(context), like)
        level = smoothing.zero_level(samples, trees.epsilon(like), noise)
        numbers = self._numbers(context, samples, level)
        numbers = context.rounding.include(numbers, at)
        sums, left_out = self._damped_sums(samples, level)
        numbers |= sums
        notes = context.rounding.notes + self.optimizer_notes(context) + left_out
        return result(self, numbers, arrays=arrays_of(samples), notes=notes)

    def plots(self) -> Sequence[Plot]:
        """The smoothed density."""
        return (
            Plot(
                "The density of the eigenvalues, smoothed; nodes and weights are in the "
                ".npz file, for other widths and grids.",
                _density,
                _densities,
            ),
        )

    def _numbers(self, context, samples, level) -> dict[str, Number]:
        count = samples.num_probes
        trace = spectral_sum(samples, lambda x: x)
        square = spectral_sum(samples, np.square)
        norm = float(np.sqrt(square.mean))
        negative, zero = smoothing.signs(samples, level)
        nodes = np.concatenate(samples.nodes)

        def number(value, unit, error):
            return Number(value, unit, error, OVER_PROBES, count=count)

        unit = self.unit(context)
        return {
            "trace": number(trace.mean, unit, trace.standard_error),
            "frobenius_norm": number(
                norm, unit, square.standard_error / (2 * norm) if norm else 0.0
            ),
            "negative_fraction": number(negative[0], "1", negative[1]),
            "zero_fraction": number(zero[0], "1", zero[1]),
            "zero_level": Number(level, unit, count=count),
            "largest_node": Number(float(nodes.max()), unit, None, INSIDE, count=count),
            "smallest_node": Number(
                float(nodes.min()), unit, None, INSIDE, count=count
            ),
        }

    def _damped_sums(self, samples, level) -> tuple[dict[str, Number], tuple[str, ...]]:
        """The sums at each damping, and notes on those that are left out."""
        sums = {
            "effective_dimension": damped_sums.effective_dimension,
            "log_determinant": damped_sums.log_determinant,
        }
        numbers, notes = {}, []
        for damping in self.effective_dimension_at:
            for name, estimate in sums.items():
                label = f"{name}_at_{damping:g}"
                try:
                    found = estimate(samples, damping, level=level, low=self.damping)
                except ValueError as error:
                    notes.append(f"{label} is left out: {error}")
                    continue
                small = SMALL_GAP * abs(found.value)
                numbers[label] = Number(
                    found.value,
                    "1",
                    found.standard_error + found.half_gap,
                    WITH_GAP,
                    converged=found.half_gap <= max(found.standard_error, small),
                    count=samples.num_probes,
                )
        return numbers, tuple(notes)


def arrays_of(samples: SpectralSamples) -> dict[str, np.ndarray]:
    """The nodes, weights and dimension of a quadrature, as they are stored."""
    # Probes that end early have fewer nodes: padded with NaN.
    width = max(len(nodes) for nodes in samples.nodes)

    def padded(rows):
        return np.stack(
            [np.pad(r, (0, width - len(r)), constant_values=np.nan) for r in rows]
        )

    return {
        "nodes": padded(samples.nodes),
        "weights": padded(samples.weights),
        "dimension": np.asarray(samples.dimension),
    }


def _density(result: MeasurementResult) -> Figure | None:
    """The density of the eigenvalues with its band, by value and by magnitude."""
    left = _drawn({"mean over probes": result}, "{:.0%} band")
    left.legend(loc="best")
    return left.get_figure(root=True)


def _densities(results: Mapping[str, MeasurementResult]) -> Figure | None:
    """The densities of several runs, each with its band."""
    # matplotlib leaves labels that begin so out of the legend.
    return figures.with_legend_above(_drawn(results, "_{:.0%} band"))


def _drawn(results, band) -> Axes:
    left, right = figures.panels(2, columns=2)
    bounds = {left: [], right: []}
    for number, (label, of_run) in enumerate(results.items()):
        found = spectral_samples(of_run)
        look = figures.series(number)
        for axis, samples in (
            (left, found),
            (right, smoothing.log_magnitudes(found, 1e-8)),
        ):
            curve = smoothing.density(samples)
            axis.plot(curve.grid, curve.mean, label=label, **look)
            top = curve.mean.max()
            if samples.num_probes > 1:
                top = curve.high.max()
                axis.fill_between(
                    curve.grid,
                    curve.low,
                    curve.high,
                    color=look["color"],
                    alpha=0.2,
                    linewidth=0,
                    label=band.format(curve.confidence),
                )
            bounds[axis].append((_floor(curve.mean), 2 * top))
    for axis, ends in bounds.items():
        lows, tops = zip(*ends, strict=True)
        axis.set_ylim(bottom=min(lows), top=max(tops))
        axis.set_yscale("log")
    left.set_ylabel("density")
    unit = next(iter(results.values())).numbers["trace"].unit
    left.set_xlabel(f"eigenvalue, {unit}")
    right.set_xlabel("log10 of its magnitude")
    return left


def spectral_samples(result: MeasurementResult) -> SpectralSamples:
    """The nodes and weights in a density's arrays."""
    nodes, weights = result.arrays["nodes"], result.arrays["weights"]
    return SpectralSamples(
        nodes=[row[~np.isnan(row)] for row in nodes],
        weights=[row[~np.isnan(row)] for row in weights],
        dimension=int(result.arrays["dimension"]),
        num_products=int(np.isfinite(nodes).sum()),
        num_exhausted=0,
    )


def _floor(values):
    # Below one part in a million of the peak a density shows only its smoothing.
    return max(values.max() * 1e-6, values[values > 0].min())
