"""Runs `python -m MODULE ARGV` in forks of one process that has imported it all once.

Importing T5X, if it is there, takes longer than a tiny run. One JSON object per line comes in on stdin,
{"id", "module", "argv", "env", "log"}, and "id status" goes out on stdout as each ends.
JAX and
TensorFlow start their runtimes in the forks only, so that every run is a process of its
own, with its own devices, flags and gin configuration.
"""

import importlib.util
import json
import os
import runpy
import sys
import threading
import traceback

sys.path.insert(0, os.getcwd())  # as python -m does

import seqio  # noqa: F401

import t5x_fwdloss.command_line.arguments  # noqa: F401
import t5x_fwdloss.standalone.checkpoints  # noqa: F401  and not the scripts, which runpy runs
import t5x_fwdloss.standalone.model  # noqa: F401
import t5x_fwdloss.standalone.network  # noqa: F401
import t5x_fwdloss.tasks  # noqa: F401

if importlib.util.find_spec("t5x"):
    # What t5x.train, eval and infer import; not t5x.main, which defines flags.
    import t5x.eval  # noqa: F401
    import t5x.infer  # noqa: F401
    import t5x.train  # noqa: F401
    from t5x import gin_utils  # noqa: F401
    from t5x.examples.t5 import network  # noqa: F401

    import t5x_fwdloss.models  # noqa: F401


def run(job):
    """The fork's side: never returns."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["env"])
    sys.argv = [job["module"], *job["argv"]]
    status = 0
    try:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def report(child, number):
    _, status = os.waitpid(child, 0)
    os.write(1, f"{number} {os.waitstatus_to_exitcode(status)}\n".encode())


waiting = []
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        run(job)
    waiting.append(threading.Thread(target=report, args=(child, job["id"])))
    waiting[-1].start()
for thread in waiting:
    thread.join()
