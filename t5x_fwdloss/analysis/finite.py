"""Numbers that are not finite, and the sentence that says where they came from."""

import math
from collections.abc import Iterable, Mapping


class NonFiniteLossError(FloatingPointError):
    """A NaN or an infinity in a derivative of the loss; batch and block are named."""


def check_finite(name: str, batches: Iterable[Mapping[str, float]]) -> None:
    """Pass if every number of every batch is finite.

    Args:
        name: what was computed, as a noun phrase.
        batches: for each batch, the numbers (or largest magnitudes) by block.

    Raises:
        NonFiniteLossError: names the first batch and block that is not.
    """
    for number, blocks in enumerate(batches):
        bad = [(block, x) for block, x in blocks.items() if not math.isfinite(x)]
        if bad:
            block, x = bad[0]
            others = f" and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
            raise NonFiniteLossError(
                f"{name} must be finite: batch {number} gives {x} in {block}{others}."
            )
