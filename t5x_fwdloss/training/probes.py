"""Probes of a training run: at which steps, how they are reported, and what they cost."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from absl import logging

from t5x_fwdloss import losses
from t5x_fwdloss.training.quantity import Compile, ProbedStep, Quantity

Write = Callable[[int, Mapping[str, float]], None]
PREFIX = "curvature"
NEEDS = "Curvature while training needs a loss that has forward mode:"
# What a line of the log says of a probe; the rest is in TensorBoard.
SAID = (
    "loss",
    "predicted_change",
    "actual_change",
    "multiple_of_return",
    "critical_multiple",
    "largest_eigenvalue_of_hessian",
    "largest_eigenvalue_of_preconditioned_hessian",
    "noise_scale_in_sequences",
    "probe_seconds",
)


class Probes:
    """The probes of one training run, one every `period` steps.

    The time of a probe begins when the step before it has ended, and ends when its
    numbers are on the host: on an accelerator that includes the pause in which no next
    step is queued. The share is of the training time since the last probe.
    """

    def __init__(
        self,
        period: int | None,
        write: Write,
        quantities: Sequence[Quantity],
        clock: Callable[[], float] = time.monotonic,
    ):
        """Nothing is measured yet.

        Args:
            period: steps 'period', 2 'period', ... are probed, counted from the first
                step of the model, not of this run; None for no probes.
            write: takes a step and its numbers by tag.
            quantities: what a probe measures.
            clock: returns the time in seconds.
        """
        self._period, self._write, self._clock = period, write, clock
        self._quantities = quantities
        self._trained = 0.0  # seconds of training since the last probe
        self._resumed = clock()

    def is_due(self, step: int) -> bool:
        """Whether the step that ends with `step` steps done is probed."""
        return self._period is not None and step % self._period == 0

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Counts the time of the block as training."""
        self._resumed = self._clock()
        try:
            yield
        finally:
            self._trained += self._clock() - self._resumed

    def prepare(self, compiled: Compile) -> None:
        """Compiles what the probes call, before the time of the first one begins."""
        for quantity in self._quantities:
            quantity.prepare(compiled)

    def run(self, number: int, step: ProbedStep) -> None:
        """Measures, and writes what is finite; never raises because of a number.

        Args:
            number: of steps done, the probed one included.
            step: the probed step.
        """
        jax.block_until_ready((step.old, step.new, step.batch, step.key))
        start = self._clock()
        found = [quantity.measure(step) for quantity in self._quantities]
        end = self._clock()
        elapsed = self._trained + end - self._resumed
        self._trained, self._resumed = 0.0, end
        numbers = {
            "probe_seconds": end - start,
            "share_of_time": (end - start) / elapsed,
        }
        broken = [
            f"{name} {x}"
            for of_quantity in found
            for name, x in of_quantity.items()
            if not math.isfinite(x)
        ]
        for of_quantity in found:
            if all(map(math.isfinite, of_quantity.values())):
                numbers |= of_quantity
        if broken:
            logging.error(
                "The curvature probe of step %d must give finite numbers: got %s; what "
                "was measured with them is not written, and training goes on.",
                number,
                ", ".join(broken),
            )
        logging.info("Curvature at step %d: %s.", number, _words(numbers))
        self._write(number, {f"{PREFIX}/{name}": x for name, x in numbers.items()})


def check_forward_mode(chosen: losses.LossSettings, needs: str = NEEDS) -> None:
    """Passes if a loss can be probed.

    Args:
        chosen: the settings of the loss.
        needs: the beginning of the sentence that says what needs it.

    Raises:
        ValueError: it has no forward mode; the ones that have are named.
    """
    if not chosen.implementation.has_forward_mode:
        names = [
            repr(name)
            for name, implementation in losses.IMPLEMENTATIONS.items()
            if implementation.has_forward_mode
        ]
        raise ValueError(
            f"{needs} got LOSS_IMPL = {chosen.impl!r}; choose {' or '.join(names)}."
        )


def _words(numbers: Mapping[str, float]) -> str:
    known = {name: numbers[name] for name in SAID if name in numbers}
    return ", ".join(f"{name.replace('_', ' ')} {x:.4g}" for name, x in known.items())
