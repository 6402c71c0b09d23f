"""A user's project in a directory of its own, and the runs that several tests share."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading

import pytest

# A user's network: T5X's own classes, small enough to compile in seconds.
NETWORK = """
from __gin__ import dynamic_registration
from t5x.examples.t5 import network
network.T5Config:
  emb_dim = 16
  num_heads = 8
  head_dim = 2
  num_encoder_layers = 1
  num_decoder_layers = 1
  mlp_dim = 16
TASK_FEATURE_LENGTHS = {'inputs': 16, 'targets': 32}
"""
# A user's training run: stock T5X and nothing of ours but the example's data.
TRAIN = """
from __gin__ import dynamic_registration
include 't5x_fwdloss/configs/examples/cmudict_train.gin'
include 'my_network.gin'
import __main__ as train_script
from t5x import utils
TRAIN_STEPS = 50
BATCH_SIZE = 8
DROPOUT_RATE = 0.1
train_script.train:
  eval_period = 50
  eval_steps = 2
  stats_period = 1  # the loss of every step
utils.SaveCheckpointConfig.period = 50
"""
LOSSES = "t5x_fwdloss/configs/losses"
CURVATURE = "t5x_fwdloss/configs/training/curvature.gin"
FORWARD = "t5x_fwdloss/configs/training/forward_gradient.gin"


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that ended."""

    status: int
    log: str

    @property
    def says(self) -> str:
        """The output without time stamps of log lines and the like."""
        kept = [
            line
            for line in self.log.splitlines()
            if not re.match(r"[IWE]\d{4} |WARNING: All log", line)
        ]
        return "\n".join(kept)


class Forks:
    """The process of `forks.py`, started when it is first needed; safe in threads."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._process = None
        self._lock = threading.Lock()
        self._finished: dict[int, queue.Queue] = {}

    def run(self, directory, module, argv, env) -> Finished:
        with self._lock:
            if self._process is None:
                self._start()
            number = len(self._finished)
            ended = self._finished[number] = queue.Queue()
            log = directory / f"log_{number}.txt"
            job = {"module": module, "argv": argv, "env": env, "log": str(log)}
            self._process.stdin.write(json.dumps(job | {"id": number}) + "\n")
            self._process.stdin.flush()
        return Finished(ended.get(), log.read_text())

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, pathlib.Path(__file__).with_name("forks.py")],
            cwd=self._directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            number, status = map(int, line.split())
            self._finished[number].put(status)
        for ended in self._finished.values():
            ended.put(-1)  # the process died: nobody waits for ever

    def close(self):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()


class Project:
    """A user's directory, and T5X's commands run in it."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.forks = Forks(path)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def command(self, module: str, *argv: str, **env: str) -> Finished:
        """`python -m module argv`, the real command, in this directory."""
        done = subprocess.run(
            [sys.executable, "-m", module, *argv],
            cwd=self.path,
            env=os.environ | env,
            capture_output=True,
            text=True,
            check=False,
        )
        return Finished(done.returncode, done.stdout + done.stderr)

    def run(self, module: str, *argv: str, **env: str) -> Finished:
        """The same in a fork of a process that has imported T5X already."""
        return self.forks.run(self.path, module, argv, env)

    def train_arguments(self, model_dir: str, *more: str) -> list[str]:
        return [
            "--run_mode=train",
            "--gin_file=my_run.gin",
            *more,
            f"--gin.MODEL_DIR='{self.path / model_dir}'",
        ]

    def losses(self, model_dir: str, tag: str = "loss", collection: str = "train"):
        """The scalars of a run by step, from its TensorBoard events."""
        import tensorflow as tf

        found = {}
        for file in sorted((self.path / model_dir / collection).glob("events*")):
            for event in tf.compat.v1.train.summary_iterator(str(file)):
                for value in event.summary.value:
                    if value.tag == tag:
                        found[event.step] = float(tf.make_ndarray(value.tensor))
        return found


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    found = Project(tmp_path_factory.mktemp("project"))
    found.write("my_network.gin", NETWORK)
    found.write("my_run.gin", TRAIN)
    yield found
    found.forks.close()


@pytest.fixture(scope="session")
def stock_run(project):
    """50 steps of the user's configuration with T5X's own loss, by the real command."""
    done = project.command("t5x.main", *project.train_arguments("stock"))
    assert done.status == 0, done.log[-3000:]
    return done


@pytest.fixture(scope="session")
def trained(project, stock_run):
    """The same with each of our losses, and with probes; two runs at a time.

    custom_vjp by the real command, the others in forks.
    """
    jvp, chunked = f"{LOSSES}/custom_jvp.gin", f"{LOSSES}/chunked.gin"
    runs = {
        "custom_vjp": (project.command, f"--gin_file={LOSSES}/custom_vjp.gin"),
        "custom_jvp": (project.run, f"--gin_file={jvp}"),
        "autodiff": (project.run, f"--gin_file={jvp}", "--gin.LOSS_IMPL='autodiff'"),
        "chunked": (
            project.run,
            f"--gin_file={chunked}",
            "--gin.LOSS_CHUNK_LENGTH=10",
        ),
        "probed": (
            project.run,
            f"--gin_file={jvp}",
            f"--gin_file={CURVATURE}",
            "--gin.CURVATURE_PERIOD=20",
            "--gin.CURVATURE_EIGENVALUE_PRODUCTS=2",
            "--gin.PROBE_MIXTURE=%MIXTURE_OR_TASK_NAME",
        ),
    }

    def start(name):
        run, *more = runs[name]
        return run("t5x.main", *project.train_arguments(name, *more))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = dict(zip(runs, pool.map(start, runs), strict=True))
    return found | {"stock": stock_run}


@pytest.fixture(scope="session")
def checkpoint(project, stock_run):
    """The last checkpoint of the stock run, which is all that other tests need."""
    return str(project.path / "stock" / "checkpoint_50")
