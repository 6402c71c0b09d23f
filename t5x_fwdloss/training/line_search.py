r"""The multiple of an update at which the loss rises, found by forward passes alone.

Along the update, $\phi(m) = L(\theta_{old} + m D)$. The *critical multiple* is where
$\phi$ passes its value at 0; 2 over the learning rate times it is the critical sharpness.

The search is that of Kalra et al.: growth until the loss rises (or shrinkage until it no
longer does), then bisection, here of the logarithm. Two things differ: it starts where
the quadratic model of the loss returns, and its first step away from there is short, so
that four passes are enough where the model holds. Like theirs, it finds one crossing; if
there are several, not always the first.

References:
  Kalra et al. 2026, arXiv 2601.16979, the line search of critical sharpness.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

NUM_PASSES = 10
# The ratio of a bracket's ends at which the search stops: its middle is right to 10 %.
TOLERANCE = 1.2
# Factors of the first step away from the guess, and of the others: within 4 times the
# guess the search takes 8 passes, and it reaches 76 times the guess.
NEAR, FAR = 1.19, 4.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Search:
    """What a line search knows.

    Attributes:
        passes: forward passes taken.
        trial: the next multiple.
        lower: the largest multiple so far at which the loss was not above its value at 0.
        upper: the smallest multiple so far at which it was, or was NaN.
        loss: the loss at 0.
        loss_after: the loss at 1, after the real step.
    """

    passes: Any
    trial: Any
    lower: Any
    upper: Any
    loss: Any
    loss_after: Any

    @property
    def found(self) -> Array:
        """Whether the crossing is known to the tolerance."""
        return (self.lower > 0) & (self.upper <= TOLERANCE * self.lower)

    @property
    def multiple(self) -> Array:
        """The critical multiple, the geometric middle of the bracket; NaN if not found."""
        middle = jnp.sqrt(self.lower) * jnp.sqrt(self.upper)
        return jnp.where(self.found, middle, jnp.nan)


def line_search(loss_at: Callable[[Any], Any], guess: Any, descends: Any) -> Search:
    """The search's end, after `NUM_PASSES` passes at most; to be compiled by the caller.

    The first two passes are at the multiples 0 and 1. `loss_at` is traced once.

    Args:
        loss_at: the loss at a multiple of the update.
        guess: where the search starts; not positive or NaN for no guess.
        descends: whether the loss falls at 0. If it does not, the critical multiple is
            0, and the search ends after the first two passes.
    """
    shape = jax.eval_shape(loss_at, jnp.zeros(()))
    zero, infinity = jnp.zeros((), shape.dtype), jnp.full((), jnp.inf, shape.dtype)
    start = Search(jnp.zeros((), jnp.int32), zero, zero, infinity, zero, zero)

    def goes_on(at: Search):
        searching = descends & ~at.found & (at.passes < NUM_PASSES)
        return (at.passes < 2) | searching

    def go(at: Search):
        value = loss_at(at.trial)
        loss = jnp.where(at.passes == 0, value, at.loss)
        after = jnp.where(at.passes == 1, value, at.loss_after)
        rises = ~(value <= loss)
        lower = jnp.where(rises, at.lower, at.trial)
        upper = jnp.where(rises, at.trial, at.upper)
        trial = _next(at, lower, upper, rises, guess)
        return Search(at.passes + 1, trial, lower, upper, loss, after)

    return jax.lax.while_loop(goes_on, go, start)


def _next(at: Search, lower, upper, rises, guess):
    """The next multiple: 1, the guess, a step out of the bracket's known end, its middle."""
    from_guess = (at.passes == 2) & (at.trial == guess)
    factor = jnp.where(from_guess, NEAR, FAR).astype(at.trial.dtype)
    away = jnp.where(rises, at.trial / factor, at.trial * factor)
    is_wide = from_guess | (upper > FAR**2 * lower)
    is_inside = (lower < away) & (away < upper)
    middle = jnp.sqrt(lower) * jnp.sqrt(upper)
    trial = jnp.where(is_wide & is_inside, away, middle)
    may_guess = (at.passes == 1) & (lower < guess) & (guess < upper)
    trial = jnp.where(may_guess, guess, trial).astype(at.trial.dtype)
    return jnp.where(at.passes == 0, jnp.ones_like(trial), trial)
