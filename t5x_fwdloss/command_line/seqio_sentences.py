"""One sentence for errors of SeqIO, its data source or the task's own functions."""

import contextlib
import re
from collections.abc import Callable, Iterator

import seqio

from t5x_fwdloss.command_line.gin_sentences import raised_by_package

MAX_REASON = 400  # characters; TensorFlow quotes stacks


@contextlib.contextmanager
def reading(task: str, split: str) -> Iterator[None]:
    """Turns any error in reading a task into a sentence with its reason.

    Only SeqIO knows a task's splits, lengths and features: its sources read forms that
    no list of splits has, such as 'train+validation'.

    Args:
        task: name of a task or mixture.
        split: the split that is read.

    An error of SeqIO, of TensorFlow or of a function of the task raises ValueError.
    """
    with explained(
        lambda: (
            f"SeqIO must be able to read the task {task!r}, split {split!r}"
            f"{_declared(task, split)}"
        )
    ):
        yield


@contextlib.contextmanager
def explained(wanted: Callable[[], str]) -> Iterator[None]:
    """Turns an error of other libraries into a sentence: the condition, and the reason.

    Args:
        wanted: returns the condition in words; called only if it fails.

    Raises:
        ValueError: something inside raised an error that is not this package's own.
    """
    try:
        yield
    except Exception as error:
        if raised_by_package(error):
            raise
        raise ValueError(
            f"{wanted()}: got {type(error).__name__}: {reason(error)}"
        ) from error


def reason(error: BaseException) -> str:
    """The message of an error in one line, without stacks and addresses in it."""
    first = re.split(r"\nTraceback|\nStack trace", str(error))[0]
    named = re.sub(r"<([\w.]+) object at 0x[0-9a-f]+>", r"\1", first)
    line = " ".join(named.split()) or "no message"
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ..."


def _declared(task, split) -> str:
    try:
        splits = seqio.get_mixture_or_task(task).splits
    except Exception:  # the task declares none, or its source does not know
        return ""
    return "" if split in splits else f" (it declares {', '.join(sorted(splits))})"
