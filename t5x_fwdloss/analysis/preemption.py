"""SIGTERM, the signal of a preempted machine: all processes save, and leave together.

Every process of a run asks the others at the end of each step whether one of them got
the signal, so that all leave at the same step. JAX has such a service, too, but it
takes a second to notice the signal, and runs only with `jax.distributed`.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

from t5x_fwdloss.analysis.store import multihost

# A shell's exit status of a process that SIGTERM ended: 128 + 15.
STATUS = 143

_signaled = threading.Event()
_listening: list[bool] = []


class Preempted(Exception):
    """The run was told to stop; all that it measured is saved."""


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Records SIGTERM, where it would end the process or reach JAX alone.

    Inside of another `listening` it has no effect: a signal lasts until the outer ends.
    A second signal ends the process. It works in the main thread only: others get no
    signals.
    """
    if _listening or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number, frame):
        del frame
        _signaled.set()
        signal.signal(number, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, note)
    _listening.append(True)
    try:
        yield
    finally:
        _listening.clear()
        _signaled.clear()
        # None: a handler of JAX's, which cannot be restored.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def signaled() -> bool:
    """Whether this process got SIGTERM."""
    return _signaled.is_set()


def told() -> bool:
    """Whether some process got SIGTERM; asked by every process at the same step."""
    (told,) = multihost.any_process(signaled())
    return told
