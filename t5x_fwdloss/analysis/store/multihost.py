"""Agreement of all processes of a run: process 0 decides and tells the others."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from t5x_fwdloss.analysis.store import files


def from_primary(value: Any) -> Any:
    """Process 0's value, in every process; JSON's types only."""
    if jax.process_count() == 1:
        return value
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # Every process must bring an array of the same length, and only one knows it.
    size = multihost_utils.broadcast_one_to_all(np.asarray(content.size))
    padded = np.zeros(int(size), np.uint8)
    if jax.process_index() == 0:
        padded[:] = content
    padded = multihost_utils.broadcast_one_to_all(padded)
    return json.loads(np.asarray(padded).tobytes())


def from_primary_doing(is_primary: bool, action: Callable[[], Any]) -> Any:
    """The result of the primary process's action, in every process; JSON's types only.

    Args:
        is_primary: whether this process does it.
        action: reads or writes files.

    Raises:
        StorageError: the action raised `ValueError`; raised in every process.
    """
    found, problem = None, None
    if is_primary:
        try:
            found = action()
        except ValueError as error:
            problem = str(error)
    found, problem = from_primary([found, problem])
    if problem is not None:
        raise files.StorageError(problem)
    return found


def least(value: float) -> int:
    """The smallest of all processes' values, to seven digits."""
    if jax.process_count() == 1:
        return int(value)
    # In float32, because JAX's integers have 32 bits: about 2e9.
    return int(multihost_utils.process_allgather(np.float32(value)).min())


def any_process(*flags: bool) -> list[bool]:
    """For each flag, whether it is set in one process or more."""
    if jax.process_count() == 1:
        return list(flags)
    found = multihost_utils.process_allgather(np.asarray(flags, np.int32))
    return found.any(axis=0).tolist()


def wait(name: str) -> None:
    """Block every process until all have arrived."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
