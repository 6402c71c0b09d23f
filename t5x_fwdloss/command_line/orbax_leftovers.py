"""What Orbax and TensorStore print, beside the error itself, where they failed.

Threads that write log the stack of what they raise. Reads of other arrays go on for a
moment after Orbax has closed their event loop. Each then prints a stack of its own, or is
found unfinished when memory is collected. None of it says more than the error that was
raised.
"""

import inspect
import logging
import sys


def keep_quiet() -> None:
    """Leaves them out of what this process prints; other errors are printed as before."""
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
    # Errors of tasks that nobody asked for.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    # Stacks of threads that wrote or removed, whose errors are raised as well.
    logging.getLogger("absl").addFilter(_is_no_stack_of_orbax)


def _of_closed_loop(error) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


def _is_no_stack_of_orbax(record) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _of_orbax(found) -> bool:
    return inspect.iscoroutine(found) and "orbax" in found.cr_code.co_filename
