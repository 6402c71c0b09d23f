"""Stops a run from within, at a step of its own choice."""

import itertools
import signal

from t5x_fwdloss.progress import Progress


class Killed(BaseException):
    """Stands for a SIGKILL: nothing that a run does at its end is done."""


def signal_at(step, setattr=setattr):
    """Sends this process a real SIGTERM at one of its steps, counted over measurements.

    Args:
        step: the step, from 1 on; 0: none.
        setattr: how progress is replaced; monkeypatch.setattr takes it back.
    """
    steps = itertools.count(1)
    original = Progress.update

    def update(self, *args, **kwargs):
        if next(steps) == step:
            signal.raise_signal(signal.SIGTERM)
        return original(self, *args, **kwargs)

    setattr(Progress, "update", update)
