r"""The gradient noise scale: the batch size beyond which larger batches help little.

With $G$ the gradient of the objective and $\Sigma$ the covariance of the gradient of one
sequence, a batch of $B$ sequences has a gradient of covariance $\Sigma / B$, and

$$ B_\text{simple} = \frac{\operatorname{tr} \Sigma}{|G|^2}, \qquad
   B_\text{noise} = \frac{\operatorname{tr} H \Sigma}{G^T H G}. $$

Both parts are estimated without bias from the $m$ batches of the run, of $b$ sequences
each. With $w_i$ the part of the normalizer W that batch $i$ has, $g_i$ the gradient of
its share of the loss, $G = \sum_i g_i$ and $e_i = g_i - w_i G$,

$$ \operatorname{tr} \widehat{A \Sigma} = \frac{b\, m^2}{m - 1} \sum_i e_i^T A e_i, \qquad
   \widehat{G^T A G} = G^T A G - \frac{\operatorname{tr} \widehat{A \Sigma}}{m b}, $$

with $A$ the identity or the Hessian; for equal $w_i$ these are the estimates from the
batch sizes $b$ and $m b$ of the paper, and else those of a ratio of sums, to first order.
The errors are the jackknife's, which leaves out one batch at a time.

References:
  McCandlish, Kaplan, Amodei et al. 2018, An empirical model of large-batch training
  (section 2.2 and appendix A.1).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, Measurement, result
from t5x_fwdloss.analysis.numbers import MeasurementResult, Number
from t5x_fwdloss.analysis.objective import normalization, parameters
from t5x_fwdloss.curvature.products.derivatives import gradient
from t5x_fwdloss.curvature.vectors import trees

JACKKNIFE = "standard error, by the jackknife over batches"
WITHOUT = "unknown: the jackknife needs three batches"


@dataclasses.dataclass
class NoiseState:
    """The inner products of the deviations so far, by batch, as `_inner_products` does."""

    rows: list[list[float]]

    @property
    def num_products(self) -> int:
        """Batches so far."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True)
class GradientNoiseScale(Measurement):
    """The gradient noise scale, in sequences and in tokens.

    Results: `simple_noise_scale` and `hessian_noise_scale`, each `/sequences` and
    `/tokens` (of those that the loss counts, as many in each sequence as on average);
    `gradient_variance`, tr Σ for one sequence; `squared_gradient`, |G|² without its bias;
    `hessian_variance` and `hessian_squared_gradient`, tr HΣ and G'HG. A scale is left out,
    with a note, where its denominator cannot be told from zero.

    Attributes:
        name: name in the results.
        with_hessian: whether to measure the scale with the Hessian, too, for one product
            for each batch.
    """

    name: settings.Words = "gradient_noise_scale"
    with_hessian: bool = True

    @property
    def first_matrix(self) -> str | None:
        """The Hessian, where it is asked for."""
        return "hessian" if self.with_hessian else None

    def validate(self, context: Context) -> None:
        """Check that there are batches to compare.

        Raises:
            ValueError: there are fewer than two with tokens that count, or the loss is
                not one of tokens.
        """
        if context.objective.loss_settings is None:
            raise ValueError(
                "GradientNoiseScale needs a loss of sequences of tokens: this objective "
                "was not made by Objective.from_model."
            )
        count = len(_Batches(context).tokens)
        if count < 2:
            raise ValueError(
                "GradientNoiseScale needs at least two batches with tokens that count, "
                f"because it compares their gradients: got {count}; raise NUM_BATCHES."
            )

    def run(self, context: Context) -> MeasurementResult:
        """Compare the gradients of the batches, from the saved state on if there is one."""
        found = _Batches(context)
        products: list[Callable[[PyTree], PyTree] | None] = [None]
        if self.with_hessian:
            products.append(context.product("hessian"))
        estimate = functools.partial(_deviations, found, context.params, products)
        rows = context.resumed(self.name, NoiseState, len(found.tokens), estimate)
        numbers, notes = self._numbers(context, found, rows)

        def at(params):
            if params is None:
                return {name: number.value for name, number in numbers.items()}
            moved = [p and context.product("hessian", at=params) for p in products]
            rows = _deviations(found, params, moved)
            changed, _ = self._numbers(context, found, rows)
            # A scale that rounding makes meaningless has an error as large as itself.
            return {
                name: changed[name].value if name in changed else 0.0
                for name in numbers
            }

        numbers = context.rounding.include(numbers, at)
        return result(self, numbers, notes=(*context.rounding.notes, *notes))

    def _numbers(self, context, found, rows) -> tuple[dict[str, Number], list[str]]:
        per_batch = found.sequences / len(found.tokens)
        tokens = found.num_tokens / found.sequences
        numbers, notes = {}, []
        square = f"({context.slope_unit})²"
        form = f"({context.slope_unit})² · {context.curvature_unit}"
        for number, (prefix, scale, unit) in enumerate(
            (("", "simple", square), ("hessian_", "hessian", form))[: len(rows)]
        ):
            pair = estimates(found.weights, rows[number], per_batch)
            names = (f"{prefix or 'gradient_'}variance", f"{prefix}squared_gradient")
            for name, values in zip(names, pair.T, strict=True):
                numbers[name] = _with_jackknife(values, unit)
            if (pair[:, 1] <= 0).any():
                notes.append(
                    f"The {scale} noise scale is left out: {names[1]} is not positive, or "
                    "would not be without one of the batches; more batches, or an "
                    "earlier checkpoint, may make it so."
                )
                continue
            ratio = pair[:, 0] / pair[:, 1]
            for kind, size in (("sequences", 1.0), ("tokens", tokens)):
                numbers[f"{scale}_noise_scale/{kind}"] = _with_jackknife(
                    size * ratio, kind
                )
        return numbers, notes


class _Batches:
    """The batches that have tokens that count, and how they enter the objective.

    Attributes:
        tokens: for each batch, by its number, the tokens that count.
        num_tokens: their sum.
        sequences: the sequences with such tokens, of all batches.
    """

    def __init__(self, context: Context):
        self._objective, self._program = context.objective, None
        chosen = self._objective.loss_settings
        assert chosen is not None  # as `validate` has checked
        self._factor = chosen.loss_normalizing_factor
        size = self._objective.num_microbatches
        everything = range(len(self._objective.batches))
        pieces = [everything[i : i + size] for i in everything[::size]]
        self.tokens: dict[int, int] = {}
        self.sequences = 0
        self._pieces: dict[int, range] = {}
        for number, batch in enumerate(pieces):
            masks = [
                normalization.counted(self._objective.batches[i], self._factor)
                for i in batch
            ]
            tokens, sequences = np.sum(
                [jax.device_get(_count(x)) for x in masks], axis=0
            )
            if tokens:
                self.tokens[number] = int(tokens)
                self.sequences += int(sequences)
                self._pieces[number] = batch
        self.num_tokens = sum(self.tokens.values())

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """The part of the normalizer that each batch has; they add up to one."""
        found = [
            normalization.total_normalizer(
                self._factor, [self._objective.batches[i] for i in pieces]
            ).total
            for pieces in self._pieces.values()
        ]
        return np.asarray(found) / np.sum(found)

    def gradients(self, params: PyTree) -> Callable[[int], PyTree]:
        """From a place among the batches to the gradient of its share of the loss."""
        program = self._compiled(params)
        numbers = list(self._pieces)

        def of_batch(place: int) -> PyTree:
            total = None
            for i in self._pieces[numbers[place]]:
                found = program(
                    params, self._objective.batches[i], self._objective.key(i)
                )
                total = found if total is None else trees.add(total, found)
            trees.check_finite(total, f"the gradient of batch {numbers[place]}")
            return total

        return of_batch

    def _compiled(self, params):
        if self._program is None:
            layout = parameters.shardings(params)
            slope = gradient(self._objective.batch_loss)

            def laid_out(params, batch, key):
                # The compiler would choose the shardings; vectors keep the parameters'.
                found = slope(params, batch, key)
                if layout is None:
                    return found
                return jax.lax.with_sharding_constraint(found, layout)

            self._program = self._objective.compiled(
                "the gradient of a batch", laid_out, params
            )
        return self._program


@jax.jit
def _count(mask):
    return mask.sum(), mask.any(axis=-1).sum()


def _deviations(
    found: _Batches,
    params: PyTree,
    products: list[Any],
    on_step: Callable[[NoiseState], None] = lambda _: None,
    state: NoiseState | None = None,
) -> np.ndarray:
    """For each matrix, by batch, what `estimates` needs.

    The gradients of all batches would not fit into memory: each is computed twice, once
    for their sum and once for its deviation from it.
    """
    state = state or NoiseState([])
    of_batch, weights = found.gradients(params), found.weights
    mean = weighted = None
    for place, weight in enumerate(weights):
        g = of_batch(place)
        mean = g if mean is None else trees.add(mean, g)
        part = trees.scale(float(weight), g)
        weighted = part if weighted is None else trees.add(weighted, part)
    # The sum of the deviations, each times the weight of its batch.
    weighted = trees.axpy(-float(np.sum(weights**2)), mean, weighted)
    images = [mean if product is None else product(mean) for product in products]
    for place in range(len(state.rows), len(weights)):
        e = trees.axpy(-float(weights[place]), mean, of_batch(place))
        row = []
        for product, image in zip(products, images, strict=True):
            moved = e if product is None else product(e)
            row += [
                float(trees.inner(e, moved)),
                float(trees.inner(weighted, moved)),
                float(trees.inner(e, image)),
                float(trees.inner(mean, image)),
            ]
        state.rows.append(row)
        on_step(state)
    return np.asarray(state.rows).reshape(len(weights), -1, 4).swapaxes(0, 1)


def estimates(weights: np.ndarray, rows: np.ndarray, per_batch: float) -> np.ndarray:
    r"""$\operatorname{tr} A \Sigma$ and $G^T A G$: of all batches, and without each.

    Without batch $j$ the gradient is $G - e_j / (1 - w_j)$ and the deviations are
    $e_i + w_i e_j / (1 - w_j)$.

    Args:
        weights: those of the batches, adding up to one.
        rows: for each batch $e^T A e$, $P^T A e$ with $P = \sum_i w_i e_i$,
            $G^T A e$ and $G^T A G$.
        per_batch: sequences in a batch.

    Returns:
        An array of `[1 + batches, 2]`; without the rows that leave out a batch where
        there are only two.
    """
    squares, weighted, along, full = rows.T
    count, rest = len(weights), 1 - weights
    of_all = _unbiased(squares.sum(), full[0], 1.0, count, per_batch)
    if count < 3:
        return np.array([of_all])
    left = (
        squares.sum()
        - squares
        + 2 * (weighted - weights * squares) / rest
        + (np.sum(weights**2) - weights**2) * squares / rest**2
    )
    form = full - 2 * along / rest + squares / rest**2
    without = _unbiased(left, form, rest, count - 1, per_batch)
    return np.concatenate([[of_all], np.stack(without, axis=1)])


def _unbiased(squares, form, part, count, per_batch):
    """Both estimates from `count` batches that have this part of all weights."""
    of_batch = (count / part) ** 2 * squares / (count - 1)
    return per_batch * of_batch, form - of_batch / count


def _with_jackknife(values: np.ndarray, unit: str) -> Number:
    """The first value, with the jackknife's error from those that leave out a batch."""
    first, others = float(values[0]), values[1:]
    if not len(others):
        return Number(first, unit, None, WITHOUT)
    error = np.sqrt((len(others) - 1) * np.mean((others - others.mean()) ** 2))
    return Number(first, unit, float(error), JACKKNIFE, count=len(others))
