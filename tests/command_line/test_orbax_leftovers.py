"""What Orbax leaves behind a failed read is not printed; every other error is."""

import subprocess
import sys

PROGRAM = """
import sys
from absl import logging
from t5x_fwdloss.command_line import orbax_leftovers

orbax_leftovers.keep_quiet()
orbax_leftovers.keep_quiet()

class Broken:
    def __init__(self, error): self.error = error
    def __del__(self): raise self.error

Broken(RuntimeError("Event loop is closed"))
Broken(RuntimeError("a real one"))
def log(path):
    try:
        raise OSError("a stack of a thread")
    except OSError:
        exec(compile("logging.exception('from %s', " + repr(path) + ")", path, "exec"))

log("site-packages/orbax/future.py")
log("site-packages/other/future.py")
sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
raise ValueError("the last")
"""


def test_only_errors_of_a_closed_loop_and_stacks_of_orbax_are_left_out():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Event loop is closed" not in done.stderr
    assert "a real one" in done.stderr
    assert "from site-packages/other" in done.stderr
    assert "from site-packages/orbax" not in done.stderr
    assert done.stderr.strip().splitlines()[-1] == "ValueError: the last"
