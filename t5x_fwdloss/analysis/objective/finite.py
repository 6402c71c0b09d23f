"""Numbers that cannot be, and the sentence that says where they came from."""

import math
from collections.abc import Iterable, Mapping


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
