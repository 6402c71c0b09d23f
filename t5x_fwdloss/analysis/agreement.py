"""What all processes of a run must agree on: decided by process 0, told to the rest."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


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


def wait(name: str) -> None:
    """Hold every process until all are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
