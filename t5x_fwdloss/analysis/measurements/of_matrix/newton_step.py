r"""The damped Newton step $x$ with $(A + \lambda I) x = g$, and what it gains.

$A$ is the Hessian or another curvature matrix, $g$ the gradient, $\lambda$ the damping.
The quadratic model of the loss, without the damping, predicts the decrease

$$ \langle g, x \rangle - \tfrac12 \langle x, A x \rangle , $$

and the true one is $L(\theta) - L(\theta - x)$. Their ratio is what the
Levenberg-Marquardt rule and trust regions adjust the damping by: near 1 where the model
holds. For groups of parameters both are those of a step of the group's part of $x$
alone; they do not add up to the whole where groups interact.

References:
  Martens 2010, Deep learning via Hessian-free optimization, sections 3 and 4.
  Nocedal, Wright 2006, Numerical optimization, chapters 4 and 7.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, result
from t5x_fwdloss.analysis.measurements.of_matrix.groups import by_layer, labels_of
from t5x_fwdloss.analysis.measurements.of_matrix.matrix import MatrixMeasurement
from t5x_fwdloss.analysis.measurements.rounding import NUM_DRAWS
from t5x_fwdloss.analysis.measurements.work import Work
from t5x_fwdloss.analysis.numbers import MeasurementResult, Number
from t5x_fwdloss.analysis.report import figures
from t5x_fwdloss.analysis.report.figures import FAINT, SERIES
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.curvature.krylov.conjugate_gradients import (
    CgState,
    conjugate_gradients,
)
from t5x_fwdloss.curvature.vectors import groups, trees
from t5x_fwdloss.curvature.vectors.trees import Matvec

PREDICTED, TRUE, RATIO = "predicted_decrease", "true_decrease", "decrease_ratio"


@dataclasses.dataclass(frozen=True)
class NewtonStep(MatrixMeasurement):
    """The damped Newton step by conjugate gradients, its predicted and true decrease.

    Results: `predicted_decrease`, `true_decrease` and their quotient `decrease_ratio`,
    for the whole step and, as `<group>/...`, for each group's part of it;
    `step_norm`; `relative_residual`, the true one, by one more product;
    `num_products`. Not converged are the numbers of a step whose residual is above the
    tolerance. Where conjugate gradients meet a direction of negative curvature they
    stop: the damping must exceed minus the smallest eigenvalue. In a network narrower
    than float32 the errors are of three more searches, each rounded anew.

    Attributes:
        damping: λ, above 0, in the unit of the matrix's eigenvalues.
        tolerance: the largest relative residual of a converged step.
        max_steps: largest number of products of the search.
        groups: group's name to a regular expression that matches the whole path of its
            parameters; None: by layer, the first two parts of the path; {}: none.
    """

    needs_forward_mode: ClassVar = True

    damping: settings.Above = 0.01
    tolerance: settings.Fraction = 1e-3
    max_steps: settings.Positive = 50
    groups: Mapping[settings.Words, settings.Pattern] | None = None

    @property
    def patterns_of_groups(self) -> Sequence[str]:
        """Those that are given."""
        return (*super().patterns_of_groups, *(self.groups or {}).values())

    def work(self, params: PyTree) -> Work:
        """One product for each step of the search, and one for the residual."""
        steps = min(self.max_steps, trees.dimension(params))
        return self.planned(
            steps + 1,
            working=4,  # solution, residual, direction and gradient
            rounded_products=NUM_DRAWS * (steps + 1),
            num_results=2,
            gradient=True,
        )

    def run(self, context: Context) -> MeasurementResult:
        """Search for the step, from the saved state if there is one; then take it."""
        product, gradient = self._system(context, None)
        found = context.resumed(
            self.name,
            CgState,
            self.max_steps,
            functools.partial(self._search, product, gradient),
            note=lambda state: f"relative residual {state.relative_residual:.2g}",
        )
        x = found.solution
        rest = trees.axpy(-1.0, product(x), gradient)
        length = float(trees.norm(gradient))
        residual = float(trees.norm(rest)) / (length or 1.0)
        parts = self._parts(context)

        def at(params):
            # Rounding moves the step, too.
            if params is None:
                return self._decreases(context, None, x, parts)
            moved = self._search(*self._system(context, params)).solution
            return self._decreases(context, params, moved, parts)

        base = at(None)
        numbers = {
            name: Number(value, "1" if name.endswith(RATIO) else context.unit)
            for name, value in base.items()
        }
        numbers = context.rounding.include(numbers, at, base)
        numbers["step_norm"] = Number(
            float(trees.norm(self.direction(context, x))), "θ"
        )
        numbers["relative_residual"] = Number(residual, "1")
        numbers["num_products"] = Number(float(found.num_products + 1), "1")
        done = residual <= self.tolerance
        relative = np.asarray(found.squared)
        return result(
            self,
            {
                name: dataclasses.replace(number, converged=done)
                for name, number in numbers.items()
            },
            arrays={"relative_residuals": np.sqrt(relative / (relative[0] or 1.0))},
            notes=self._notes(found, length) + context.rounding.notes,
        )

    def plots(self) -> Sequence[Plot]:
        """The decreases by group, and the residuals of the search."""
        return (
            Plot(
                "The decrease of the loss by the step, and by each group's part of it "
                "alone: predicted by the quadratic model, and true.",
                _decreases,
            ),
            Plot("The residual of the search; dashed: the tolerance.", _residuals),
        )

    def _system(self, context, params) -> tuple[Matvec, PyTree]:
        """The product and the right side; None: at the checkpoint's parameters."""
        at = context.objective.gradient
        gradient = context.gradient() if params is None else at(params)
        return self.product(context, at=params), self.vector(context, gradient)

    def _search(self, product, gradient, **state) -> CgState:
        return conjugate_gradients(
            product,
            gradient,
            tolerance=self.tolerance,
            max_steps=self.max_steps,
            **state,
        )

    def _parts(self, context) -> dict[str, PyTree | None]:
        """The mask of each part by the prefix of its numbers; None: the whole step."""
        patterns = by_layer(context.params) if self.groups is None else self.groups
        masks = self.parts(context, patterns)
        labels = labels_of(masks)
        return {"": None} | {f"{labels[name]}/": x for name, x in masks.items()}

    def _decreases(self, context, params, x, parts) -> dict[str, float]:
        """Both decreases and their ratio, for each part of a step."""
        objective, product = context.objective, self.product(context, at=params)
        params = context.params if params is None else params
        floats, numbers = trees.float_part(params), {}
        for prefix, mask in parts.items():
            part = x if mask is None else groups.restrict(x, mask)
            step = self.direction(context, part)
            value, slope = objective.jvp(params, step)
            damped = float(trees.inner(part, product(part)))
            second = damped - self.damping * float(trees.inner(part, part))
            moved = trees.merge(trees.axpy(-1.0, step, floats), params)
            predicted, true = slope - second / 2, value - objective.value(moved)
            numbers[f"{prefix}{PREDICTED}"] = predicted
            numbers[f"{prefix}{TRUE}"] = true
            if predicted:
                numbers[f"{prefix}{RATIO}"] = true / predicted
            context.step()
        return numbers

    def _notes(self, found, length) -> tuple[str, ...]:
        if length == 0.0:
            return ("The gradient is zero: so is the step.",)
        if not found.negative:
            return ()
        return (
            f"Conjugate gradients met a direction of negative curvature at product "
            f"{found.num_products}, and the step is the one before it: damping must "
            f"exceed minus the smallest eigenvalue, and {self.damping:.4g} does not.",
        )


def _decreases(result: MeasurementResult) -> Figure | None:
    """Predicted and true decreases, of the whole step and by group."""
    names = [n.removesuffix(PREDICTED) for n in result.numbers if n.endswith(PREDICTED)]
    (axis,) = figures.panels(1, height=0.8 + 0.36 * len(names))
    places = np.arange(len(names))[::-1]
    for shift, kind, color in ((0.2, PREDICTED, 0), (-0.2, TRUE, 1)):
        values = [result.numbers[f"{name}{kind}"].value for name in names]
        label = kind.replace("_", " ")
        axis.barh(places + shift, values, height=0.36, color=SERIES[color], label=label)
    axis.axvline(0.0, color=FAINT, linewidth=0.8)
    axis.set_yticks(places, [name.removesuffix("/") or "whole step" for name in names])
    axis.grid(visible=False, axis="y")
    axis.set_xlabel(f"decrease of the loss, {result.numbers[PREDICTED].unit}")
    axis.legend(loc="best")
    return axis.get_figure(root=True)


def _residuals(result: MeasurementResult) -> Figure | None:
    """The relative residual after each product."""
    values = result.arrays["relative_residuals"]
    (axis,) = figures.panels(1)
    axis.plot(np.arange(len(values)), values, ".-", color=SERIES[0])
    axis.axhline(result.settings["tolerance"], color=FAINT, linestyle="--")
    axis.set_yscale("log")
    axis.set_xlabel("products")
    axis.set_ylabel("relative residual")
    figures.count_along(axis)
    return axis.get_figure(root=True)
