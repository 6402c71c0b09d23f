"""SIGTERM, by which a machine that is taken away says so: save, and leave together.

Every process of a run asks the others at the end of each step whether one of them got the
signal, so that all leave at the same step, whichever got it. JAX has such a service, too,
but it takes a second to hear the signal, and runs only where `jax.distributed` does.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

from t5x_fwdloss.analysis.store import multihost

# What a shell says of a process that SIGTERM ended: 128 + 15.
STATUS = 143

_signaled = threading.Event()


class Preempted(Exception):
    """The run was told to leave; what it had measured is saved."""


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Takes note of SIGTERM, where it would end the process or be heard by JAX alone.

    A second signal ends the process. Has no effect in other threads than the main one,
    which cannot hear signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number, frame):
        del frame
        _signaled.set()
        signal.signal(number, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        _signaled.clear()
        # None: a handler of JAX's, which cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def told() -> bool:
    """Whether some process got SIGTERM; asked by every process at the same step."""
    return multihost.any_process(_signaled.is_set())
