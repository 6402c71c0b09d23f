"""A mesh that this machine does not have, simulated on CPUs for a plan."""

from typing import Any

import jax
import numpy as np


def use(partitioner: Any, num_devices: int) -> None:
    """Gives T5X's partitioner a mesh of simulated devices, as on accelerators.

    T5X itself would put all CPU devices on the model axis.

    Args:
        partitioner: T5X's `PjitPartitioner`; its mesh is not made yet.
        num_devices: the number of devices.

    Raises:
        ValueError: JAX has its devices already, or the partitions do not divide them.
    """
    model = partitioner._num_partitions or int(
        np.prod(partitioner._model_parallel_submesh or 1)
    )
    if num_devices % model:
        raise ValueError(
            "PLAN_DEVICES must be a multiple of the model partitions: got "
            f"{num_devices} devices, {model} partitions."
        )
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise ValueError(
            "PLAN_DEVICES must be used before JAX has its devices: got a gin file that "
            "makes an array, or a process that has used JAX."
        ) from error
    devices = np.asarray(jax.devices()).reshape(-1, model)
    partitioner.mesh = jax.sharding.Mesh(devices, ("data", "model"))
