r"""Eigenpairs at both ends of a spectrum, by Lanczos driven from the host.

With unit eigenvectors $y_i$ and the gradient g, the overlap $\sum_i \langle g, y_i
\rangle^2 / \|g\|^2$ is the part of the squared gradient that lies in their span
(Gur-Ari, Roberts, Dyer 2018, section 2).
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, Measurement, result
from t5x_fwdloss.analysis.measurements.of_matrix.matrix import MatrixMeasurement
from t5x_fwdloss.analysis.measurements.rounding import (
    NORM_FACTOR,
    NUM_DRAWS,
    with_rounding,
)
from t5x_fwdloss.analysis.measurements.work import Work
from t5x_fwdloss.analysis.numbers import (
    RESIDUAL,
    MeasurementResult,
    Number,
)
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.analysis.store import vector_store
from t5x_fwdloss.curvature import EigenpairsState, eigenpairs
from t5x_fwdloss.curvature.krylov import ritz
from t5x_fwdloss.curvature.krylov.basis import ON_DEVICE
from t5x_fwdloss.curvature.krylov.eigenpairs import default_basis, smallest_basis
from t5x_fwdloss.curvature.vectors import directions, groups, probes, trees


@dataclasses.dataclass(frozen=True)
class Eigenpairs(MatrixMeasurement):
    """Eigenvalues at both ends of a spectrum, each with its true residual.

    A pair is converged if its true residual is at most `tolerance` times its own
    magnitude, plus the level of rounding: 10 eps sqrt(products) times the largest
    magnitude, with eps the unit of rounding of the vectors; where the network
    multiplies in a narrower type than float32, twice the measured noise of its products
    times the largest magnitude. Its place must be settled, too: a fresh random vector,
    orthogonal to the found ones, showed no further eigenvalue in front of it, with a
    chance of one in a hundred to miss one. The array `allowed` holds the largest
    residual of each converged pair.

    Attributes:
        num_largest: pairs wanted at the upper end.
        num_smallest: pairs wanted at the lower end, the most negative first; None: 2
            of the Hessian, 0 of the other matrices, whose smallest are near zero.
        max_steps: largest number of products spent on the space.
        tolerance: residual at which a pair is converged, relative to its own magnitude.
        max_basis: largest number of vectors held at once; None: three for each pair and
            ten more.
        basis_on_host: whether the vectors are kept in host memory.
        num_starts: random start vectors. One suffices; if eigenvalues are known to
            occur several times, as many start vectors find them sooner.
        save_eigenvectors: whether the eigenvectors are left in the output folder, in
            `<name>_vectors`, as directions of the parameters.
    """

    num_largest: settings.Count = 5
    num_smallest: settings.FilledIn[settings.Count] = None  # pyright: ignore[reportAssignmentType]
    max_steps: settings.Positive = 80
    tolerance: settings.Fraction = 1e-3
    max_basis: settings.Positive | None = None
    basis_on_host: bool = False
    num_starts: settings.Positive = 1
    save_eigenvectors: bool = False

    def __post_init__(self):
        """Fills in the defaults that depend on the matrix."""
        super().__post_init__()
        if self.num_smallest is None:
            count = 2 if self.matrix == "hessian" else 0
            object.__setattr__(self, "num_smallest", count)

    @property
    def num_vectors(self) -> int:
        """How many eigenvectors it leaves in the output folder, at most."""
        return (self.num_largest + self.num_smallest) * self.save_eigenvectors

    def check_settings(self, earlier: Sequence[Measurement]) -> None:
        """Check that at least one pair is wanted, and that the basis has room.

        Raises:
            ValueError: no pair is wanted, or `max_basis` is too small.
        """
        del earlier
        title, pairs = type(self).__name__, self.num_largest + self.num_smallest
        if pairs < 1:
            raise ValueError(f"{title} needs num_largest or num_smallest: both are 0.")
        least = smallest_basis(pairs, self.num_starts)
        if self.max_basis is not None and self.max_basis < least:
            raise ValueError(
                f"{title}.max_basis must be None or at least {least} for {pairs} pairs "
                f"and {self.num_starts} start vectors: got {self.max_basis}."
            )

    @property
    def _num_pairs(self) -> int:
        return self.num_largest + self.num_smallest

    @property
    def _basis(self) -> int:
        """The largest number of vectors held, as `eigenpairs` chooses it."""
        if self.max_basis is not None:
            return self.max_basis
        return default_basis(self._num_pairs, self.num_starts)

    def work(self, params: PyTree) -> Work:
        """The steps, and one product for each pair in the end."""
        pairs, limit = self._num_pairs, trees.dimension(params)
        steps = min(self.max_steps, limit)
        grown = min(steps + self.num_starts, limit)
        basis = min(self._basis, grown)
        return self.planned(
            steps + pairs,
            basis=basis,
            on_host=max(basis - ON_DEVICE, 0) if self.basis_on_host else 0,
            # The two vectors of the chain that searches the complement.
            working=2,
            replaced=(self._basis + pairs) // 2 if grown > self._basis else pairs,
            rounded_products=2 + max(pairs, NUM_DRAWS * min(pairs, NUM_DRAWS)),
            num_results=pairs,
            gradient=True,
        )

    def lighter(self) -> Sequence[tuple[str, Measurement]]:
        """With its basis on the host, or restarted sooner."""
        found, size = list(super().lighter()), self._basis
        least = smallest_basis(self._num_pairs, self.num_starts)
        while (size := size * 2 // 3) > least:
            found.append(self._with("max_basis", size))
        if self._basis > least:
            found.append(self._with("max_basis", least))
        return found

    def run(self, context: Context) -> MeasurementResult:
        """Run Lanczos, from the saved state if there is one."""
        key = context.key(f"{self.name}/start")

        def draw(number):
            probe = probes.random_like(
                probes.probe_key(key, number) if number else key,
                context.params,
                "normal",
            )
            mask = self.mask(context)
            return probe if mask is None else groups.restrict(probe, mask)

        noise = context.rounding.of_product(self.product(context), draw(0))
        found = context.resumed(
            self.name,
            EigenpairsState,
            self.max_steps,
            functools.partial(
                eigenpairs,
                self.product(context),
                self.num_starts,
                num_largest=self.num_largest,
                num_smallest=self.num_smallest,
                max_steps=self.max_steps,
                tolerance=self.tolerance,
                max_basis=self.max_basis,
                basis_on_host=self.basis_on_host,
                dimension=self.dimension(context),
                fresh=draw,
            ),
            note=_extremes,
        )
        found = _with_noise(found, noise)
        cosines = self._cosines(context, found)
        if self.save_eigenvectors:
            assert context.vectors_path is not None
            self._save(context, found, context.vectors_path(self.name))
        elif context.eigenvectors_dir is not None:
            self._save(context, found, context.eigenvectors_dir / self.name)
        return self._result(context, found, cosines, noise)

    def plots(self) -> Sequence[Plot]:
        """The eigenvalues, and how they converged."""
        return (
            Plot(
                "Eigenvalues; the bar is the true residual: an eigenvalue lies within it.",
                _eigenvalues,
                _eigenvalues_of_runs,
            ),
            Plot("Convergence: the wanted pairs after every product.", _convergence),
        )

    def _cosines(self, context, found) -> np.ndarray:
        gradient = self.vector(context, context.gradient())
        if float(trees.norm(gradient)) == 0.0:
            return np.zeros(len(found.eigenvectors))
        cosines, _ = directions.overlaps(gradient, found.eigenvectors)
        return cosines

    def _save(self, context, found, path):
        # Replaces what a run that was killed here may have written.
        vector_store.save_all(
            path,
            (self.direction(context, vector) for vector in found.eigenvectors),
            is_primary=context.is_primary,
        )

    def _rounding(self, context, found, noise) -> np.ndarray:
        r"""The effect of rounding on each eigenvalue, from one product each, drawn anew.

        An eigenvalue of $A$ lies within the true residual of a pair, which is at most
        $\|\tilde A y - \theta y\| + \|(A - \tilde A) y\|$ for a pair of the rounded map
        $\tilde A$. The second norm is measured by products rounded anew. The change of
        $\langle y, \tilde A y\rangle$ alone is smaller, but does not show the part of
        rounding common to all draws: T5 1.1 small has eigenvalues smaller by 2 to 3 %
        in bfloat16, and draws that differ by 0.6 %.

        The changes relative to the eigenvalue are similar: all pairs share theirs. With
        few pairs, each one is rounded anew in every draw.
        """
        values, count = found.eigenvalues, len(found.eigenvalues)
        sizes = np.abs(values) + noise * found.scale
        turns = itertools.count()

        def at(params):
            turn, product = next(turns), self.product(context, at=params)
            chosen = [
                i for i in range(count) if count <= NUM_DRAWS or i % NUM_DRAWS == turn
            ]
            squares = []
            for i in chosen:
                y = found.eigenvectors[i]
                again = float(trees.norm(trees.axpy(-values[i], y, product(y))))
                # Without the residual, which is orthogonal to random errors.
                change = max(again**2 - float(found.residuals[i]) ** 2, 0.0)
                squares.append(change / sizes[i] ** 2)
            return {"relative": float(np.sqrt(np.mean(squares)))}

        errors = context.rounding.errors(at, {"relative": 0.0}, NORM_FACTOR)
        return sizes * (0.0 if errors is None else float(errors["relative"]))

    def _result(self, context, found, cosines, noise) -> MeasurementResult:
        numbers, rounding = {}, self._rounding(context, found, noise)
        counters = {"largest": itertools.count(1), "smallest": itertools.count(1)}
        for i, end in enumerate(found.ends):
            number = Number(
                float(found.eigenvalues[i]),
                self.unit(context),
                float(found.residuals[i]),
                RESIDUAL,
                converged=bool(found.converged[i]),
                count=found.num_steps,
            )
            label = f"{end}_{next(counters[end])}"
            dtype = context.rounding.dtype
            numbers[label] = with_rounding(number, float(rounding[i]), dtype)
        for end in ("largest", "smallest"):
            of_end = [c for c, e in zip(cosines, found.ends, strict=True) if e == end]
            if of_end:
                overlap = float(np.sum(np.square(of_end)))
                numbers[f"gradient_in_{end}"] = Number(overlap, "1")
        numbers |= self.stability(context)
        numbers["orthogonality"] = Number(found.orthogonality, "1")
        numbers["num_products"] = Number(float(found.num_products), "1")
        notes = [
            *self.optimizer_notes(context),
            *self._notes(found, [n for n in numbers if n.startswith(_ENDS)]),
        ]
        return result(
            self,
            numbers,
            notes=(*notes, *context.rounding.notes),
            arrays={
                "eigenvalues": found.eigenvalues,
                "residuals": found.residuals,
                "allowed": found.allowed,
                "history": found.history,
                "gradient_cosines": cosines,
            },
        )

    def _notes(self, found, names) -> list[str]:
        """Notes on pairs that are not converged, and on the space."""
        missing = _chosen(names, found.residuals > found.allowed)
        unsettled = _chosen(names, ~np.array(found.settled))
        notes = []
        if missing:
            notes.append(
                f"Not converged after {found.num_steps} steps to a relative residual "
                f"of {self.tolerance:g}: {missing}. Raise max_steps or "
                "tolerance; the residuals are true either way."
            )
        if unsettled:
            notes.append(
                f"Places that are not settled after {found.num_steps} steps: "
                f"{unsettled}. Each is an eigenvalue within its residual, but a fresh "
                "random start has not yet shown that none in front of it was "
                "overlooked. Raise max_steps, or max_basis where it is "
                "set."
            )
        if found.exhausted:
            notes.append(
                "The Krylov space became invariant: it holds every eigenvector that "
                "the start vectors have a part in."
            )
        return notes


_ENDS = ("largest_", "smallest_")
_MARKERS = "os^Dv<>"


def _is_pair(name: str) -> bool:
    return re.fullmatch(r"(largest|smallest)_\d+", name) is not None


def _with_noise(found, noise):
    """The pairs, with the rounding of their own products allowed in their residuals.

    The steps end where estimated residuals reach the noise of the steps' products; the
    true ones also contain that of the last product.
    """
    allowed = found.allowed + noise * found.scale
    converged = (found.residuals <= allowed) & np.asarray(found.settled)
    return dataclasses.replace(
        found, allowed=allowed, converged=tuple(map(bool, converged))
    )


def _chosen(names, flags) -> str:
    return ", ".join(np.asarray(names)[flags])


def _extremes(state) -> str:
    values, _, _ = ritz.pairs(state.space)
    return f"Ritz values {values[0]:.4g} to {values[-1]:.4g}"


def _eigenvalues(result: MeasurementResult) -> Figure | None:
    """The eigenvalues in order, with their errors as bars."""
    names = [n for n in result.numbers if _is_pair(n)]
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


def _eigenvalues_of_runs(results: Mapping[str, MeasurementResult]) -> Figure | None:
    """The eigenvalues of several runs side by side; hollow: not converged."""
    named = {n: None for x in results.values() for n in x.numbers if _is_pair(n)}
    ends = {end: [n for n in named if n.startswith(end)] for end in _ENDS}
    place = lambda name: int(name.rpartition("_")[2])
    names = sorted(ends["largest_"], key=place)
    names += sorted(ends["smallest_"], key=place, reverse=True)
    (axis,) = figures.panels(1)
    axis.axhline(0.0, color=FAINT, linewidth=0.8)
    for number, (label, found) in enumerate(results.items()):
        # The runs' points of one eigenvalue lie beside each other.
        shift = 0.6 * ((number + 0.5) / len(results) - 0.5)
        for converged in (True, False):
            points = [
                (names.index(name) + shift, x.value, x.error)
                for name, x in found.numbers.items()
                if name in named and x.converged == converged
            ]
            if points:
                x, y, errors = zip(*points, strict=True)
                axis.errorbar(
                    x,
                    y,
                    yerr=errors,
                    fmt=_MARKERS[number % len(_MARKERS)],
                    color=SERIES[number % len(SERIES)],
                    markerfacecolor=None if converged else "none",
                    capsize=3,
                    label=label if converged else f"{label}, not converged",
                )
    axis.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
    axis.tick_params(axis="x", rotation=30)
    unit = next(iter(results.values())).numbers[names[0]].unit
    axis.set_ylabel(f"eigenvalue, {unit}")
    return figures.with_legend_above(axis)


def _convergence(result: MeasurementResult) -> Figure | None:
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
    right.set_ylabel("relative to the allowed residual")
    for axis in (left, right):
        figures.count_along(axis)
        axis.set_xlabel("products")
    left.legend(loc="best")
    return left.get_figure(root=True)
