"""Progress of long computations: a bar on a terminal, lines elsewhere."""

import contextlib
import logging as python_logging
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import logging
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
PACKAGE = pathlib.Path(__file__).parent


def show_lines() -> None:
    """Shows this package's log lines and all errors without `--verbosity`.

    Call it before absl reads its flags. SeqIO and Orbax log and warn when nothing is
    wrong; `--verbosity=1` shows everything.
    """
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_ours_or_error)


def _ours_or_error(record) -> bool:
    # A clone of this repository has the package's name, and holds its environment.
    ours = pathlib.Path(record.pathname).is_relative_to(PACKAGE)
    if logging.get_verbosity() > logging.INFO or ours:
        return True
    return record.levelno >= python_logging.ERROR


@contextlib.contextmanager
def stage(name: str, *, is_primary: bool = True):
    """Logs the beginning of a stage of the run, and its duration.

    Args:
        name: the stage's name.
        is_primary: whether this process shows anything.
    """
    if is_primary:
        logging.info("%s", name)
    start = time.monotonic()
    yield
    if is_primary:
        logging.info("%s: %.1f s", name, time.monotonic() - start)


class Progress:
    """Counts steps of one piece of work; a context manager.

    On a terminal it draws a tqdm bar. Elsewhere it logs a line when it starts and ends
    and at most every ten seconds between. Only process 0 shows anything.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        is_primary: bool = True,
        done: int = 0,
        stream: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Work of at most `total` steps.

        Args:
            title: the name of the work.
            total: the number of steps; work that converges may end earlier.
            is_primary: whether this process shows anything.
            done: steps done by an earlier run.
            stream: the stream of the bar; standard error by default.
            clock: returns the time in seconds.
        """
        self._title, self._total, self._done = title, total, done
        self._first = done
        # Steps done and seconds elapsed after the first update, which compiles.
        self._compiling: tuple[int, float] | None = None
        stream = sys.stderr if stream is None else stream
        self._bar = None
        self._shown = is_primary
        self._clock = clock
        self._start = self._last = clock()
        if is_primary and stream is not None and stream.isatty():
            self._bar = tqdm(
                desc=title, total=total, initial=done, file=stream, leave=False
            )

    def __enter__(self) -> "Progress":
        """Starts the work; returns itself."""
        self._line(f"{self._title}: starts at {self._done} of {self._total}")
        return self

    def update(self, steps: int = 1, note: str = "") -> None:
        """Count `steps` more; `note` describes the state."""
        self._done += steps
        if self._compiling is None:
            self._compiling = (self._done, self._clock() - self._start)
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(steps)
            return
        now = self._clock()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self._line(self.line(now - self._start, note))

    def line(self, seconds: float, note: str = "") -> str:
        """The log line after `seconds`: steps done, time elapsed, time left.

        The time left is estimated from the steps after the first update, once there are
        any, because the first one includes compilation.
        """
        steps, before = self._compiling if self._compiling else (self._first, 0.0)
        if steps == self._done:
            steps, before = self._first, 0.0
        fresh = self._done - steps
        left = "unknown"
        if fresh > 0:
            per_step = (seconds - before) / fresh
            left = f"{per_step * (self._total - self._done):.0f} s"
        about = f", {note}" if note else ""
        return (
            f"{self._title}: {self._done} of {self._total}, {seconds:.0f} s gone, at "
            f"most {left} left{about}"
        )

    def __exit__(self, *_) -> None:
        """Ends the work, whether it succeeded or not."""
        if self._bar is not None:
            self._bar.close()
        seconds = self._clock() - self._start
        self._line(f"{self._title}: {self._done} of {self._total} in {seconds:.1f} s")

    def _line(self, text: str) -> None:
        if self._shown and self._bar is None:
            logging.info("%s", text)
