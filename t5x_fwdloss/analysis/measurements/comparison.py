r"""The losses compared, on this model, this checkpoint and these batches.

The reference is `custom_vjp`, T5X's own rule. For each candidate: the differences of
its value, gradient and directional derivative from the reference's, the temporary
memory of one value and gradient and of one jvp of the first batch (or microbatch), and
their times in units of the reference's value and gradient (medians of interleaved
runs). It answers which loss to train with.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np

from t5x_fwdloss import losses
from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, Measurement, result
from t5x_fwdloss.analysis.numbers import MeasurementResult, Number
from t5x_fwdloss.analysis.objective import preflight
from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.curvature.products.derivatives import directional_derivative
from t5x_fwdloss.curvature.vectors import trees

REFERENCE = "custom_vjp"
QUARTILES = "half the distance between the quartiles"
Implementation = Annotated[str, settings.one_of(*losses.IMPLEMENTATIONS)]


@dataclasses.dataclass(frozen=True)
class LossComparison(Measurement):
    """Every implementation of the loss against T5X's own.

    Attributes:
        name: name in the results.
        implementations: names of `losses.IMPLEMENTATIONS`.
        chunk_lengths: chunk lengths of the head to try, besides no chunks.
        num_rounds: interleaved timings of each compiled function; 0 for none.
    """

    name: settings.Words = "loss_comparison"
    implementations: Sequence[Implementation] = ("custom_vjp", "autodiff", "custom_jvp")
    chunk_lengths: Sequence[settings.Positive] = ()
    num_rounds: settings.Count = 7

    def validate(self, context: Context) -> None:
        """Check that there is a model whose loss can be exchanged.

        Raises:
            ValueError: the objective was not built from a model.
        """
        if context.objective.model is None:
            raise ValueError(
                "LossComparison needs a model whose loss can be exchanged: this "
                "objective was not made by Objective.from_model."
            )

    def run(self, context: Context) -> MeasurementResult:
        """Compare the candidates, one after the other; time them together."""
        candidates = {
            _label(name, length): context.objective.with_loss(name, length)
            for length in (None, *self.chunk_lengths)
            for name in self.implementations
        }
        reference = context.objective.with_loss(REFERENCE, None)
        expected = reference.value(context.params), reference.gradient(context.params)
        numbers: dict[str, Number] = {}
        notes: list[str] = []
        pieces = context.objective.num_microbatches
        if pieces > 1:
            notes.append(
                "Memory and time are those of one microbatch; the number per batch is "
                f"{pieces}."
            )
        programs = {"reference": _value_and_gradient(reference, context.params)}
        with context.progress(self.name, len(candidates)) as progress:
            for label, objective in candidates.items():
                found, worst = _differences(objective, context.params, *expected)
                numbers |= {f"{label}/{k}": x for k, x in found.items()}
                if worst:
                    notes.append(f"{label}: the gradient differs most in {worst}.")
                programs[label] = _value_and_gradient(objective, context.params)
                memory = programs[label].memory_analysis()
                numbers |= _memory(f"{label}/memory", memory)
                if "jvp_difference" in found:
                    jvp = _jvp(objective, context.params)
                    programs[f"{label}/jvp"] = jvp
                    memory = jvp.memory_analysis()
                    numbers |= _memory(f"{label}/jvp_memory", memory)
                else:
                    notes.append(f"{label}: has no forward mode.")
                progress.update(note=label)
                context.step()
        numbers |= self._times(reference, context.params, programs)
        return result(self, numbers, notes=tuple(notes))

    def _times(self, objective, params, programs) -> dict[str, Number]:
        if not self.num_rounds:
            return {}
        args = (params, objective.batches[0], objective.key(0))
        seconds: dict[str, list[float]] = {label: [] for label in programs}
        for number in range(self.num_rounds + 1):
            for label, program in programs.items():
                more = (trees.float_part(params),) if label.endswith("/jvp") else ()
                start = time.perf_counter()
                jax.block_until_ready(program(*args, *more))
                if number:  # the first round warms up
                    seconds[label].append(time.perf_counter() - start)
        unit = statistics.median(seconds.pop("reference"))
        found = {}
        for label, taken in seconds.items():
            low, high = np.quantile(taken, (0.25, 0.75)) / unit
            name = f"{label.removesuffix('/jvp')}/"
            name += "jvp_time" if label.endswith("/jvp") else "time"
            found[name] = Number(
                statistics.median(taken) / unit,
                "of the reference",
                float(high - low) / 2,
                QUARTILES,
                count=len(taken),
            )
        return found


def _label(name: str, length: int | None) -> str:
    return name if length is None else f"{name}, chunks of {length}"


def _differences(objective, params, value, gradient) -> tuple[dict[str, Number], str]:
    found_value, found = objective.value(params), objective.gradient(params)
    differences = trees.axpy(-1.0, gradient, found)
    size = float(trees.norm(gradient)) or 1.0
    parts = np.sqrt(np.asarray(trees.leaf_inners(differences, differences)))
    worst = trees.leaf_paths(gradient)[int(np.argmax(parts))] if parts.any() else ""
    numbers = {
        "value_difference": Number(abs(found_value - value) / (abs(value) or 1.0), "1"),
        "gradient_difference": Number(float(np.linalg.norm(parts)) / size, "1"),
    }
    unit = trees.scale(1.0 / size, gradient)
    if preflight.has_forward_mode(objective, params):
        _, slope = objective.jvp(params, unit)
        expected = float(trees.inner(gradient, unit))
        numbers["jvp_difference"] = Number(abs(slope - expected) / size, "1")
    return numbers, worst


def _memory(name: str, analysis: Any) -> dict[str, Number]:
    size = getattr(analysis, "temp_size_in_bytes", None)
    return {} if size is None else {name: Number(size / 2**20, "MiB")}


def _value_and_gradient(objective: Objective, params: Any) -> Any:
    def both(params, batch, key):
        merged = lambda floats: objective.batch_loss(
            trees.merge(floats, params), batch, key
        )
        return jax.value_and_grad(merged)(trees.float_part(params))

    return objective.compiled("the value and gradient", both, params)


def _jvp(objective: Objective, params: Any) -> Any:
    def push(params, batch, key, v):
        return directional_derivative(objective.batch_loss)(params, v, batch, key)

    return objective.compiled("the jvp", push, params, trees.float_part(params))
