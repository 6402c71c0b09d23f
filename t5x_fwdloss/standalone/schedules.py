"""Learning rate schedules."""

import jax.numpy as jnp
import optax

from t5x_fwdloss.analysis import settings

# Arguments whose macros are not their names in capitals.
MACROS = {"base_learning_rate": "LEARNING_RATE"}


def rsqrt_schedule(
    base_learning_rate: settings.Above, warmup_steps: settings.Positive
) -> optax.Schedule:
    """T5's learning rate: base * min(1, step / warmup) / sqrt(max(step, warmup)).

    It does not depend on the length of the run, so that a run can be extended. A rate
    that is not above zero and a warmup of no steps raise `ValueError`.
    """
    settings.check_arguments(rsqrt_schedule, locals(), macros=MACROS)

    def schedule(step):
        warm = jnp.minimum(1.0, step / warmup_steps)
        return base_learning_rate * warm / jnp.sqrt(jnp.maximum(step, warmup_steps))

    return schedule
