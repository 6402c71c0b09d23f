"""A limit for the compiled functions that wait for execution at one time.

JAX returns before a compiled function has been executed. Where the devices are threads
of one host (CPUs), a device that has 32 functions waiting blocks the threads that the
others need to exchange numbers, and all of them deadlock (jax 0.10.2). A loop that
issues functions without reading a result has to wait once in a while.
"""

from typing import TypeVar

import jax

FEW = 8
Result = TypeVar("Result")


def limited(number: int, result: Result) -> Result:
    """The result of call `number` of a loop; waits for it at every eighth call."""
    if number % FEW == FEW - 1:
        jax.block_until_ready(result)
    return result
