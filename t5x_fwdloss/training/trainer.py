"""T5X's trainer with probes of the curvature: `with_curvature` wraps any `trainer_cls`.

The user's own constructor builds the trainer, with its gin bindings, and its compiled
step trains, untouched: on probed steps it is called between a copy of the old
parameters and a probe. So training's numbers stay the trainer's, bit for bit.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from t5x_fwdloss import loss_mixin, models

# isort: split
# After `models`, whose error names the missing part of T5X in one sentence.
from t5x import partitioning, utils
from t5x import trainer as t5x_trainer

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.objective import forward_mode
from t5x_fwdloss.curvature.products import derivatives
from t5x_fwdloss.training import along_update
from t5x_fwdloss.training.probes import NEEDS, PREFIX, Probes, check_forward_mode

Constructor = Callable[..., Any]  # of a t5x.trainer.BaseTrainer
# T5X's names of a step's learning rate among its metrics.
LEARNING_RATES = ("learning_rate/current", "learning_rate")
REMEDY = (
    "add --gin_file=t5x_fwdloss/configs/losses/custom_jvp.gin (or chunked.gin, or "
    "autodiff.gin)"
)
_STOCK_LOSS = models.t5x_models.BaseTransformerModel.loss_fn


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
    variables besides the parameters.

    Raises:
        TypeError: `trainer_cls` is not, or does not make, a T5X trainer.
    """
    settings.check("CURVATURE_PERIOD", period, settings.Positive)
    if not callable(trainer_cls) or (
        inspect.isclass(trainer_cls)
        and not issubclass(trainer_cls, t5x_trainer.BaseTrainer)
    ):
        raise TypeError(_no_trainer("trainer_cls", trainer_cls))

    def build(*arguments: Any, **named: Any):
        trainer = trainer_cls(*arguments, **named)
        if not isinstance(trainer, t5x_trainer.BaseTrainer):
            raise TypeError(_no_trainer("what trainer_cls returns", trainer))
        _check_model(trainer._model)
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
        _check_traced(self._trainer._model, self._loss, state.params, batch, state.step)
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


def _no_trainer(what, found) -> str:
    return (
        f"Curvature while training wraps T5X's trainers: {what} must be "
        f"t5x.trainer.Trainer or another t5x.trainer.BaseTrainer: got "
        f"{settings.shown(found)}."
    )


def _check_model(model) -> None:
    """Rejects what is known to lack forward mode, before anything is compiled.

    Raises:
        ValueError: it names the losses to choose from.
    """
    if isinstance(model, loss_mixin.LossMixin):
        check_forward_mode(model.loss_settings)
    elif inspect.unwrap(type(model).loss_fn) is _STOCK_LOSS:
        raise ValueError(
            f"{NEEDS} got T5X's own loss, of {type(model).__name__}; {REMEDY}."
        )


def _check_traced(model, loss, params, batch, step) -> None:
    """Rejects a loss of the user's own that has no forward mode.

    Raises:
        ValueError: it names the function that has none.
    """
    if isinstance(model, loss_mixin.LossMixin):
        return  # checked by its settings, without a trace
    shapes = jax.eval_shape(lambda *x: x, params, batch, step)
    push = derivatives.directional_derivative(loss)
    if forward_mode.is_blocked(jax.make_jaxpr(push)(shapes[0], *shapes)):
        found = forward_mode.custom_vjp_functions(jax.make_jaxpr(loss)(*shapes))
        raise ValueError(
            f"{NEEDS} got that of {type(model).__name__}, in which jax.custom_vjp has "
            f"none: {', '.join(found) or 'a function without a name'}; derive "
            f"{type(model).__name__} from a class in t5x_fwdloss.models instead."
        )


def _check_state(state) -> None:
    if state.flax_mutables:
        raise ValueError(
            "Curvature while training needs a loss that depends on the parameters alone: "
            f"got flax_mutables {', '.join(state.flax_mutables)} in the train state."
        )
