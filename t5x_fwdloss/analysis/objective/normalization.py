r"""The normalizer of the loss, in numbers and in words.

The objective is $L = \sum_t w_t \ell_t / W$ over every token $t$ of every batch. T5X's
normalizing factors give $W$: a special factor is summed over the batches, a constant is
taken once, None gives 1.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_fwdloss import losses
from t5x_fwdloss.analysis.objective import batches as batches_lib

KINDS = {
    "NUM_REAL_TARGET_TOKENS": "real_tokens",
    "NUM_TOTAL_TARGET_TOKENS": "all_tokens",
    "AVERAGE_PER_SEQUENCE": "per_sequence",
}
UNITS = {
    "sum": "nat",
    "constant": "nat/constant",
    "real_tokens": "nat/token",
    "all_tokens": "nat/position",
    "per_sequence": "nat/token",
    "losses": "loss",
}
WORDS = {
    "sum": "the sum over all tokens, not divided by anything (W = 1)",
    "constant": "the sum over all tokens, divided by the constant W = {W:g}",
    "real_tokens": "the sum over all tokens, divided by their total weight W = {W:g}",
    "all_tokens": "the sum over all tokens, divided by the number of target "
    "positions, padding included, W = {W:g}",
    "per_sequence": "the mean over tokens within each sequence, averaged over "
    "W = {W:g} sequences",
    "losses": "the sum over all losses, divided by their total weight W = {W:g}",
}


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The total normalizer of the analyzed data.

    Attributes:
        kind: 'sum', 'constant', 'real_tokens', 'all_tokens', 'per_sequence', or 'losses'
            for a loss that is not of tokens.
        total: W, the number that the summed loss is divided by.
    """

    kind: str
    total: float

    @property
    def unit(self) -> str:
        """The unit of the loss."""
        return UNITS[self.kind]

    @property
    def words(self) -> str:
        """The loss as a noun phrase, W included."""
        return WORDS[self.kind].format(W=self.total)


def is_mean(factor: Any) -> bool:
    """Whether a batch's loss is a mean over it, and not a sum over a constant.

    Args:
        factor: as in `total_normalizer`.
    """
    return isinstance(getattr(factor, "name", factor), str)


def total_normalizer(factor: Any, batches: Sequence[Mapping[str, Any]]) -> Normalizer:
    """The normalizer of all batches under T5X's `loss_normalizing_factor`.

    Args:
        factor: None, a number, or a special factor by name or by T5X's enum.
        batches: the model's features, batch by batch.
    """
    if factor is None:
        return Normalizer("sum", 1.0)
    if not is_mean(factor):
        return Normalizer("constant", _positive(float(factor), "the constant"))
    name = str(getattr(factor, "name", factor))
    kind = KINDS.get(name.upper(), name)
    # In float64 on the host: the sum of many float32 counts would round.
    total = sum(float(_normalizer(dict(batch), factor)) for batch in batches)
    return Normalizer(kind, _positive(total, f"the number of {kind.replace('_', ' ')}"))


def of_weights(weights: Sequence[Any]) -> Normalizer:
    """The normalizer of losses with these weights, batch by batch."""
    total = batches_lib.total(weights)
    return Normalizer("losses", _positive(total, "the sum of the losses' weights"))


@functools.partial(jax.jit, static_argnames="factor")
def _normalizer(batch, factor):
    return losses.get_loss_normalizing_factor_and_weights(factor, batch)[0]


@functools.partial(jax.jit, static_argnames="factor")
def counted(batch: Mapping[str, Any], factor: Any) -> jax.Array:
    """Which target tokens the loss counts: those of nonzero weight.

    Without weights in the batch, all tokens count if the factor is None or a number,
    and all but padding if it is a special one, as in T5X.

    Args:
        batch: the model's features.
        factor: as in `total_normalizer`.
    """
    weights = losses.get_loss_normalizing_factor_and_weights(factor, batch)[1]
    if weights is None:
        return jnp.ones(batch["decoder_target_tokens"].shape, bool)
    return jnp.asarray(weights) != 0


def check_counted(masks: Sequence[Any]) -> None:
    """Pass if at least one token counts.

    Args:
        masks: the results of `counted`, batch by batch.

    Raises:
        ValueError: no token counts.
    """
    if not batches_lib.num_tokens(masks):
        raise ValueError(
            "The loss must have at least one token that counts: every one of the loss "
            f"weights of the {len(masks)} batches is zero."
        )


def _positive(total: float, what: str) -> float:
    if not (np.isfinite(total) and total > 0):
        raise ValueError(
            f"the loss must be divided by a positive number: {what} over all batches "
            f"is {total:g}."
        )
    return total
