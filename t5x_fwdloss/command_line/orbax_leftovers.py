"""The output of Orbax and TensorStore after a failure, besides the error itself.

Threads that write log the stack of their errors. Reads of other arrays continue for a
moment after Orbax has closed their event loop. Each then prints its own stack, or is
found unfinished by garbage collection. None of it says more than the raised error.
"""

import inspect
import logging
import sys


def keep_quiet() -> None:
    """Keeps this out of the process's output; other errors are printed as before."""
    if sys.excepthook.__module__ == __name__:
        return
    show, show_unraisable = sys.excepthook, sys.unraisablehook

    def excepthook(kind, error, tb):
        if not _of_closed_loop(error):
            show(kind, error, tb)

    def unraisablehook(found):
        if not (_of_closed_loop(found.exc_value) or _of_orbax(found.object)):
            show_unraisable(found)

    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
    # Errors of tasks whose result is not used.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # Stacks of threads that wrote or removed, whose errors are raised as well.
    logging.getLogger("absl").addFilter(_is_no_stack_of_orbax)


def _of_closed_loop(error) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def _is_no_stack_of_orbax(record) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _of_orbax(found) -> bool:
    return inspect.iscoroutine(found) and "orbax" in found.cr_code.co_filename
