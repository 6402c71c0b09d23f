"""Curvature around real steps of the standalone training."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x_fwdloss.analysis import optimizer as optimizer_lib
from t5x_fwdloss.loss_mixin import LossMixin
from t5x_fwdloss.training import along_update, probes

LearningRate = optimizer_lib.LearningRate


class StepProbes:
    """The probes of one training run; none without a period."""

    def __init__(
        self,
        model: LossMixin,
        learning_rate: LearningRate | None,
        period: int | None,
        write: Callable[[int, Mapping[str, float]], None],
    ):
        """Nothing is compiled yet.

        Args:
            model: its loss needs forward mode.
            learning_rate: the optimizer's, or its schedule; None leaves the sharpness
                out.
            period: steps from one probe to the next; None for no probes.
            write: takes a step and its numbers by tag.
        """
        self._probes = probes.Probes(period, write)
        self.training = self._probes.training
        self._rate = learning_rate
        self._copy = jax.jit(along_update.copied)
        measure = along_update.along_update(lambda *x: model.loss_fn(*x)[0])
        self._measure: Any = jax.jit(measure)
        self._is_compiled = False
        self._kept: tuple[Any, ...] = ()

    def before(self, step: int, params: Any, batch: Any, key: jax.Array) -> None:
        """Keeps what the probe of a step needs and the step destroys."""
        if not self._probes.is_due(step):
            return
        if not self._is_compiled:  # before the time of the first probe begins
            lowered = self._measure.lower(params, params, batch, key)
            self._measure, self._is_compiled = lowered.compile(), True
        self._kept = self._copy(params), batch, key

    def after(self, step: int, params: Any) -> None:
        """Probes the step, if it is due, at its new parameters."""
        if self._probes.is_due(step):
            # Schedules count from 0.
            rate = optimizer_lib.at_step(self._rate, step - 1)
            old, *rest = self._kept
            self._probes.run(step, self._measure, (old, params, *rest), rate)
            self._kept = ()


def check(
    model: LossMixin,
    optimizer: optax.GradientTransformation,
    learning_rate: LearningRate | None,
) -> None:
    """Passes if the steps of this model and optimizer can be probed.

    Args:
        model: its loss needs forward mode.
        optimizer: that of the training.
        learning_rate: compared with the optimizer's at its second step, if that can be
            measured; None is not.

    Raises:
        ValueError: the loss has no forward mode, or the rate is not the optimizer's.
    """
    probes.check_forward_mode(model.loss_settings)
    measured = None if learning_rate is None else _second_rate(optimizer)
    given = optimizer_lib.at_step(learning_rate, 1)
    if measured and given is not None and abs(given - measured) > 0.01 * measured:
        raise ValueError(
            "LEARNING_RATE_FN must be the learning rate of OPTIMIZER, or None for no "
            f"sharpness: at the second step it gives {given:.4g}, and the optimizer "
            f"has {measured:.4g}."
        )


def _second_rate(optimizer) -> float | None:
    """The learning rate of an optimizer's second step, measured on a small parameter."""
    try:
        params = {"kernel": jnp.ones((2, 2))}
        _, state = optimizer.update(params, optimizer.init(params), params)
        return optimizer_lib.of_update(optimizer.update, state, params).learning_rate
    except Exception:  # it needs other parameters, or is not smooth: nothing to compare
        return None
