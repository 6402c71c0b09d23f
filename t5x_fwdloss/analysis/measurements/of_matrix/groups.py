"""Where in the network the curvature sits: traces by group of parameters.

The groups come from the same probes, so that they add up to the whole. A trace says
nothing about blocks off the diagonal; the Frobenius norm beside it counts them too.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, result
from t5x_fwdloss.analysis.measurements.of_matrix.matrix import ProbedMeasurement
from t5x_fwdloss.analysis.measurements.of_matrix.trace import skewness_notes
from t5x_fwdloss.analysis.numbers import STANDARD_ERROR, MeasurementResult, Number
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature.vectors import groups, trees


@dataclasses.dataclass(frozen=True)
class GroupTraces(ProbedMeasurement):
    """The trace of a matrix's diagonal block of each group of parameters.

    Attributes:
        groups: group's name to a regular expression that matches the whole path of its
            parameters, such as `{'decoder': 'decoder/.*'}`; None: by layer, the first
            two parts of the path.
        confidence: level of the confidence intervals.
    """

    groups: Mapping[settings.Words, settings.Pattern] | None = None
    confidence: settings.Fraction = 0.95

    @property
    def patterns_of_groups(self) -> Sequence[str]:
        """Those that are given."""
        return (*super().patterns_of_groups, *(self.groups or {}).values())

    def validate(self, context: Context) -> None:
        """Check the matrix, and that there is something of it in a group.

        Raises:
            ValueError: a pattern matches nothing, or all groups are outside of `group`.
        """
        super().validate(context)
        if not self.masks(context):
            raise ValueError(
                "GroupTraces.groups must hold parameters that are measured, those of "
                f"group={self.group!r} that are trained: none of "
                f"{', '.join(self.groups or ())} does."
            )

    def masks(self, context: Context) -> dict[str, PyTree]:
        """The groups as trees of booleans; by layer where none are given."""
        return self.parts(context, self.groups or by_layer(context.params))

    def run(self, context: Context) -> MeasurementResult:
        """Draw the probes, resuming from the saved sums, if any."""
        masks = self.masks(context)
        found = self.probed(context, groups=masks, confidence=self.confidence)
        return self._result(context, found, masks)

    def _result(self, context, found, masks) -> MeasurementResult:
        unit = self.unit(context)

        def number(estimate, size=1):
            low, high = estimate.interval
            return Number(
                estimate.mean / size,
                unit,
                estimate.standard_error / size,
                STANDARD_ERROR,
                interval=(low / size, high / size),
                count=estimate.num_probes,
            )

        numbers = {"trace": number(found.trace)}
        numbers["frobenius_norm"] = Number(
            found.frobenius_norm, unit, found.frobenius_error, STANDARD_ERROR
        )
        samples, labels = {}, labels_of(found.groups)
        for name, estimate in found.groups.items():
            size = groups.group_dimension(context.params, masks[name])
            label = labels[name]
            numbers[f"{label}/trace"] = number(estimate)
            numbers[f"{label}/mean_eigenvalue"] = number(estimate, size)
            numbers[f"{label}/parameters"] = Number(float(size), "1")
            samples[f"{label}/samples"] = estimate.samples
        numbers = self._with_rounding(context, numbers, masks)
        notes = context.rounding.notes
        skewed = skewness_notes({"trace": found.trace} | found.groups)
        notes += (*self.optimizer_notes(context), *self._not_covered(context, masks))
        return result(self, numbers, arrays=samples, notes=notes + skewed)

    def plots(self) -> Sequence[Plot]:
        """The traces of the groups."""
        return (
            Plot(
                "The trace by group of parameters, with its confidence interval.",
                _group_traces,
            ),
        )

    def _not_covered(self, context, masks) -> tuple[str, ...]:
        """A note that names leaves, if there are any, that are not in one group each."""
        covered = np.sum([jax.tree.leaves(mask) for mask in masks.values()], axis=0)
        mask = self.mask(context)
        odd = covered != (1 if mask is None else np.asarray(jax.tree.leaves(mask)))
        if not odd.any():
            return ()
        paths = np.asarray(trees.leaf_paths(trees.float_part(context.params)))
        return (
            f"The groups do not add up to the whole: {int(odd.sum())} leaves are in none "
            f"or in several, such as {', '.join(paths[odd][:3])}.",
        )

    def _with_rounding(self, context, numbers, masks) -> dict[str, Number]:
        def at(params):
            found = self.one_probe(context, params, groups=masks)
            changed, labels = {"trace": found.trace.mean}, labels_of(found.groups)
            changed["frobenius_norm"] = found.frobenius_norm
            for name, estimate in found.groups.items():
                size = groups.group_dimension(context.params, masks[name])
                label = labels[name]
                changed[f"{label}/trace"] = estimate.mean
                changed[f"{label}/mean_eigenvalue"] = estimate.mean / size
            return changed

        return context.rounding.include(numbers, at)


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """The names of groups in names of results: '.' instead of '/'.

    Names that would then coincide, 'a/b' and 'a.b', are kept.
    """
    short = {name: name.replace("/", ".") for name in names}
    shared = collections.Counter(short.values())
    return {name: x if shared[x] == 1 else name for name, x in short.items()}


def by_layer(params) -> dict[str, str]:
    """One group for each pair of first parts of the paths, `decoder/layers_0`."""
    paths = trees.leaf_paths(trees.float_part(params))
    prefixes = dict.fromkeys("/".join(path.split("/")[:2]) for path in paths)
    return {prefix: re.escape(prefix) + "(/.*)?" for prefix in prefixes}


def _group_traces(result: MeasurementResult) -> Figure | None:
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
