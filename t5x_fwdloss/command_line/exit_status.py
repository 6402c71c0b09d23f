"""How a command ends: its exit status, and one sentence where it was refused.

What this package refuses, and what gin refuses, is one sentence on standard error and
status 1, without a trace; `--verbosity=1` shows the trace. An exception that nobody
foresaw is raised as it is.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from absl import logging

from t5x_fwdloss.command_line import gin_sentences, orbax_leftovers

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def exit_status(
    name: str, configure: Callable[[], Callable[[], Any]], function: Callable[..., Any]
) -> int:
    """Configures a function, calls it, and says in a sentence what went wrong.

    Args:
        name: name of the command, which the sentence begins with.
        configure: reads the configuration; returns the call of `function`.
        function: what the command is for; errors on the way to it are gin's.

    Returns:
        What the function returns where that is an integer, else 0; 1 after a refusal;
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
        logging.debug("The command was refused.", exc_info=error)
        _say(name, words)
        return 1


def _refusal(error: Exception, function: Callable[..., Any]) -> str | None:
    if gin_sentences.raised_by_package(error):
        return gin_sentences.own_words(error)
    if gin_sentences.entered(error, function):
        return None
    return gin_sentences.sentence(error)


def _say(name: str, words: str) -> None:
    # One line, whatever the user's values in it hold.
    sys.stderr.write(f"{name}: {' '.join(words.split())}\n")
