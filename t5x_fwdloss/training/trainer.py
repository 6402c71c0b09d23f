"""T5X's trainer with probes of the curvature: `with_curvature` wraps any `trainer_cls`.

The user's own constructor builds the trainer, with its gin bindings, and its compiled
step trains, untouched: on probed steps it is called between a copy of the old
parameters and a probe. So training's numbers stay the trainer's, bit for bit.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.training import along_update, wrapping
from t5x_fwdloss.training.probes import NEEDS, PREFIX, Probes

# isort: split
# After `wrapping`, whose error names the missing part of T5X in one sentence.
from t5x import partitioning, utils
from t5x import trainer as t5x_trainer

Constructor = Callable[..., Any]  # of a t5x.trainer.BaseTrainer
# T5X's names of a step's learning rate among its metrics.
LEARNING_RATES = ("learning_rate/current", "learning_rate")
WHO = "Curvature while training wraps T5X's trainers"


def with_curvature(trainer_cls: Constructor, period: int = 100) -> Constructor:
    """The constructor of the same trainer, with a probe every `period` steps.

    A probe measures `along_update.AlongUpdate` around one real step: on the step's own
    batch, with its microbatches and its own dropout masks, so that the loss is the one
    whose gradient made the update. Its numbers go to the trainer's metrics, under
    `curvature/`, at the step that T5X counts when the probed one is done.

    Args:
        trainer_cls: T5X's `Trainer`, another subclass of `BaseTrainer`, or a function
            with the same keywords that returns one.
        period: steps from one probe to the next.

    A period that is not a whole number of at least 1 raises `ValueError`. So does the
    call of the result, if the model's loss has no forward mode or if the train state has
    variables besides the parameters. A `trainer_cls` that is not, or does not make, a T5X
    trainer raises `TypeError`.
    """
    settings.check("CURVATURE_PERIOD", period, settings.Positive)
    wrapping.check_constructor(trainer_cls, t5x_trainer.BaseTrainer, WHO)

    def build(*arguments: Any, **named: Any):
        trainer = trainer_cls(*arguments, **named)
        wrapping.check_trainer(trainer, t5x_trainer.BaseTrainer, WHO)
        wrapping.check_model(trainer._model, NEEDS)
        _check_state(trainer.train_state)
        probed = _ProbedTraining(trainer, period)
        trainer.train, trainer.compile_train = probed.train, probed.compile_train
        return trainer

    return build


class _ProbedTraining:
    """The two methods of a trainer that `t5x.train` calls, with probes."""

    def __init__(self, trainer, period):
        self._trainer = trainer
        self._train, self._compile_train = trainer.train, trainer.compile_train
        self._probes = Probes(period, self._write)
        partition = trainer._partitioner.partition
        params = trainer._train_state_axes.params
        batch = trainer._partitioner.data_partition_spec
        loss = lambda params, batch, step: step_loss(trainer, params, batch, step)
        self._copy: Any = partition(
            along_update.copied,
            in_axis_resources=((params, None),),
            out_axis_resources=(params, None),
        )
        measure = along_update.along_update(loss)
        self._measure: Any = partition(
            lambda kept, new, batch: measure(kept[0], new, batch, kept[1]),
            in_axis_resources=((params, None), params, batch),
            out_axis_resources=None,
        )
        self._loss = loss
        self._done = 0

    def compile_train(self, batch):
        """T5X's `compile_train`, then the same for the probe."""
        self._compile_train(batch)
        state = self._trainer.train_state
        found = self._trainer._model, self._loss, state.params, batch, state.step
        wrapping.check_traced(*found, needs=NEEDS)
        start = time.monotonic()
        compiled = self._trainer._partitioner.compile
        kept = (state.params, state.step)
        self._copy = compiled(self._copy, kept)
        self._measure = compiled(self._measure, kept, state.params, batch)
        seconds = time.monotonic() - start
        self._write(int(state.step), {f"{PREFIX}/compilation_seconds": seconds})

    def train(self, batch_iter, num_steps, start_step=None):
        """T5X's `train`; its loop reads the compiled step once, at its beginning."""
        trainer, stock = self._trainer, self._trainer._compiled_train_step
        step = trainer.train_state.step if start_step is None else start_step
        self._done = first = int(step)
        run = stock or trainer._partitioned_train_step
        trainer._compiled_train_step = lambda state, batch: self._step(
            run, state, batch
        )
        try:
            with self._probes.training():
                summary = self._train(batch_iter, num_steps, start_step=first)
        finally:
            trainer._compiled_train_step = stock
        if self._done != first + num_steps:
            logging.error(
                "%s.train must take its steps from _compiled_train_step, as T5X's does, "
                "to be probed: it took %d of %d; curvature/ is incomplete.",
                type(trainer).__name__,
                self._done - first,
                num_steps,
            )
        return summary

    def _step(self, run, state, batch):
        self._done += 1
        if not self._probes.is_due(self._done):
            return run(state, batch)
        kept = self._copy((state.params, state.step))  # the step donates its state
        new, metrics = run(state, batch)
        rate = _learning_rate(metrics)
        self._probes.run(self._done, self._measure, (kept, new.params, batch), rate)
        return new, metrics

    def _write(self, step, numbers):
        self._trainer.train_metrics_manager.write_scalars(step, numbers)


def step_loss(trainer: Any, params: Any, batch: Any, step: Any) -> Any:
    """The loss that a T5X trainer's step reports: the sum over its microbatches.

    Microbatches are cut, and dropout keys drawn, as in T5X's
    `accumulate_grads_microbatched`.

    Args:
        trainer: the model, the base key and the number of microbatches are read.
        params: the parameters.
        batch: the step's batch.
        step: the number of the step, before it is done.
    """
    model, key = trainer._model, trainer._get_step_rng(step)
    count = getattr(trainer, "_num_microbatches", None)
    if count is None or count <= 1:
        return model.loss_fn(params, batch, key)[0]
    size = next(iter(batch.values())).shape[0] // count
    spec = trainer._partitioner.data_partition_spec
    own = jax.random.split(key)[1]  # every microbatch has this key, in T5X

    def add(number, total):
        cut = lambda x: partitioning.with_sharding_constraint(
            jax.lax.dynamic_slice_in_dim(x, number * size, size), spec
        )
        return total + model.loss_fn(params, jax.tree.map(cut, batch), own)[0]

    return jax.lax.fori_loop(0, count, add, jnp.zeros(()))


def _learning_rate(metrics) -> float | None:
    for name in LEARNING_RATES:
        if name in metrics:
            on_host = jax.tree.map(
                lambda x: np.asarray(utils.get_local_data(x)), metrics[name]
            )
            return float(np.ravel(on_host.compute())[0])
    return None


def _check_state(state) -> None:
    if state.flax_mutables:
        raise ValueError(
            "Curvature while training needs a loss that depends on the parameters alone: "
            f"got flax_mutables {', '.join(state.flax_mutables)} in the train state."
        )
