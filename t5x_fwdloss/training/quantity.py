"""What a probe is made of: the step that it is taken around, and what it measures there."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PyTree

from t5x_fwdloss.analysis.optimizer import Preconditioner


@dataclasses.dataclass(frozen=True)
class ProbedStep:
    """One real step of a training run.

    Attributes:
        old: the parameters before the step.
        new: the parameters after it.
        batch: the step's batch.
        key: what the loss needs besides: a dropout key, or the number of the step.
        learning_rate: the step's learning rate; None if the host does not know it.
        preconditioner: that of the optimizer after the step.
    """

    old: PyTree
    new: PyTree
    batch: Any
    key: Any
    learning_rate: float | None
    preconditioner: Callable[[], Preconditioner]


# Compiles a function for one training run: `compiled(function, *kinds, result="scalars")`.
# Each argument is of one of the kinds "params", "vector" (in float32 or wider), "batch"
# and "key", or an example of another batch. The result is a "vector", or "scalars", which
# every device has.
Compile = Callable[..., Callable[..., Any]]


@runtime_checkable
class Quantity(Protocol):
    """One thing that a probe measures."""

    def prepare(self, compiled: Compile) -> None:
        """Compiles what `measure` calls; once, before the first probe."""
        ...

    def measure(self, step: ProbedStep) -> dict[str, float]:
        """The numbers by name.

        What is not defined is left out. If a number is NaN or infinite, none of them is
        written.
        """
        ...
