"""The preconditioner of the optimizer in a T5X checkpoint."""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
from t5x import adafactor, optimizers, partitioning, utils

from t5x_fwdloss.analysis import optimizer as optimizer_lib
from t5x_fwdloss.curvature.vectors import layout
from t5x_fwdloss.t5x_host import checkpoint

# A gradient whose square is far below the epsilon1 = 1e-30 of Adafactor.
SMALL = 1e-18


def load(
    initializer: utils.TrainStateInitializer,
    partitioner: partitioning.BasePartitioner,
    cfg: utils.RestoreCheckpointConfig,
    use_orbax: bool = True,
    learning_rate: optimizer_lib.LearningRate | None = None,
) -> optimizer_lib.Preconditioner:
    """The preconditioner of the checkpoint's optimizer, at its step.

    Args:
        initializer: T5X's, created with the model's own `optimizer_def`.
        partitioner: T5X's partitioner.
        cfg: T5X's restore configuration.
        use_orbax: False only for T5X's single-file checkpoints.
        learning_rate: the trainer's learning rate, or its schedule.

    Raises:
        ValueError: the checkpoint has no state of this optimizer, or its update does not
            depend smoothly on a small gradient.
    """
    restorer = checkpoint.Restorer(initializer, partitioner, cfg, use_orbax)
    try:
        restored = restorer.restore()
    except ValueError as error:
        raise ValueError(
            "Preconditioned measurements need the optimizer in the model's gin file, "
            f"with its state in the checkpoint: {error}"
        ) from error
    optimizer = restored.state._optimizer
    rate = optimizer_lib.at_step(learning_rate, restored.step)
    return of_t5x(optimizer, rate)


def name_of(definition: Any) -> str:
    """The name of a T5X optimizer, or of the optax optimizer that it wraps."""
    if not isinstance(definition, optimizers.OptaxWrapper):
        return type(definition).__name__
    like = {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    return optimizer_lib.name_of(jax.eval_shape(definition.init_state, like))


def of_t5x(
    optimizer: Any, learning_rate: float | None = None
) -> optimizer_lib.Preconditioner:
    """The preconditioner of a T5X optimizer: definition, state and target.

    Args:
        optimizer: a `t5x.optimizers.Optimizer`.
        learning_rate: the trainer's learning rate at its step, if it is known.
    """
    definition, params = optimizer.optimizer_def, optimizer.target
    if isinstance(definition, adafactor.Adafactor):
        return _of_adafactor(definition, optimizer.state, params, learning_rate)

    return optimizer_lib.of_update(
        _update(definition), optimizer.state, params, learning_rate=learning_rate
    )


# Both are cached so that a training run, which asks again and again, compiles them once.
@functools.lru_cache(maxsize=8)
def _update(definition):
    def update(gradient, state, params):
        # An optax optimizer has its own learning rate; the others multiply by this.
        hyper_params = definition.update_hyper_params(learning_rate=1.0)
        new, state = definition.apply_gradient(hyper_params, params, state, gradient)
        return jax.tree.map(jnp.subtract, new, params), state

    return update


@functools.lru_cache(maxsize=8)
def _adafactor_step(definition, layouts):
    # With a momentum of zero, the momentum state is the step itself, which the
    # parameters would round away.
    plain = copy.copy(definition)
    plain.dtype_momentum = jnp.float32
    hyper_params = definition.hyper_params.replace(learning_rate=1.0, beta1=0.0)

    @jax.jit
    def step(params, state):
        gradient = jax.tree.map(lambda x: jnp.full_like(x, SMALL), params)
        _, new = plain.apply_gradient(hyper_params, params, state, gradient)
        is_state = lambda node: hasattr(node, "v_row")
        states = jax.tree.leaves(new.param_states, is_leaf=is_state)
        steps = jax.tree.unflatten(
            jax.tree.structure(params), [node.m / SMALL for node in states]
        )
        return layout.constrain(steps, layouts)

    return step


def _of_adafactor(definition, state, params, learning_rate):
    layouts = tuple(map(layout.sharding_of, jax.tree.leaves(params)))
    momentum = definition.hyper_params.beta1 or 0.0
    return optimizer_lib.Preconditioner(
        _adafactor_step(definition, layouts)(params, state),
        "Adafactor",
        learning_rate,
        threshold=(2 + 2 * momentum) / (1 - momentum),
    )
