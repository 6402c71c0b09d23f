"""The second moment in a T5X checkpoint's optimizer state, restored by T5X itself."""

from typing import Any

import flax.serialization
from t5x import adafactor, partitioning, utils

from t5x_fwdloss.analysis import second_moment
from t5x_fwdloss.host import checkpoint


def load(
    initializer: utils.TrainStateInitializer,
    partitioner: partitioning.BasePartitioner,
    cfg: utils.RestoreCheckpointConfig,
    use_orbax: bool = True,
) -> Any:
    """The second moment of the gradient, a tree like the parameters.

    Args:
        initializer: T5X's, made with the model's own `optimizer_def`.
        partitioner: T5X's partitioner.
        cfg: T5X's restore configuration.
        use_orbax: False only for T5X's single-file checkpoints.

    Raises:
        ValueError: the checkpoint has no state of this optimizer, or none that holds a
            second moment.
    """
    restorer = checkpoint.Restorer(initializer, partitioner, cfg, use_orbax)
    try:
        state = restorer.restore().state
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            "The checkpoint must hold the state of the optimizer in the file of the "
            f"model: T5X could not restore it ({type(error).__name__}: {error})."
        ) from error
    saved = flax.serialization.to_state_dict(state.state_dict())["state"]
    optimizer = state._optimizer.optimizer_def
    if not isinstance(optimizer, adafactor.Adafactor):
        return second_moment.from_state(saved, state.params)

    return second_moment.from_state(saved, state.params, lacking_axes(optimizer))


def lacking_axes(optimizer: adafactor.Adafactor) -> Any:
    """Name and shape of a factored parameter to the axes that row and column lack."""

    def lacking(name, shape):
        rules = optimizer.hyper_params.factor_map
        rule = rules[name] if rules else adafactor.HEURISTIC_RULE
        axes: Any = optimizer._parse_rule(rule, shape, name)[1]
        if axes is adafactor.HEURISTIC_RULE:
            axes = optimizer._factored_dims(shape)
        column_lacks, row_lacks = axes  # T5X's d1 and d0
        return row_lacks, column_lacks

    return lacking
