"""T5X training by forward gradients: no reverse pass, and only chosen parameters move.

`with_forward_gradient` wraps any `trainer_cls` that makes a `t5x.trainer.Trainer`: its
step is T5X's own, from the microbatches to the metrics, with an estimate in the place of
the gradient. `with_chosen_parameters` wraps the `train_state_initializer_cls`: the
optimizer, whichever it is, sees the chosen parameters alone and has a state for no others.
"""

import types
from collections.abc import Callable
from typing import Any

import jax

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.curvature.vectors import probes
from t5x_fwdloss.training import wrapping
from t5x_fwdloss.training.chosen import Chosen, put
from t5x_fwdloss.training.forward_gradient import (
    DIRECTIONS,
    DISTRIBUTION,
    NEEDS,
    Distribution,
)
from t5x_fwdloss.training.forward_gradient import (
    with_forward_gradient as estimated,
)

# isort: split
# After `wrapping`, whose error names the missing part of T5X in one sentence.
from t5x import optimizers, partitioning, utils
from t5x import trainer as t5x_trainer

WHO = "Forward gradients take the place of the gradient in T5X's own step"
SEED = "FORWARD_GRADIENT_SEED"


def with_forward_gradient(
    trainer_cls: Callable[..., Any],
    num_directions: int = 1,
    seed: int = 0,
    distribution: str = "normal",
) -> Callable[..., Any]:
    """The constructor of the same trainer, whose gradient is estimated by forward mode.

    The directions depend on the seed, the step and the paths of the parameters, and are
    the same on every mesh. Optimizer, learning rate, microbatches and metrics are T5X's.

    Args:
        trainer_cls: T5X's `Trainer`, a subclass with its step, or a function with the
            same keywords that returns one.
        num_directions: directions per step; the estimate is their mean.
        seed: of the directions.
        distribution: of a direction's entries, "normal" or "rademacher".

    Other settings raise `ValueError`, and so does the call of the result, if the model's
    loss has no forward mode; a `trainer_cls` that is not, or does not make, a
    `t5x.trainer.Trainer` raises `TypeError`.
    """
    settings.check(DIRECTIONS, num_directions, settings.Positive)
    settings.check(SEED, seed, settings.Seed)
    settings.check(DISTRIBUTION, distribution, Distribution)
    wrapping.check_constructor(trainer_cls, t5x_trainer.Trainer, WHO)

    def build(*arguments: Any, **named: Any):
        trainer = trainer_cls(*arguments, **named)
        wrapping.check_trainer(trainer, t5x_trainer.Trainer, WHO)
        _check_step(trainer)
        wrapping.check_model(trainer._model, NEEDS)
        estimate = lambda loss, place: estimated(
            loss, num_directions, distribution, place
        )
        # In the place where T5X's cached property keeps its step.
        vars(trainer)["_partitioned_train_step"] = _step(trainer, estimate, seed)
        trainer.compile_train = _compile_train(trainer)
        return trainer

    return build


def with_chosen_parameters(
    pattern: str, initializer_cls: Callable[..., Any] = utils.TrainStateInitializer
) -> Callable[..., Any]:
    """The constructor of the same train state, in which only some parameters train.

    Args:
        pattern: a regular expression for the whole path of a parameter, such as
            `.*norm/scale|decoder/logits_dense/kernel`.
        initializer_cls: T5X's `TrainStateInitializer`, or another with its keywords.

    A pattern that is no regular expression, or chooses no parameter when the result is
    called, raises `ValueError`.
    """
    chosen = Chosen(pattern)

    def build(*, optimizer_def: Any, **named: Any):
        return initializer_cls(
            optimizer_def=ChosenParameters(optimizer_def, chosen), **named
        )

    return build


class ChosenParameters(optimizers.OptimizerDef):
    """An optimizer of T5X for some of the parameters; the others have no state.

    Paths in the state are those of the optimizer for all parameters, so that T5X restores
    it from a checkpoint of such a training.
    """

    def __init__(self, inner: Any, chosen: Chosen):
        """The user's optimizer, and what it sees.

        Args:
            inner: the optimizer.
            chosen: the parameters.
        """
        self.inner, self.chosen = inner, chosen
        # T5X asks whether an optimizer has these.
        if hasattr(inner, "set_param_axes"):
            self.set_param_axes: Any = lambda axes: inner.set_param_axes(
                chosen.pick(axes)
            )
        if hasattr(inner, "derive_logical_axes"):
            self.derive_logical_axes: Any = self._derive_logical_axes

    @property
    def hyper_params(self) -> Any:
        """Those of the user's optimizer."""
        return self.inner.hyper_params

    def init_state(self, params: Any) -> Any:
        """The state of the chosen parameters."""
        self.chosen.check(params)
        return self.inner.init_state(self.chosen.pick(params))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: Any, grads: Any
    ) -> tuple[Any, Any]:
        """All parameters and the new state; `grads` may hold the others' or not."""
        pick = self.chosen.pick
        moved, state = self.inner.apply_gradient(
            hyper_params, pick(params), state, pick(grads)
        )
        return put(moved, params), state

    def update_hyper_params(self, **overrides: Any) -> Any:
        """Those of the user's optimizer, with overrides."""
        return self.inner.update_hyper_params(**overrides)

    def state_dict(self, target: Any, state: Any) -> Any:
        """All parameters, and the state of the chosen ones."""
        return self.inner.state_dict(target, state)

    def restore_state(self, opt_target: Any, opt_state: Any, state_dict: Any) -> Any:
        """The reverse of `state_dict`."""
        return self.inner.restore_state(opt_target, opt_state, state_dict)

    def _derive_logical_axes(self, optimizer, param_logical_axes):
        pick = self.chosen.pick
        part = optimizers.Optimizer(self.inner, optimizer.state, pick(optimizer.target))
        found = self.inner.derive_logical_axes(part, pick(param_logical_axes))
        return optimizers.Optimizer(self, found.state, param_logical_axes)


def _step(trainer, estimate, seed) -> Any:
    """T5X's `Trainer._partitioned_train_step`, with forward gradients."""
    partitioner, axes = trainer._partitioner, trainer._train_state_axes
    model, pick = trainer._model, _pick(trainer)
    specs = pick(axes.params)
    place = lambda vector: jax.tree.map(
        partitioning.with_sharding_constraint, vector, specs
    )

    def loss(moved, params, *args):
        return model.loss_fn(put(moved, params), *args)

    def train_step(train_state, batch):
        key = jax.random.fold_in(probes.as_key(seed), train_state.step)
        forward = estimate(loss, place)
        # What T5X reads of a model and of a train state to accumulate gradients.
        stand_in = types.SimpleNamespace(
            loss_fn=lambda moved, *args: forward(moved, key, train_state.params, *args)
        )
        part = types.SimpleNamespace(
            params=pick(train_state.params), flax_mutables=train_state.flax_mutables
        )
        grads, metrics, mutables = t5x_trainer.accumulate_grads_microbatched(
            stand_in,
            part,
            batch,
            trainer._get_step_rng(train_state.step),
            trainer._num_microbatches,
            partitioner.data_partition_spec,
        )
        return t5x_trainer.apply_grads(
            train_state,
            grads,
            metrics,
            trainer._learning_rate_fn(train_state.step),
            trainer._weight_metrics_computer,
            {"flax_mutables": mutables} if mutables else None,
        )

    return partitioner.partition(
        train_step,
        in_axis_resources=(axes, partitioner.data_partition_spec),
        out_axis_resources=(axes, None),
        donate_argnums=(0,),
    )


def _pick(trainer):
    """What moves: the parameters that the optimizer sees."""
    optimizer = getattr(trainer.train_state, "_optimizer", None)
    definition = getattr(optimizer, "optimizer_def", None)
    if isinstance(definition, ChosenParameters):
        return definition.chosen.pick
    return lambda tree: tree


def _compile_train(trainer):
    stock = trainer.compile_train

    def compile_train(batch):
        state, model = trainer.train_state, trainer._model
        if not state.flax_mutables:
            key = trainer._get_step_rng(state.step)
            loss = lambda *args: model.loss_fn(*args)[0]
            wrapping.check_traced(model, loss, state.params, batch, key, needs=NEEDS)
        stock(batch)

    return compile_train


def _check_step(trainer) -> None:
    step = "_partitioned_train_step"
    if getattr(type(trainer), step) is not getattr(t5x_trainer.Trainer, step):
        raise TypeError(
            f"{WHO}: the trainer must take the step of t5x.trainer.Trainer: got "
            f"{type(trainer).__name__}, which has a {step} of its own."
        )
