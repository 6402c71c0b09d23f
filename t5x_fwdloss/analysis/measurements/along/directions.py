r"""Loss, slope and curvature along directions.

Along a unit vector $v$ the loss is $L(\theta + t v) = L + t \langle g, v \rangle +
\tfrac{t^2}{2} \langle v, H v \rangle + O(t^3)$. The first three numbers are measured,
and the loss itself at some $t$, so that the report shows where the model holds.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.along import named
from t5x_fwdloss.analysis.measurements.along.named import NORMALIZATIONS, Direction
from t5x_fwdloss.analysis.measurements.context import Context, Measurement, result
from t5x_fwdloss.analysis.numbers import MeasurementResult, Number
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature.vectors import trees

FORWARD_REVERSE = "difference of forward and reverse mode"


@dataclasses.dataclass(frozen=True)
class DirectionalDerivatives(Measurement):
    """The loss along gradients, random directions, eigenvectors and checkpoints.

    Attributes:
        name: name in the results.
        along_gradient: whether the normalized gradient is a direction.
        along_preconditioned_gradient: whether the gradient, preconditioned by the
            checkpoint's optimizer, is one.
        num_random: number of seeded random directions, Gaussian.
        random_normalization: 'vector' keeps their scale; 'leaf' and 'filter' give each
            parameter, or each filter of it, the norm that it has in the checkpoint (Li
            et al. 2018). All are then scaled to norm one.
        eigenvectors_of: name of a measurement before this one that saves eigenvectors;
            each is a direction.
        checkpoints: paths of checkpoints; the direction is their parameters minus these.
        num_points: number of points at which the loss itself is computed; 0 for none.
        relative_radius: the points' largest distance, in units of the parameters' norm.
    """

    needs_forward_mode: ClassVar = True

    name: settings.Words = "directional_derivatives"
    along_gradient: bool = True
    along_preconditioned_gradient: bool = False
    num_random: settings.Count = 3
    random_normalization: Annotated[str, settings.one_of(*NORMALIZATIONS)] = "vector"
    eigenvectors_of: settings.Words | None = None
    checkpoints: Sequence[settings.Path] = ()
    num_points: settings.Count = 9
    relative_radius: settings.Above = 0.02

    @property
    def first_matrix(self) -> str:
        """The Hessian, for the curvatures."""
        return "hessian"

    @property
    def optimizer_setting(self) -> str:
        """The setting of the preconditioned gradient, if that is a direction."""
        setting = "along_preconditioned_gradient"
        return setting if self.along_preconditioned_gradient else ""

    def check_settings(self, earlier: Sequence[Measurement]) -> None:
        """Check that there is a direction.

        Args:
            earlier: the measurements before this one.

        Raises:
            ValueError: there is none, or no earlier measurement saves the eigenvectors.
        """
        if self.eigenvectors_of:
            named.check_source(
                "DirectionalDerivatives.eigenvectors_of", self.eigenvectors_of, earlier
            )
        directions = (
            self.along_gradient,
            self.along_preconditioned_gradient,
            self.num_random,
            self.eigenvectors_of,
            self.checkpoints,
        )
        if not any(directions):
            raise ValueError(
                "DirectionalDerivatives needs a direction: got along_gradient=False, "
                "num_random=0, no eigenvectors and no checkpoints."
            )

    def validate(self, context: Context) -> None:
        """Check that the optimizer's state and other checkpoints load and fit.

        Otherwise, or where the run cannot load them, it raises `ValueError`.
        """
        named.check_loaded(
            (direction for _, direction in self._named(context)),
            context,
            {
                "preconditioned_gradient": (
                    "DirectionalDerivatives.along_preconditioned_gradient"
                ),
                "checkpoint": "DirectionalDerivatives.checkpoints",
            },
        )

    def run(self, context: Context) -> MeasurementResult:
        """Measure every direction, one after the other."""
        shares = context.objective.batch_values(context.params)
        numbers = {"loss": Number(float(np.sum(shares)), context.unit)}
        numbers |= _spread(shares, context.unit)
        numbers["gradient_norm"] = Number(
            float(trees.norm(context.gradient())), context.slope_unit
        )
        numbers = self._with_rounding(context, numbers)
        arrays: dict[str, np.ndarray] = {"batch_losses": shares}
        notes: list[str] = []
        with context.progress(self.name, self._num_directions(context)) as progress:
            for label, direction in self._directions(context):
                length = float(trees.norm(direction))
                if length == 0.0:
                    notes.append(f"The direction {label} is zero and was left out.")
                    continue
                unit = trees.scale(1.0 / length, direction)
                numbers |= self._measure(context, label, unit, length)
                arrays |= self._points(context, label, unit, length, numbers)
                progress.update(note=label)
                context.step()
        notes += context.rounding.notes
        return result(self, numbers, arrays=arrays, notes=tuple(notes))

    def plots(self) -> Sequence[Plot]:
        """The loss along each direction."""
        return (
            Plot(
                "The change of the loss along unit directions. Where points leave the "
                "curve, third and higher derivatives matter.",
                _lines,
            ),
        )

    def _num_directions(self, context):
        return (
            int(self.along_gradient)
            + int(self.along_preconditioned_gradient)
            + self.num_random
            + context.vectors.get(self.eigenvectors_of, 0)
            + len(self.checkpoints)
        )

    def _directions(self, context) -> Iterator[tuple[str, PyTree]]:
        for label, direction in self._named(context):
            found = named.vector(
                direction, context, self.name, self.random_normalization
            )
            if found is not None:
                yield label, found

    def _named(self, context) -> Iterator[tuple[str, Direction]]:
        if self.along_gradient:
            yield "gradient", Direction("gradient")
        if self.along_preconditioned_gradient:
            yield "preconditioned_gradient", Direction("preconditioned_gradient")
        for i in range(self.num_random):
            yield f"random_{i}", Direction("random", number=i)
        if self.eigenvectors_of:
            for i in range(context.vectors[self.eigenvectors_of]):
                source = self.eigenvectors_of
                yield f"eigenvector_{i}", Direction("eigenvector", source, i)
        for i, path in enumerate(self.checkpoints):
            yield f"checkpoint_{i}", Direction("checkpoint", str(path))

    def _with_rounding(self, context, numbers) -> dict[str, Number]:
        # The norm of a rounded gradient is too large on average; its derivative along
        # the same direction, rounded anew, is not.
        length = numbers["gradient_norm"].value
        if length == 0.0:
            return numbers
        unit = trees.scale(1.0 / length, context.gradient())

        def at(params):
            loss, slope = context.objective.jvp(params, unit)
            return {"loss": loss, "gradient_norm": slope}

        base = {name: numbers[name].value for name in ("loss", "gradient_norm")}
        return context.rounding.include(numbers, at, base)

    def _measure(self, context, label, unit, length) -> dict[str, Number]:
        objective = context.objective

        def at(params):
            _, slope = objective.jvp(context.params if params is None else params, unit)
            product = context.product("hessian", at=params)(unit)
            curvature = float(trees.inner(unit, product))
            found = {"slope": slope, "curvature": curvature}
            return found | {"step_to_minimum": -slope / curvature if curvature else 0.0}

        by_gradient = float(trees.inner(context.gradient(), unit))
        base = at(None)
        slope, curvature = base["slope"], base["curvature"]
        found = {
            "slope": Number(
                slope, context.slope_unit, abs(slope - by_gradient), FORWARD_REVERSE
            ),
            "curvature": Number(curvature, context.curvature_unit),
        }
        if curvature > 0:
            found["step_to_minimum"] = Number(-slope / curvature, "θ")
        found = context.rounding.include(found, at, base)
        if label.startswith("checkpoint"):
            found["distance"] = Number(length, "θ")
        return {f"{label}/{name}": number for name, number in found.items()}

    def _points(self, context, label, unit, length, numbers) -> dict[str, np.ndarray]:
        if not self.num_points:
            return {}
        slope = numbers[f"{label}/slope"].value
        curvature = numbers[f"{label}/curvature"].value
        if label.startswith("checkpoint"):
            steps = np.linspace(0.0, length, self.num_points)
        else:
            floats = trees.float_part(context.params)
            reach = self.relative_radius * float(trees.norm(floats))
            if curvature > 0 and slope:
                # Twice the distance to the minimum shows the bowl; much more does not.
                reach = min(reach, 2 * abs(slope) / curvature)
            steps = np.linspace(-reach, reach, self.num_points)
        losses = [
            context.objective.value(named.moved(context.params, [step], [unit]))
            for step in steps.tolist()
        ]
        return {
            f"{label}/steps": steps,
            f"{label}/losses": np.asarray(losses),
            f"{label}/model": numbers["loss"].value
            + slope * steps
            + curvature * steps**2 / 2,
        }


def _spread(shares: np.ndarray, unit: str) -> dict[str, Number]:
    # How much the loss would vary over other batches drawn like these; the loss over
    # these batches itself has no error but rounding.
    if len(shares) < 2:
        return {}
    error = float(np.std(shares, ddof=1) * np.sqrt(len(shares)))
    return {"loss_spread_over_batches": Number(error, unit, count=len(shares))}


def _lines(result: MeasurementResult) -> Figure | None:
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
