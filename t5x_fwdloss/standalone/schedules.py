"""Learning rate schedules."""

import jax.numpy as jnp
import optax


def rsqrt_schedule(base_learning_rate: float, warmup_steps: int) -> optax.Schedule:
    """T5's learning rate: base * min(1, step / warmup) / sqrt(max(step, warmup)).

    It does not depend on how long the run is, so that a run can be prolonged.

    Raises:
        ValueError: if there is no warmup.
    """
    if warmup_steps < 1:
        raise ValueError(f"WARMUP_STEPS must be at least 1: got {warmup_steps}.")

    def schedule(step):
        warm = jnp.minimum(1.0, step / warmup_steps)
        return base_learning_rate * warm / jnp.sqrt(jnp.maximum(step, warmup_steps))

    return schedule
