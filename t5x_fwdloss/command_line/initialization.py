"""What a network refuses when its parameters are described, in one sentence."""

import contextlib
from collections.abc import Iterator

from t5x_fwdloss.command_line.gin_sentences import raised_by_package
from t5x_fwdloss.command_line.seqio_sentences import reason


@contextlib.contextmanager
def of_parameters() -> Iterator[None]:
    """Turns whatever stops a network's initialization into a sentence with its reason.

    T5X's networks check none of their settings: the first array that has a wrong size
    raises what JAX, NumPy or Flax say of it.

    Raises:
        ValueError: the network, or the library below it, raised an error.
    """
    try:
        yield
    except Exception as error:
        if raised_by_package(error):
            raise
        raise ValueError(
            "MODEL must have a network, with settings of its configuration, that can be "
            f"initialized: got {type(error).__name__}: {reason(error)}"
        ) from error
