"""The argmax of logits that were never in memory, for metrics."""

import contextlib

import jax
import jax.numpy as jnp


class PredictedClasses:
    """Stands for logits `[batch, length, vocab]` of which only the argmax was kept.

    T5X's metrics read logits for the accuracy alone, through `argmax(axis=-1)`. A
    metric that reads more raises an error, since the logits are gone.
    """

    dtype = jnp.dtype(jnp.float32)

    def __init__(self, classes: jax.Array, vocab_size: int):
        """Keeps the classes.

        Args:
            classes: index of the largest logit of each token, `[batch, length]`.
            vocab_size: the number of classes.
        """
        self._classes = classes
        self.shape = (*classes.shape, vocab_size)
        self.ndim = len(self.shape)

    def argmax(self, axis: int = -1) -> jax.Array:
        """Index of the largest logit of each token.

        Raises:
            TypeError: for another axis than the classes.
        """
        if axis not in (-1, self.ndim - 1):
            raise TypeError(_refusal(f"argmax over axis {axis}"))
        return self._classes

    def __getattr__(self, name):
        """Rejects every other use of an array.

        Raises:
            AttributeError: for names that begin with an underscore, as Python expects.
            TypeError: for all others.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        raise TypeError(_refusal(f"'{name}'"))


@contextlib.contextmanager
def refusing_arrays():
    """Explains JAX's error if `PredictedClasses` is used as an array.

    Raises:
        TypeError: where the block raised one that names the class.
    """
    try:
        yield
    except TypeError as error:
        if PredictedClasses.__name__ not in str(error):
            raise
        raise TypeError(_refusal("the array itself")) from error


def _refusal(what: str) -> str:
    return (
        "loss_chunk_length needs metrics that read the logits through argmax(axis=-1) "
        f"only, since they are never in memory: got a metric that asks for {what}; set "
        "LOSS_CHUNK_LENGTH = None for this model."
    )
