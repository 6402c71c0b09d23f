"""Stops analysis runs at random moments, resumes them, compares the results bit for bit.

    python scripts/torture.py --kills 60 --seed 0 --json docs/benchmarks/torture.json

Trains nothing: checkpoints of a tiny standalone T5 at initial parameters are made first.
Each run is a process of its own, or two processes of two devices each. A third of the
stops are SIGKILL at a random time of the run, a third SIGKILL while a measurement saves
its state, recognized by its temporary files, and a third SIGTERM, which lets it save. Of
two processes one is stopped, and the other must end, too. The status is 0 if every run
ended with the numbers and arrays of the same run without stops, each SIGTERM gave the
exit status of a stopped run, and no process was left.

The processes are forked from this one, which has imported everything and has started
neither JAX nor TensorFlow: a start then takes seconds.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time
import traceback

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_fwdloss import analysis, tasks
from t5x_fwdloss.analysis import preemption
from t5x_fwdloss.standalone import analyze, checkpoints, data, network
from t5x_fwdloss.standalone.model import StandaloneModel

# A measurement that is killed more often than this is allowed to finish.
MAX_KILLS = 6
# Of LossComparison: no two runs take the same time.
UNEQUAL = ("time", "memory", "seconds")
LANCZOS = {"max_steps": 14, "tolerance": 1e-9}
PROBES = {"num_probes": 8, "block_size": 2}

RUNS = {
    "eigenpairs": lambda: [
        analysis.Eigenpairs(
            num_largest=2, num_smallest=1, save_eigenvectors=True, **LANCZOS
        ),
        analysis.DirectionalDerivatives(
            num_random=1, num_points=2, eigenvectors_of="hessian_eigenpairs"
        ),
    ],
    "other eigenpairs": lambda: [
        analysis.Eigenpairs(
            matrix="gauss_newton", num_largest=2, max_basis=8, **LANCZOS
        ),
        analysis.Eigenpairs(matrix="fisher", num_largest=1, **LANCZOS),
    ],
    "subspaces": lambda: [
        analysis.Trace(name="xtrace", estimator="xtrace", **PROBES),
        analysis.Trace(name="hutchpp", estimator="hutch++", sketch_size=3, **PROBES),
    ],
    "traces": lambda: [
        analysis.Trace(matrix="sampled_fisher", **PROBES),
        analysis.Trace(matrix="fisher", **PROBES),
        analysis.Trace(matrix="empirical_fisher", **PROBES),
        analysis.Trace(matrix="gauss_newton", **PROBES),
    ],
    "densities": lambda: [
        analysis.SpectralDensity(num_probes=2, num_steps=6),
        analysis.SpectralDensity(matrix="gauss_newton", num_probes=2, num_steps=4),
    ],
    "by parameter": lambda: [
        analysis.GroupTraces(**PROBES),
        analysis.GroupTraces(matrix="gauss_newton", **PROBES),
        analysis.Diagonal(**PROBES),
    ],
    "losses": lambda: [analysis.LossComparison(), analysis.Trace(**PROBES)],
    "points": lambda: [
        analysis.Landscape(num_points=3),
        analysis.NewtonStep(max_steps=6, tolerance=1e-9),
    ],
    "by group": lambda: [
        analysis.GroupDensities(
            groups={"encoder": "encoder/.*", "decoder": "decoder/.*"},
            num_probes=2,
            num_steps=3,
        ),
        analysis.GradientNoiseScale(),
    ],
    "sweep": lambda: [
        analysis.Eigenpairs(num_largest=1, num_smallest=0, **LANCZOS),
        analysis.Trace(**PROBES),
    ],
    "two processes": lambda: [
        analysis.Eigenpairs(num_largest=1, num_smallest=0, **LANCZOS),
        analysis.SpectralDensity(num_probes=2, num_steps=4),
    ],
}
SWEEP_STEPS = (1, 2, 3)
# The other process after one was killed: JAX ends it so long after the last heartbeat.
HEARTBEAT_SECONDS = 10
PATIENCE = 90.0


def model() -> StandaloneModel:
    """A T5 of one layer and width 8."""
    config = network.T5Config(
        vocab_size=384,
        emb_dim=8,
        num_heads=1,
        head_dim=8,
        num_encoder_layers=1,
        num_decoder_layers=1,
        mlp_dim=8,
        dtype="float32",
    )
    return StandaloneModel(
        network.Transformer(config),
        loss_impl="custom_jvp",
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
    )


DATASET = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 8, "targets": 8}, 4)


def make_checkpoints(folder) -> int:
    """Writes a checkpoint of other initial parameters for each step of the sweep."""
    batch = data.fixed_batches(DATASET, "validation", 1)[0]
    initialized = jax.jit(model().get_initial_params)
    manager = checkpoints.open_manager(str(folder))
    for step in SWEEP_STEPS:
        checkpoints.save(manager, step, initialized(jax.random.key(step), batch), ())
    manager.close()
    return 0


def run(checkpoint, folder, name) -> int:
    """One analysis, to its end: of the latest checkpoint, or of all of a sweep."""
    return analyze.analyze(
        model=model(),
        dataset=DATASET,
        checkpoint_path=str(checkpoint),
        checkpoint_steps="all" if name == "sweep" else None,
        output_dir=str(folder),
        measurements=RUNS[name](),
        num_batches=2,
        save_seconds=0,
    )


def run_together(checkpoint, folder, name, port, index) -> int:
    """One process of two, of an analysis on a mesh of 2 x 2 devices."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", 2, index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    mesh = Mesh(np.reshape(jax.devices(), (2, 2)), ("data", "model"))

    def placed(tree, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(
                np.shape(x), sharding, np.asarray(x).__getitem__
            ),
            tree,
        )

    batches = data.fixed_batches(DATASET, "validation", 2)
    like = jax.eval_shape(model().get_initial_params, jax.random.key(0), batches[0])
    step, params = checkpoints.restore_params(str(checkpoint), like)
    return analysis.run_analysis(
        analysis.Objective.from_model(model(), [placed(x, "data") for x in batches]),
        placed(params),
        measurements=RUNS[name](),
        output_dir=str(folder),
        host=analysis.HostInfo(checkpoint=str(checkpoint), step=step, mesh=mesh),
        save_seconds=0,
    )


def launch(checkpoint, folder, name, log) -> list[int]:
    """The ids of the processes of a run, one or two."""
    if name != "two processes":
        return [start(run, checkpoint, folder, name, log=log)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        start(run_together, checkpoint, folder, name, port, index, log=log)
        for index in (0, 1)
    ]


def start(function, *args, log) -> int:
    """Forks a process that calls the function, and returns its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with open(log, "a") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        status = function(*args)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(processes, until=lambda: False) -> list[int] | None:
    """The exit statuses of processes, or None as soon as `until` says so."""
    statuses: dict[int, int] = {}
    while True:
        for process in processes:
            if process not in statuses:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    statuses[process] = os.waitstatus_to_exitcode(status)
        if len(statuses) == len(processes):
            return [statuses[process] for process in processes]
        # The other process waits for one that has ended: the end of both is near.
        if not statuses and until():
            return None
        time.sleep(0.0003)


def stop(processes, number, rng) -> tuple[list[int], float, bool]:
    """Sends a signal to one of the processes.

    Returns:
        The exit statuses, the seconds until all had ended, and whether one did not end
        by itself.
    """
    begun = time.monotonic()
    os.kill(rng.choice(processes), number)
    statuses, hung = {}, False
    while len(statuses) < len(processes):
        for process in set(processes) - set(statuses):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                statuses[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - begun > PATIENCE and not hung:
            hung = True
            for process in set(processes) - set(statuses):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
    seconds = time.monotonic() - begun
    return [statuses[x] for x in processes], seconds, hung


def owner(folder) -> list[str]:
    """The starts of the runs that hold the folder, or those of a sweep."""
    found = []
    for path in sorted(folder.glob("**/unfinished/run.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text())["owner"])
    return found


def being_written(folder) -> list[str]:
    """The partially written files at this moment."""
    found = []
    for path, folders, names in os.walk(folder):
        parts = [x for x in names if x.endswith(".part")]
        parts += [x for x in folders if "orbax-checkpoint-tmp" in x]
        found += [os.path.relpath(os.path.join(path, x), folder) for x in parts]
    return sorted(found)


def saved_states(folder) -> list[str]:
    """The measurements with an intermediate state."""
    return sorted(x.stem for x in folder.glob("**/unfinished/*.state"))


@dataclasses.dataclass
class Killer:
    """Decides when to kill a run.

    Attributes:
        folder: the run's folder.
        rng: random generator.
        seconds: duration of the run without kills.
    """

    folder: pathlib.Path
    rng: random.Random
    seconds: float

    def __post_init__(self):
        """Draws the moment."""
        self.mode = self.rng.choice(("anywhere", "saving", "told"))
        self._before = owner(self.folder)
        self._begun = None
        self._after = self.rng.uniform(0.0, self.seconds)
        self._sightings = self.rng.randint(1, 8)
        self._last: list[str] = []
        self._lag = self.rng.uniform(0.0, 0.01)

    def now(self) -> bool:
        """Whether the moment has come."""
        if self._begun is None:
            if owner(self.folder) in ([], self._before):
                return False
            self._begun = time.monotonic()
        if self.mode != "saving":
            return time.monotonic() - self._begun > self._after
        seen = [x for x in being_written(self.folder) if ".state" in x]
        if seen and seen != self._last:
            self._sightings -= 1
        self._last = seen
        if self._sightings <= 0 and seen:
            time.sleep(self._lag)
            return True
        return False


def outcome(folder) -> dict:
    """Every number and array of a finished run, or of all steps of a sweep."""
    found = {}
    for results in sorted(folder.glob("**/results.json")):
        here = results.parent
        place = here.relative_to(folder)
        for entry in json.loads(results.read_text())["measurements"]:
            for name, number in entry["results"].items():
                if not any(word in name for word in UNEQUAL):
                    found[f"{place}/{entry['name']}/{name}"] = number
        for path in sorted(here.glob("*.npz")):
            with np.load(path) as arrays:
                for name in arrays.files:
                    if not any(word in name for word in UNEQUAL):
                        key = f"{place}/{path.stem}/{name}"
                        found[key] = arrays[name].tobytes().hex()
    return found


def torture(work, kills, seed) -> dict:
    """Stops runs until `kills` stops have fallen; returns the record of all of them."""
    rng, log = random.Random(seed), work / "log"
    checkpoint = work / "model"
    assert wait([start(make_checkpoints, checkpoint, log=log)]) == [0], log.read_text()
    whole, seconds = {}, {}
    for name in RUNS:
        folder = work / "whole" / name
        processes = launch(checkpoint, folder, name, log)
        begun = time.monotonic()
        statuses = wait(processes)
        # Later runs find these compilations in the cache.
        seconds[name] = (time.monotonic() - begun) / 2
        assert set(statuses) == {0}, log.read_text()[-3000:]
        whole[name] = outcome(folder)
        assert whole[name]
        sys.stderr.write(f"{name}: {seconds[name]:.0f} s\n")
    record, ends, number = [], [], 0
    while len(record) < kills:
        name = list(RUNS)[number % len(RUNS)]
        folder, here, ended = work / f"{number}", 0, False
        number += 1
        while not ended:
            killer = Killer(folder, rng, seconds[name])
            processes = launch(checkpoint, folder, name, log)
            spared = here >= MAX_KILLS or len(record) >= kills
            statuses = wait(processes, (lambda: False) if spared else killer.now)
            if statuses is not None:
                break
            sent = signal.SIGTERM if killer.mode == "told" else signal.SIGKILL
            statuses, took, hung = stop(processes, sent, rng)
            ended = set(statuses) == {0}  # the signal came after the end
            if ended:
                break
            here += 1
            told_right = sent == signal.SIGKILL or set(statuses) == {preemption.STATUS}
            record.append(
                {
                    "run": name,
                    "folder": number - 1,
                    "mode": killer.mode,
                    "statuses": statuses,
                    "seconds_to_end": round(took, 2),
                    "as_it_should": told_right and not hung,
                    "states": saved_states(folder),
                    "being_written": being_written(folder),
                }
            )
            sys.stderr.write(f"{json.dumps(record[-1])}\n")
        same = set(statuses) == {0} and outcome(folder) == whole[name]
        clean = not list(folder.glob("**/unfinished")) and not being_written(folder)
        ends.append(
            {
                "run": name,
                "kills": here,
                "statuses": statuses,
                "same": same,
                "clean": clean,
            }
        )
        sys.stderr.write(f"{json.dumps(ends[-1])}\n")
    told = [x["seconds_to_end"] for x in record if x["mode"] == "told"]
    return {
        "kills": len(record),
        "kills_by_mode": collections.Counter(x["mode"] for x in record),
        "kills_while_saving": sum(
            any(".state" in x for x in kill["being_written"]) for kill in record
        ),
        "kills_by_measurement": collections.Counter(
            state for kill in record for state in kill["states"]
        ),
        "kills_by_run": collections.Counter(kill["run"] for kill in record),
        "longest_seconds_after_sigterm": max(told, default=None),
        "all_same": all(end["same"] and end["clean"] for end in ends)
        and all(kill["as_it_should"] for kill in record),
        "seconds_of_a_run": {k: round(v, 1) for k, v in seconds.items()},
        "ends": ends,
        "record": record,
    }


def main() -> int:
    """Reads the flags, tortures, writes the record."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--kills", type=int, default=40)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--work", type=pathlib.Path)
    flags.add_argument("--json", type=pathlib.Path)
    given = flags.parse_args()
    work = given.work or pathlib.Path(tempfile.mkdtemp(prefix="torture"))
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(work / "cache"))
    jax.config.update(
        "jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"]
    )
    report = torture(work.resolve(), given.kills, given.seed)
    text = json.dumps(report, indent=1) + "\n"
    if given.json:
        given.json.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0 if report["all_same"] else 1


if __name__ == "__main__":
    sys.exit(main())
