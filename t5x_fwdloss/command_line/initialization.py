"""One sentence for any error of a network's initialization."""

import contextlib
from collections.abc import Iterator

from t5x_fwdloss.command_line.seqio_sentences import explained


@contextlib.contextmanager
def of_parameters() -> Iterator[None]:
    """Turns any error of a network's initialization into a sentence with its reason.

    T5X's networks check none of their settings: the first array with a wrong size
    raises an error of JAX, NumPy or Flax.

    An error of the network, or of the library below it, raises ValueError.
    """
    with explained(
        lambda: (
            "MODEL must have a network, with settings of its configuration, that can be "
            "initialized"
        )
    ):
        yield
