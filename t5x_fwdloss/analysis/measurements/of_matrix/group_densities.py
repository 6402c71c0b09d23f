"""The densities of the blocks of a matrix, and how far they are from each other."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, result
from t5x_fwdloss.analysis.measurements.of_matrix.density import (
    OVER_PROBES,
    arrays_of,
    lanczos_work,
)
from t5x_fwdloss.analysis.measurements.of_matrix.groups import by_layer, labels_of
from t5x_fwdloss.analysis.measurements.of_matrix.matrix import MatrixMeasurement
from t5x_fwdloss.analysis.measurements.work import Work
from t5x_fwdloss.analysis.numbers import INSIDE, MeasurementResult, Number
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import INK, SERIES
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature.estimators import smoothing
from t5x_fwdloss.curvature.estimators.density_distances import density_distances
from t5x_fwdloss.curvature.estimators.slq import (
    SlqState,
    SpectralSamples,
    slq,
    spectral_sum,
)
from t5x_fwdloss.curvature.vectors import groups, probes, trees

JACKKNIFE = "standard error by the jackknife over probes"


@dataclasses.dataclass
class GroupsState:
    """The quadratures of the groups that are finished, and of the one at work."""

    finished: list[SlqState] = dataclasses.field(default_factory=list)
    current: SlqState = dataclasses.field(default_factory=SlqState)

    @property
    def num_products(self) -> int:
        """Products so far."""
        return sum(x.num_products for x in (*self.finished, self.current))


@dataclasses.dataclass(frozen=True)
class GroupDensities(MatrixMeasurement):
    """The spectral densities of a matrix's diagonal blocks, group by group.

    Results: `mean_js_distance`, the mean Jensen-Shannon distance of two groups'
    densities, 0 where all are alike and at most 1 (see
    `curvature.estimators.density_distances` for the axis and the smoothing). For each
    group: `<group>/js_distance`, its mean distance from the others; `<group>/trace`;
    `<group>/negative_fraction`; `<group>/largest_node` and `<group>/smallest_node`;
    `<group>/parameters`. Nodes and weights, and the distance of each pair, are in the
    .npz file. The rounding of a network narrower than float32 is in the errors of the
    traces, and in the axis of the distances.

    Attributes:
        groups: group's name to a regular expression that matches the whole path of its
            parameters; two or more, which may not be empty; None: by layer, the first
            two parts of the path.
        num_probes: number of random probes for each group.
        num_steps: products for each probe.
        width: standard deviation of the smoothing Gaussian, in decades.
        basis_on_host: whether the Lanczos vectors are kept in host memory.
    """

    groups: Mapping[settings.Words, settings.Pattern] | None = None
    num_probes: settings.Positive = 4
    num_steps: settings.Positive = 30
    width: settings.Above = 0.2
    basis_on_host: bool = False

    @property
    def patterns_of_groups(self) -> Sequence[str]:
        """Those that are given."""
        return (*super().patterns_of_groups, *(self.groups or {}).values())

    def validate(self, context: Context) -> None:
        """Check the matrix, and that there are two groups of it.

        Raises:
            ValueError: a pattern matches nothing, or fewer than two groups hold
                parameters that are measured.
        """
        super().validate(context)
        found = self._masks(context)
        if len(found) < 2:
            raise ValueError(
                "GroupDensities.groups must be two groups or more that hold parameters "
                f"which are measured: got {', '.join(found) or 'none'}."
            )

    def work(self, params: PyTree) -> Work:
        """The steps of Lanczos, probe by probe and group by group."""
        named = self.groups or by_layer(params)
        return lanczos_work(self, params, len(named) * self.num_probes)

    def run(self, context: Context) -> MeasurementResult:
        """Run Lanczos group by group, from the saved state if there is one."""
        masks = self._masks(context)
        like = probes.random_like(context.key(f"{self.name}/probes"), context.params)
        product = self.product(context)
        state = context.resumed(
            self.name,
            GroupsState,
            len(masks) * self.num_probes * self.num_steps,
            lambda on_step, state: self._search(
                context, product, like, masks, on_step, state or GroupsState()
            ),
            note=lambda state: f"group {len(state.finished) + 1} of {len(masks)}",
        )
        samples = {
            label: _samples(found, groups.group_dimension(context.params, mask))
            for found, (label, mask) in zip(state.finished, masks.items(), strict=True)
        }
        noise = context.rounding.of_product(product, like)
        levels = {
            label: smoothing.zero_level(x, trees.epsilon(like), noise)
            for label, x in samples.items()
        }
        # Of matrices of zeros, too, there is an axis.
        level = max(levels.values()) or 1.0
        found = density_distances(list(samples.values()), level, self.width)
        numbers = {
            "mean_js_distance": Number(
                found.mean, "1", found.mean_error, JACKKNIFE, count=self.num_probes
            )
        }
        errors = zip(found.of_each, found.of_each_error, strict=True)
        for label, (distance, error) in zip(samples, errors, strict=True):
            numbers[f"{label}/js_distance"] = Number(
                float(distance), "1", float(error), JACKKNIFE, count=self.num_probes
            )
            of_group = self._numbers(context, samples[label], levels[label])
            numbers |= {f"{label}/{name}": x for name, x in of_group.items()}

        def at(params):
            traces = self.one_probe(context, params, groups=masks).groups
            return {f"{label}/trace": x.mean for label, x in traces.items()}

        numbers = context.rounding.include(numbers, at)
        arrays = {
            "js_distances": found.distances,
            "grid": found.grid,
            "densities": found.densities,
            "zero_level": np.asarray(level),
        }
        for label, x in samples.items():
            arrays |= {f"{label}/{name}": y for name, y in arrays_of(x).items()}
        notes = context.rounding.notes + self.optimizer_notes(context)
        return result(self, numbers, arrays=arrays, notes=notes)

    def plots(self) -> Sequence[Plot]:
        """The densities, and the distance of each pair."""
        return (
            Plot(
                "The densities of the groups, smoothed, against the signed number of "
                "decades above the level of rounding.",
                _densities,
            ),
            Plot("The Jensen-Shannon distance of each pair of groups.", _distances),
        )

    def _masks(self, context) -> dict[str, PyTree]:
        patterns = by_layer(context.params) if self.groups is None else self.groups
        masks = self.parts(context, patterns)
        labels = labels_of(masks)
        return {labels[name]: mask for name, mask in masks.items()}

    def _search(self, context, product, like, masks, on_step, state) -> GroupsState:
        key = context.key(f"{self.name}/probes")
        for number, mask in enumerate(masks.values()):
            if number < len(state.finished):
                continue
            slq(
                groups.restricted(product, mask),
                like,
                jax.random.fold_in(key, number),
                num_probes=self.num_probes,
                num_steps=self.num_steps,
                mask=mask,
                basis_on_host=self.basis_on_host,
                on_step=lambda _: on_step(state),
                state=state.current,
            )
            state.finished.append(state.current)
            state.current = SlqState()
        return state

    def _numbers(self, context, samples, level) -> dict[str, Number]:
        trace, unit = spectral_sum(samples, lambda x: x), self.unit(context)
        (negative, error), _ = smoothing.signs(samples, level)
        nodes, count = np.concatenate(samples.nodes), self.num_probes
        end = lambda x: Number(float(x), unit, None, INSIDE, count=count)
        return {
            "trace": Number(
                trace.mean, unit, trace.standard_error, OVER_PROBES, count=count
            ),
            "negative_fraction": Number(negative, "1", error, OVER_PROBES, count=count),
            "largest_node": end(nodes.max()),
            "smallest_node": end(nodes.min()),
            "parameters": Number(float(samples.dimension), "1"),
        }


def _samples(state, dimension) -> SpectralSamples:
    arrays = lambda rows: [np.array(row) for row in rows]
    return SpectralSamples(
        arrays(state.nodes),
        arrays(state.weights),
        dimension,
        state.num_finished,
        state.num_exhausted,
    )


def _labels(result) -> list[str]:
    names = [n for n in result.numbers if n.endswith("/js_distance")]
    return [name.removesuffix("/js_distance") for name in names]


def _densities(result: MeasurementResult) -> Figure | None:
    """A row for each group, its density in units of its peak."""
    labels, grid = _labels(result), result.arrays["grid"]
    (axis,) = figures.panels(1, height=0.8 + 0.4 * len(labels))
    places = np.arange(len(labels))[::-1]
    for place, density in zip(places, result.arrays["densities"], strict=True):
        top = place + 0.9 * density / density.max()
        axis.fill_between(grid, place, top, color=SERIES[0], alpha=0.3, linewidth=0)
        axis.plot(grid, top, color=SERIES[0], linewidth=1)
    axis.set_yticks(places, labels)
    axis.grid(visible=False, axis="y")
    level, unit = result.arrays["zero_level"], result.numbers[f"{labels[0]}/trace"].unit
    axis.set_xlabel(f"signed decades of the eigenvalue above {level:.2g} {unit}")
    return axis.get_figure(root=True)


def _distances(result: MeasurementResult) -> Figure | None:
    """A square for each pair, the darker the farther apart."""
    labels, distances = _labels(result), result.arrays["js_distances"]
    count = len(labels)
    (axis,) = figures.panels(1, height=1.2 + 0.4 * count)
    for (row, column), distance in np.ndenumerate(distances):
        corner = (column - 0.5, row - 0.5)
        axis.add_patch(
            Rectangle(corner, 1, 1, color=SERIES[0], alpha=float(distance), linewidth=0)
        )
        axis.text(
            column, row, f"{distance:.2f}", ha="center", va="center", color=INK, size=7
        )
    axis.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5))
    axis.set_xticks(range(count), labels, rotation=30, ha="right")
    axis.set_yticks(range(count), labels)
    axis.set_xlabel("Jensen-Shannon distance of the row's density from the column's")
    axis.grid(visible=False)
    return axis.get_figure(root=True)
