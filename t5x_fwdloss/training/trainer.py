"""T5X's trainer with probes of the curvature: `with_curvature` wraps any `trainer_cls`.

The user's own constructor builds the trainer, with its gin bindings, and its compiled
step trains, untouched: on probed steps it is called between a copy of the old
parameters and a probe. So training's numbers stay the trainer's, bit for bit.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
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

from t5x_fwdloss.analysis.objective import normalization
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.curvature.vectors import trees
from t5x_fwdloss.t5x_host import dataset, optimizer
from t5x_fwdloss.training.chosen import put
from t5x_fwdloss.training.forward_trainer import ChosenParameters
from t5x_fwdloss.training.largest_eigenvalue import HESSIAN, LargestEigenvalues, Matrix
from t5x_fwdloss.training.noise_scale import NoiseScale
from t5x_fwdloss.training.quantity import ProbedStep, Quantity

Constructor = Callable[..., Any]  # of a t5x.trainer.BaseTrainer
# T5X's names of a step's learning rate among its metrics.
LEARNING_RATES = ("learning_rate/current", "learning_rate")
WHO = "Curvature while training wraps T5X's trainers"
# Arguments by gin's macros.
MACROS = {
    "period": "CURVATURE_PERIOD",
    "eigenvalue_products": "CURVATURE_EIGENVALUE_PRODUCTS",
    "eigenvalue_matrices": "CURVATURE_EIGENVALUE_MATRICES",
    "noise_scale": "CURVATURE_NOISE_SCALE",
}


def with_curvature(
    trainer_cls: Constructor,
    period: settings.Positive = 100,
    *,
    eigenvalue_products: settings.Count = 0,
    eigenvalue_matrices: Sequence[Matrix] = (HESSIAN,),
    noise_scale: bool = False,
    probe_mixture: settings.Words | None = None,
    probe_dataset: Callable[..., utils.DatasetConfig] = utils.DatasetConfig,
) -> Constructor:
    """The constructor of the same trainer, with a probe every `period` steps.

    A probe measures `along_update.AlongUpdate` around one real step: on the step's own
    batch, with its microbatches and its own dropout masks, so that the loss is the one
    whose gradient made the update. Its numbers go to the trainer's metrics, under
    `curvature/`, at the step that T5X counts when the probed one is done.

    Args:
        trainer_cls: T5X's `Trainer`, another subclass of `BaseTrainer`, or a function
            with the same keywords that returns one.
        period: steps from one probe to the next.
        eigenvalue_products: Lanczos steps for the largest eigenvalue of each matrix; 0
            leaves it out.
        eigenvalue_matrices: "hessian", "preconditioned_hessian" or both.
        noise_scale: whether to measure the gradient noise scale, from the microbatches,
            or else from the shards of the data; it takes one reverse pass over the batch.
        probe_mixture: a task or mixture whose first batch is measured along the same
            updates, without dropout, under its own name; None measures no other.
        probe_dataset: called with its `mixture_or_task_name`, gives its configuration.

    An invalid setting raises `ValueError`. So does the call of the result, if the model's
    loss has no forward mode, if the train state has variables besides the parameters, if
    the batch has neither microbatches nor shards for the noise scale, or if the model
    cannot read the probe's data. A `trainer_cls` that is not, or does not make, a T5X
    trainer raises `TypeError`.
    """
    settings.check_arguments(with_curvature, locals(), macros=MACROS)
    wrapping.check_constructor(trainer_cls, t5x_trainer.BaseTrainer, WHO)

    def build(*arguments: Any, **named: Any):
        trainer = trainer_cls(*arguments, **named)
        wrapping.check_trainer(trainer, t5x_trainer.BaseTrainer, WHO)
        wrapping.check_model(trainer._model, NEEDS)
        _check_state(trainer.train_state)
        loss = functools.partial(step_loss, trainer)
        quantities: list[Quantity] = [along_update.Along(loss)]
        if probe_mixture is not None:
            config = probe_dataset(mixture_or_task_name=probe_mixture)
            quantities.append(_along_other(trainer, config))
        if eigenvalue_products:
            quantities.append(
                LargestEigenvalues(loss, eigenvalue_matrices, eigenvalue_products)
            )
        if noise_scale:
            pieces = _num_pieces(trainer)
            of_piece = functools.partial(piece_loss, trainer)
            quantities.append(NoiseScale(of_piece, pieces))
        probed = _ProbedTraining(trainer, period, quantities)
        trainer.train, trainer.compile_train = probed.train, probed.compile_train
        return trainer

    return build


class _ProbedTraining:
    """The two methods of a trainer that `t5x.train` calls, with probes."""

    def __init__(self, trainer, period, quantities):
        self._trainer = trainer
        self._train, self._compile_train = trainer.train, trainer.compile_train
        self._probes = Probes(period, self._write, quantities)
        self._copy: Callable[..., Any] | None = None
        self._done = 0

    def compile_train(self, batch):
        """T5X's `compile_train`, then the same for the probe."""
        self._compile_train(batch)
        self._prepare(batch)

    def _prepare(self, batch):
        state = self._trainer.train_state
        loss = functools.partial(step_loss, self._trainer)
        found = self._trainer._model, loss, state.params, batch, state.step
        wrapping.check_traced(*found, needs=NEEDS)
        start = time.monotonic()
        self._probes.prepare(functools.partial(self._compiled, batch))
        self._copy = self._compiled(
            batch, along_update.copied, "params", "key", result="kept"
        )
        seconds = time.monotonic() - start
        self._write(int(state.step), {f"{PREFIX}/compilation_seconds": seconds})

    def _compiled(self, batch, function, *kinds, result="scalars"):
        """A `quantity.Compile` for batches like this one."""
        partitioner, state = self._trainer._partitioner, self._trainer.train_state
        params = self._trainer._train_state_axes.params
        of_batch = partitioner.data_partition_spec
        known = {
            "params": (state.params, params),
            "vector": (jax.eval_shape(trees.as_vector, state.params), params),
            "batch": (batch, of_batch),
            "key": (state.step, None),
            "scalars": (None, None),
            "kept": (None, (params, None)),
        }
        of = lambda kind: known[kind] if isinstance(kind, str) else (kind, of_batch)
        partitioned = partitioner.partition(
            function,
            in_axis_resources=tuple(of(kind)[1] for kind in kinds),
            out_axis_resources=of(result)[1],
        )
        return partitioner.compile(partitioned, *(of(kind)[0] for kind in kinds))

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
        if self._copy is None:  # `compile_train` is not required
            self._prepare(batch)
        assert self._copy is not None
        # The step donates its state.
        old, step = self._copy(state.params, state.step)
        new, metrics = run(state, batch)
        rate = _learning_rate(metrics)
        preconditioner = lambda: preconditioner_of(new._optimizer, rate)
        self._probes.run(
            self._done,
            ProbedStep(old, new.params, batch, step, rate, preconditioner),
        )
        return new, metrics

    def _write(self, step, numbers):
        self._trainer.train_metrics_manager.write_scalars(step, numbers)


def preconditioner_of(found: Any, learning_rate: float | None) -> Preconditioner:
    """That of a `t5x.optimizers.Optimizer`; 0 where it does not move the parameters."""
    definition = found.optimizer_def
    if not isinstance(definition, ChosenParameters):
        return optimizer.of_t5x(found, learning_rate)
    moving = definition.chosen.pick(found.target)
    part = type(found)(definition.inner, found.state, moving)
    of_part = optimizer.of_t5x(part, learning_rate)
    diagonal = put(of_part.diagonal, trees.zeros_like(found.target))
    return dataclasses.replace(of_part, diagonal=diagonal)


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
    count = _num_microbatches(trainer)
    if count == 1:
        return trainer._model.loss_fn(params, batch, trainer._get_step_rng(step))[0]

    def add(number, total):
        return total + piece_loss(trainer, params, batch, step, number, count)

    return jax.lax.fori_loop(0, count, add, jnp.zeros(()))


def piece_loss(
    trainer: Any, params: Any, batch: Any, step: Any, number: Any, num_pieces: int
) -> Any:
    """The part of the step's loss that one piece of the batch has.

    A microbatch, if there are as many pieces as microbatches. A loss that is an average
    over tokens or sequences is then one over each microbatch, in T5X; where the step has
    no microbatches, it is divided by the number of pieces.

    Args:
        trainer: as in `step_loss`.
        params: the parameters.
        batch: the step's batch.
        step: the number of the step, before it is done.
        number: of the piece.
        num_pieces: they are equal, and a divisor of the batch.
    """
    model, spec = trainer._model, trainer._partitioner.data_partition_spec
    size = next(iter(batch.values())).shape[0] // num_pieces
    # Every microbatch has this key, in T5X.
    key = jax.random.split(trainer._get_step_rng(step))[1]
    cut = lambda x: partitioning.with_sharding_constraint(
        jax.lax.dynamic_slice_in_dim(x, number * size, size), spec
    )
    loss = model.loss_fn(params, jax.tree.map(cut, batch), key)[0]
    factor = getattr(model, "_loss_normalizing_factor", None)
    if normalization.is_mean(factor) and _num_microbatches(trainer) == 1:
        return loss / num_pieces
    return loss


def _num_microbatches(trainer) -> int:
    return max(getattr(trainer, "_num_microbatches", None) or 1, 1)


def _num_pieces(trainer) -> int:
    """The microbatches, or else the shards of the data.

    Raises:
        ValueError: there is one of each.
    """
    shards = trainer._partitioner.data_mesh_size
    found = _num_microbatches(trainer)
    found = shards if found == 1 else found
    if found == 1:
        raise ValueError(
            "CURVATURE_NOISE_SCALE compares gradients of pieces of a batch and needs at "
            "least two microbatches or two shards of the data: got 1 of each; set "
            "trainer.Trainer.num_microbatches."
        )
    return found


def _along_other(trainer, config) -> along_update.Along:
    """The measurement on the first batch of other data, along the same updates.

    Raises:
        ValueError: the data do not exist, or the model cannot read them.
    """
    model = trainer._model
    try:
        dataset.check_config(config)
        (batch,) = dataset.load_batches(
            config, 1, trainer._partitioner, model.FEATURE_CONVERTER_CLS
        )
    except ValueError as error:
        raise ValueError(
            "PROBE_MIXTURE must be a task or mixture whose first batch the model can "
            f"read: {error}"
        ) from error
    loss = lambda params, batch, key: model.loss_fn(params, batch, key)[0]
    name = dataset.task_name(config)
    return along_update.Along(loss, (f"{name}/", batch, None))


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
