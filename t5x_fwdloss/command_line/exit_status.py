"""The end of a command: its exit status, and one sentence if its input was rejected.

An input that this package or gin rejects gives one sentence on standard error and
status 1, without a trace; `--verbosity=1` shows the trace. An unforeseen exception is
raised unchanged.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from absl import logging

from t5x_fwdloss.command_line import gin_sentences, orbax_leftovers

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def exit_status(
    name: str, configure: Callable[[], Callable[[], Any]], function: Callable[..., Any]
) -> int:
    """Configures a function, calls it, and reports an error in one sentence.

    Args:
        name: name of the command, with which the sentence begins.
        configure: reads the configuration; returns the call of `function`.
        function: the command's function; errors before its call are gin's.

    Returns:
        The function's result if that is an integer, else 0; 1 after a rejected input;
        130 after Ctrl-C.
    """
    orbax_leftovers.keep_quiet()
    try:
        result = configure()()
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        _say(name, "interrupted; start the same command again to resume.")
        return INTERRUPTED
    except Exception as error:
        words = _refusal(error, inspect.unwrap(function))
        if words is None:
            raise
        logging.debug("The command was rejected.", exc_info=error)
        _say(name, words)
        return 1


def _refusal(error: Exception, function: Callable[..., Any]) -> str | None:
    if gin_sentences.raised_by_package(error):
        return gin_sentences.own_words(error)
    if gin_sentences.entered(error, function):
        return None
    return gin_sentences.sentence(error)


def _say(name: str, words: str) -> None:
    # One line, even if the user's values have line breaks.
    sys.stderr.write(f"{name}: {' '.join(words.split())}\n")
