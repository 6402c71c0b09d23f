"""The diagonal of a matrix, by Hutchinson's estimator, summed up by layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, result
from t5x_fwdloss.analysis.measurements.of_matrix.groups import by_layer, labels_of
from t5x_fwdloss.analysis.measurements.of_matrix.matrix import ProbedMeasurement
from t5x_fwdloss.analysis.measurements.rounding import kind_with_rounding, with_rounding
from t5x_fwdloss.analysis.measurements.work import Work
from t5x_fwdloss.analysis.numbers import (
    STANDARD_ERROR,
    MeasurementResult,
    Number,
)
from t5x_fwdloss.curvature.krylov.space import rounding_level
from t5x_fwdloss.curvature.vectors import trees

ENTRY_ERROR = "standard error of that entry"
# The chance at which an entry may be given the wrong sign.
SIGN_LEVEL = 1e-3
SIGNS = ("negative", "zero", "undecided")


@dataclasses.dataclass(frozen=True)
class Diagonal(ProbedMeasurement):
    """A matrix's diagonal: for each layer its extremes and the signs of its entries.

    Each entry has its own standard error, from the same probes. By layer, as fractions
    of its entries: `negative_fraction`, those below zero by more than their error;
    `zero_fraction`, those that are zero up to rounding, within 10 eps times the largest
    magnitude of an entry; `undecided_fraction`, those whose sign needs more probes. The
    error here is Student's one-sided quantile at `SIGN_LEVEL` times the standard error,
    so that about one entry in a thousand is given a sign that it does not have.

    Attributes:
        max_saved: the diagonal itself is saved where it has at most this many entries.
    """

    max_saved: settings.Count = 1_000_000

    def work(self, params: PyTree) -> Work:
        """As of its probes, with the running mean and its spread."""
        return dataclasses.replace(super().work(params), basis=2, num_results=4)

    def run(self, context: Context) -> MeasurementResult:
        """Draw the probes, resuming from the saved running mean, if any."""
        found = self.probed(context, diagonal=True)
        return self._result(context, found, self._rounding(context))

    def _rounding(self, context) -> PyTree | None:
        def at(params):
            found = self.one_probe(context, params, diagonal=True)
            return found.trace.mean, found.diagonal

        return context.rounding.errors(at)

    def _result(self, context, found, rounding) -> MeasurementResult:
        unit, numbers = self.unit(context), {}
        dtype, kind, of_trace = context.rounding.dtype, ENTRY_ERROR, 0.0
        if rounding is not None:
            of_trace, entries = float(rounding[0]), rounding[1]
            kind = kind_with_rounding(kind, dtype)
            error = trees.add(found.diagonal_error, entries)
            found = dataclasses.replace(found, diagonal_error=error)
        entries = self.parts(context, by_layer(context.params))
        labels = labels_of(entries)
        quantile = scipy.stats.t.isf(SIGN_LEVEL, found.trace.num_probes - 1)
        level = _zero_level(found.diagonal)
        for name, mask in entries.items():
            label = labels[name]
            flags = jax.tree.leaves(mask)
            chosen = [
                [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]
                for leaves in map(
                    jax.tree.leaves, (found.diagonal, found.diagonal_error)
                )
            ]
            stats = _stats(chosen[0], chosen[1], quantile, level)
            for extreme in ("largest", "smallest"):
                numbers[f"{label}/{extreme}"] = Number(
                    stats[extreme], unit, stats[f"{extreme}_error"], kind
                )
            for sign in SIGNS:
                numbers[f"{label}/{sign}_fraction"] = Number(stats[sign], "1")
        trace = Number(
            found.trace.mean,
            unit,
            found.trace.standard_error,
            STANDARD_ERROR,
            interval=found.trace.interval,
            count=found.trace.num_probes,
        )
        numbers = {"trace": with_rounding(trace, of_trace, dtype)} | numbers
        return result(
            self,
            numbers,
            arrays=self._arrays(context, found),
            notes=(
                "Each entry has its own sampling error: the extremes of many noisy "
                "entries lie further out than those of the true diagonal.",
                *context.rounding.notes,
                *self.optimizer_notes(context),
            ),
        )

    def _arrays(self, context, found) -> dict[str, np.ndarray]:
        here = all(x.is_fully_addressable for x in jax.tree.leaves(found.diagonal))
        if not here or self.dimension(context) > self.max_saved:
            return {}
        paths, mask = trees.leaf_paths(found.diagonal), self.mask(context)
        flags = [True] * len(paths) if mask is None else jax.tree.leaves(mask)
        arrays = {}
        for end, tree in (("mean", found.diagonal), ("error", found.diagonal_error)):
            leaves = zip(paths, jax.tree.leaves(tree), flags, strict=True)
            arrays |= {
                f"{path}/{end}": np.asarray(x) for path, x, flag in leaves if flag
            }
        return arrays


@jax.jit
def _largest_magnitude(diagonal):
    return jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(diagonal)]).max()


def _zero_level(diagonal) -> float:
    """The magnitude up to which an entry is zero up to rounding."""
    level = rounding_level(trees.epsilon(diagonal), 1)
    return level * float(_largest_magnitude(diagonal))


@jax.jit
def _leaf_stats(diagonal, errors, quantile, level):
    # Reductions leaf by leaf, and no index: nothing is flattened, nothing gathered.
    def one(x, error):
        reach = quantile.astype(x.dtype) * error
        bound = level.astype(x.dtype)
        negative, positive = x + reach < -bound, x - reach > bound
        zero = jnp.abs(x) + reach <= bound
        largest, smallest = jnp.max(x), jnp.min(x)
        return {
            "largest": largest,
            "largest_error": jnp.max(jnp.where(x == largest, error, 0.0)),
            "smallest": smallest,
            "smallest_error": jnp.max(jnp.where(x == smallest, error, 0.0)),
            "negative": jnp.sum(negative),
            "zero": jnp.sum(zero),
            "undecided": jnp.sum(~(negative | positive | zero)),
        }

    return [one(x, error) for x, error in zip(diagonal, errors, strict=True)]


def _stats(diagonal, errors, quantile, level) -> dict[str, float]:
    given = np.asarray(quantile), np.asarray(level)
    leaves = jax.device_get(_leaf_stats(diagonal, errors, *given))
    top = max(leaves, key=lambda leaf: float(leaf["largest"]))
    bottom = min(leaves, key=lambda leaf: float(leaf["smallest"]))
    size = sum(x.size for x in diagonal)
    return {
        "largest": float(top["largest"]),
        "largest_error": float(top["largest_error"]),
        "smallest": float(bottom["smallest"]),
        "smallest_error": float(bottom["smallest_error"]),
    } | {sign: sum(int(leaf[sign]) for leaf in leaves) / size for sign in SIGNS}
