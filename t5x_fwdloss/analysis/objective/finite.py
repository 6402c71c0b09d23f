"""Errors for impossible numbers, with a message that says where they arose."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_fwdloss.curvature.vectors import trees


class NonFiniteLossError(FloatingPointError):
    """A NaN or an infinity in a derivative of the loss; batch and block are named."""


class NegativeCurvatureError(ArithmeticError):
    """A positive semidefinite matrix with $v^T A v < 0$, beyond rounding."""


def check_finite(name: str, parts: Iterable[tuple[str, Mapping[str, float]]]) -> None:
    """Pass if every number of every part is finite.

    Args:
        name: what was computed, as a noun phrase.
        parts: for each part, usually a batch, its name and its numbers (or largest
            magnitudes) by block.

    Raises:
        NonFiniteLossError: names the first part and block that is not.
    """
    for part, blocks in parts:
        bad = [(block, x) for block, x in blocks.items() if not math.isfinite(x)]
        if bad:
            block, x = bad[0]
            others = f" and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
            raise NonFiniteLossError(
                f"{name} must be finite: {part} gives {x} in {block}{others}."
            )


def by_batch(
    parts: Iterable[Mapping[str, float]], num_microbatches: int = 1
) -> Iterable[tuple[str, Mapping[str, float]]]:
    """The parts with the names of batches, in order.

    Args:
        parts: one for each batch, or for each piece of it.
        num_microbatches: how many pieces a batch has.
    """
    for number, blocks in enumerate(parts):
        batch, piece = divmod(number, num_microbatches)
        of = "" if num_microbatches == 1 else f"microbatch {piece} of "
        yield f"{of}batch {batch}", blocks


def check_vector(
    name: str,
    total: Any,
    parts: Callable[[], Iterable[Any]],
    num_microbatches: int = 1,
) -> None:
    """Pass if every entry of a sum over batches is finite.

    Args:
        name: what was computed, as a noun phrase.
        total: the sum.
        parts: computes the batches' parts once more, in order; called if the sum is not
            finite, to say where that happened.
        num_microbatches: how many pieces a batch has.

    Otherwise `NonFiniteLossError` names the first batch and block that is not.
    """
    whole = largest_magnitudes(total)
    if not all(map(math.isfinite, whole.values())):
        check_finite(name, by_batch(map(largest_magnitudes, parts()), num_microbatches))
        check_finite(name, [("the sum over batches", whole)])


def largest_magnitudes(vector: Any) -> dict[str, float]:
    """The largest magnitude in each leaf by name; NaN or inf where a leaf has one."""
    largest = jax.device_get(_largest_magnitudes(vector))
    return dict(zip(trees.leaf_paths(vector), map(float, largest), strict=True))


@jax.jit
def _largest_magnitudes(vector):
    return [jnp.max(jnp.abs(x), initial=0.0) for x in jax.tree.leaves(vector)]
