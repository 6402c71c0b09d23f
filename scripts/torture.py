"""Kills analysis runs at random moments, resumes them, compares the results bit for bit.

    python scripts/torture.py --kills 40 --seed 0 --json torture.json

Trains nothing: a checkpoint of a tiny standalone T5 at its initial parameters is made
first. Each run is a process of its own, killed by SIGKILL: half of the kills fall at a
random time of the run, half while a measurement saves its state, recognized by its
temporary files. The status is 0 if every run ended with the numbers and arrays of the
same run without kills.

The processes are forked from this one, which has imported everything and has started
neither JAX nor TensorFlow: a start then takes seconds.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import numpy as np

from t5x_fwdloss import analysis, tasks
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
}


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


def make_checkpoint(folder) -> int:
    """Writes checkpoint_1 of the model's initial parameters."""
    batch = data.fixed_batches(DATASET, "validation", 1)[0]
    params = jax.jit(model().get_initial_params)(jax.random.key(0), batch)
    manager = checkpoints.open_manager(str(folder))
    checkpoints.save(manager, 1, params, ())
    manager.close()
    return 0


def run(checkpoint, folder, name) -> int:
    """One analysis run, to its end."""
    return analyze.analyze(
        model=model(),
        dataset=DATASET,
        checkpoint_path=str(checkpoint),
        output_dir=str(folder),
        measurements=RUNS[name](),
        num_batches=2,
    )


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
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(process, until=lambda: False) -> int | None:
    """The exit status of a process, or None as soon as `until` says so."""
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if until():
            return None
        time.sleep(0.0003)


def owner(folder) -> str | None:
    """The start of the run that holds the folder."""
    try:
        return json.loads((folder / "unfinished" / "run.json").read_text())["owner"]
    except (OSError, ValueError):
        return None


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
    return sorted(x.stem for x in (folder / "unfinished").glob("*.state"))


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
        self.mode = self.rng.choice(("anywhere", "saving"))
        self._before = owner(self.folder)
        self._begun = None
        self._after = self.rng.uniform(0.0, self.seconds)
        self._sightings = self.rng.randint(1, 8)
        self._last: list[str] = []
        self._lag = self.rng.uniform(0.0, 0.01)

    def now(self) -> bool:
        """Whether the moment has come."""
        if self._begun is None:
            if owner(self.folder) == self._before:
                return False
            self._begun = time.monotonic()
        if self.mode == "anywhere":
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
    """Every number and array of a finished run."""
    document = json.loads((folder / "results.json").read_text())
    found = {}
    for entry in document["measurements"]:
        for name, number in entry["results"].items():
            if not any(word in name for word in UNEQUAL):
                found[f"{entry['name']}/{name}"] = number
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            for name in arrays.files:
                if not any(word in name for word in UNEQUAL):
                    found[f"{path.stem}/{name}"] = arrays[name].tobytes().hex()
    return found


def torture(work, kills, seed) -> dict:
    """Kills until `kills` have fallen; returns the record of all of them."""
    rng, log = random.Random(seed), work / "log"
    checkpoint = work / "model"
    assert wait(start(make_checkpoint, checkpoint, log=log)) == 0, log.read_text()
    whole, seconds = {}, {}
    for name in RUNS:
        folder = work / "whole" / name
        process = start(run, checkpoint, folder, name, log=log)
        status = wait(process, lambda folder=folder: owner(folder) is not None)
        begun = time.monotonic()
        status = wait(process) if status is None else status
        # Later runs find these compilations in the cache.
        seconds[name] = (time.monotonic() - begun) / 2
        assert status == 0, log.read_text()[-3000:]
        whole[name] = outcome(folder)
        sys.stderr.write(f"{name}: {seconds[name]:.0f} s\n")
    record, ends, number = [], [], 0
    while len(record) < kills:
        name = list(RUNS)[number % len(RUNS)]
        folder, here, status = work / f"{number}", 0, None
        number += 1
        while status is None or status < 0:
            killer = Killer(folder, rng, seconds[name])
            process = start(run, checkpoint, folder, name, log=log)
            spared = here >= MAX_KILLS or len(record) >= kills
            status = wait(process, (lambda: False) if spared else killer.now)
            if status is None:
                os.kill(process, signal.SIGKILL)
                status = wait(process)
                if status != -signal.SIGKILL:
                    break  # it had finished
                here += 1
                record.append(
                    {
                        "run": name,
                        "folder": number - 1,
                        "mode": killer.mode,
                        "states": saved_states(folder),
                        "being_written": being_written(folder),
                    }
                )
                sys.stderr.write(f"{json.dumps(record[-1])}\n")
        same = status == 0 and outcome(folder) == whole[name]
        clean = not (folder / "unfinished").exists() and not being_written(folder)
        ends.append(
            {"run": name, "kills": here, "status": status, "same": same, "clean": clean}
        )
        sys.stderr.write(f"{json.dumps(ends[-1])}\n")
    return {
        "kills": len(record),
        "kills_while_saving": sum(
            any(".state" in x for x in kill["being_written"]) for kill in record
        ),
        "kills_by_measurement": collections.Counter(
            state for kill in record for state in kill["states"]
        ),
        "all_same": all(end["same"] and end["clean"] for end in ends),
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
