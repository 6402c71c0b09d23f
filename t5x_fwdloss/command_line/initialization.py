"""What a network refuses when its parameters are described, in one sentence."""

import contextlib
from collections.abc import Iterator

from t5x_fwdloss.command_line.seqio_sentences import explained


@contextlib.contextmanager
def of_parameters() -> Iterator[None]:
    """Turns whatever stops a network's initialization into a sentence with its reason.

    T5X's networks check none of their settings: the first array that has a wrong size
    raises what JAX, NumPy or Flax say of it.

    An error of the network, or of the library below it, raises ValueError.
    """
    with explained(
        lambda: (
            "MODEL must have a network, with settings of its configuration, that can be "
            "initialized"
        )
    ):
        yield
