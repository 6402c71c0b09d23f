"""A sweep: the same measurements at several checkpoints of one training run.

Each checkpoint is an analysis run of its own, in `step_<n>`, whose results are those of
a single run of that checkpoint, bit for bit. All share one objective, so that the first
checkpoint compiles and the others do not. After each, the sweep's own files are written:
`sweep.json` with every number over steps, `report.html` with the curves, and TensorBoard
events. Eigenvectors are kept in `vectors` until the next checkpoint has been compared
with them.
"""

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jaxtyping import PyTree

from t5x_fwdloss.analysis import measurement_list, preemption
from t5x_fwdloss.analysis import optimizer as optimizer_lib
from t5x_fwdloss.analysis import settings as settings_lib
from t5x_fwdloss.analysis.measurements.context import SAVE_SECONDS
from t5x_fwdloss.analysis.numbers import to_json
from t5x_fwdloss.analysis.objective.finite import NonFiniteLossError
from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.objective.preflight import PreflightError
from t5x_fwdloss.analysis.report import events
from t5x_fwdloss.analysis.report.terminal import print_line
from t5x_fwdloss.analysis.run import HostInfo, run_analysis
from t5x_fwdloss.analysis.store import (
    files,
    identity,
    lock,
    multihost,
    records,
)
from t5x_fwdloss.analysis.store.folder import RunFolder
from t5x_fwdloss.analysis.sweep import curves as sweep_curves
from t5x_fwdloss.analysis.sweep import page as sweep_page
from t5x_fwdloss.analysis.sweep import steps as checkpoint_steps
from t5x_fwdloss.analysis.sweep.eigenspaces import Neighbors
from t5x_fwdloss.curvature.vectors import freed_memory

# Counted up where the members of sweep.json change.
SCHEMA_VERSION = 1
POLL_SECONDS = 30
# Path of a checkpoint to its parameters and the host's information about it.
Load = Callable[[str], tuple[PyTree, HostInfo]]


def run_sweep(
    objective: Objective,
    load: Load,
    *,
    measurements: Sequence[Any],
    model_dir: settings_lib.Path,
    steps: checkpoint_steps.CheckpointSteps,
    output_dir: settings_lib.Path,
    seed: settings_lib.Seed = 0,
    memory_budget: settings_lib.Bytes | None = None,
    fold: bool = True,
    save_seconds: settings_lib.Count = SAVE_SECONDS,
    device_memory: settings_lib.Bytes | None = None,
    learning_rate: optimizer_lib.LearningRate | None = None,
    follow_until: settings_lib.Count | None = None,
    is_primary: bool | None = None,
    poll_seconds: settings_lib.Positive = POLL_SECONDS,
) -> int:
    """Measure the checkpoints of a training run, each resumable, and draw the curves.

    A step that has finished is neither restored nor measured again where its checkpoint
    has the time of writing that the sweep recorded, and no measurement needs the
    optimizer; otherwise it is restored, and its parameters compared with the recorded
    checksum.

    Args:
        objective: the loss over the fixed list of batches.
        load: restores a checkpoint.
        measurements: what to measure, in order.
        model_dir: the folder with `checkpoint_<step>`.
        steps: 'all', 'every N', or a list of steps.
        output_dir: a new or empty folder, or that of this same sweep, which resumes.
        seed: as of `run_analysis`.
        memory_budget: as of `run_analysis`.
        fold: as of `run_analysis`.
        save_seconds: as of `run_analysis`.
        device_memory: as of `run_analysis`.
        learning_rate: the training's learning rate or its schedule.
        follow_until: wait for further checkpoints until one of this step is there; None:
            measure those that are there.
        is_primary: whether this process writes; by default JAX's process 0.
        poll_seconds: seconds between two looks for new checkpoints.

    Invalid input raises `ValueError`; where no checkpoint could be measured, the error of
    the first is raised.

    Returns:
        0; 1 where a measurement or a checkpoint failed, which does not stop the others;
        143 where SIGTERM stopped the sweep: the same call resumes it.
    """
    measurement_list.check("measurements", measurements)
    settings_lib.check_arguments(run_sweep, locals())
    primary = jax.process_index() == 0 if is_primary is None else is_primary
    checkpoint_steps.check(
        model_dir,
        steps,
        follow=follow_until is not None,
        train_steps=follow_until,
        output_dir=output_dir,
    )

    def analyze(path: str, folder: Any, vectors: Any) -> tuple[PyTree, int]:
        try:
            params, host = load(path)
        except ValueError as error:  # of this checkpoint; the others may be whole
            raise files.StorageError(str(error)) from error
        status = run_analysis(
            objective,
            params,
            measurements=measurements,
            output_dir=folder,
            seed=seed,
            host=host,
            memory_budget=memory_budget,
            fold=fold,
            save_seconds=save_seconds,
            device_memory=device_memory,
            eigenvectors_dir=vectors,
        )
        return params, status

    model_dir = os.fspath(files.user_path(model_dir))
    shared = to_json(
        identity.of_settings(
            objective,
            measurements,
            seed=seed,
            checkpoint=model_dir,
            step=None,
            other_checkpoints={},
        )
    )
    sweep = _Sweep(
        analyze, measurements, shared, output_dir, primary, steps, learning_rate
    )
    with preemption.listening(), sweep.claimed():
        return sweep.run(follow_until, poll_seconds)


class _Sweep:
    """The state of one sweep: what is known of each of its steps."""

    def __init__(
        self, analyze, measurements, identity_, output_dir, primary, steps, rate
    ):
        self._analyze, self._measurements = analyze, measurements
        self._identity, self._chosen, self._rate = identity_, steps, rate
        self._path, self._primary = files.user_path(output_dir), primary
        self._paths: dict[int, str] = {}
        self._documents: dict[int, dict[str, Any]] = {}
        self._failures: dict[int, Exception] = {}
        self._times: dict[int, int | None] = {}
        self._recorded_times: dict[int, int | None] = {}
        self._neighbors = Neighbors(measurements, self._path, is_primary=primary)
        self._ended = False

    @contextlib.contextmanager
    def claimed(self):
        """Hold the folder for this sweep alone, to begin or to resume."""
        with contextlib.ExitStack() as stack:

            def claim():
                self._check_folder()
                with files.writing(self._path):
                    self._path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.held(self._path / "sweep.lock", self._path))
                files.remove_parts(self._path)
                return self._recorded()

            found = multihost.from_primary_doing(self._primary, claim)
            self._restore(found)
            if found is None:
                self._write()
            yield

    def run(self, follow_until: int | None, poll_seconds: int) -> int:
        """Measure step after step, and wait for more where asked; the exit status."""
        known: set[int] = set()
        while True:
            self._look(follow_until)
            # All at once, so that the files never lack what was finished before.
            for step in self._steps():
                if step not in known and self._is_finished(step):
                    known.add(step)
            for step in self._steps():
                if step in known:
                    continue
                if preemption.told() or self._measure(step) == preemption.STATUS:
                    return self._stopped()
                known.add(step)
                self._write()
            if follow_until is None or self._complete(follow_until):
                break
            if not _wait(poll_seconds):
                return self._stopped()
        return self._finish()

    def _look(self, follow_until) -> None:
        model_dir = self._identity["checkpoint"]

        def look():
            found = checkpoint_steps.find(model_dir)
            done = checkpoint_steps.finished(self._path)
            lost = {n: f"{model_dir}/checkpoint_{n}" for n in done if n not in found}
            return sorted((found | lost).items())

        found = dict(multihost.from_primary_doing(self._primary, look))
        last = math.inf if follow_until is None else follow_until
        self._paths = {step: path for step, path in found.items() if step <= last}

    def _steps(self) -> list[int]:
        return checkpoint_steps.select(self._chosen, list(self._paths))

    def _complete(self, follow_until: int) -> bool:
        if not isinstance(self._chosen, str):
            return set(self._chosen) <= set(self._steps())
        return max(self._paths, default=-1) >= follow_until

    def _measure(self, step: int) -> int:
        path, folder = self._paths[step], self._path / f"step_{step}"
        time_of = self._time(step)
        try:
            params, status = self._analyze(path, folder, self._neighbors.vectors(step))
            if status == preemption.STATUS:
                return status
            self._documents[step] = self._document(folder)
            self._neighbors.compare(step, self._documents, params)
            del params
        except (files.StorageError, NonFiniteLossError, PreflightError) as error:
            logging.error("Step %d was not measured: %s", step, error)
            self._failures[step] = error
            status = 1
        gc.collect()
        freed_memory.give_back()
        self._times[step] = time_of
        return status

    def _time(self, step: int) -> int | None:
        """When the checkpoint was written, if it is there and its storage says so."""
        return multihost.from_primary_doing(
            self._primary, lambda: checkpoint_steps.time_of(self._paths[step])
        )

    def _is_finished(self, step: int) -> bool:
        """Whether the step has the results of this sweep; reads them, restores nothing."""
        folder = RunFolder(self._path / f"step_{step}", self._primary)
        document = folder.document()
        if document is None:
            return False
        exists = multihost.from_primary_doing(
            self._primary, lambda: self._paths[step] in _values(self._on_disk())
        )
        wanted = self._identity | {"checkpoint": self._paths[step], "step": step}
        recorded = self._recorded_times.get(step)
        time_of = self._time(step)
        unchanged = time_of is not None and time_of == recorded
        if exists and (not unchanged or _needs_optimizer(self._measurements)):
            return False
        if identity.differences(document["fingerprint"], wanted):
            return False
        self._documents[step] = document
        logging.info("Step %d was finished before: nothing restored.", step)
        return True

    def _on_disk(self):
        return checkpoint_steps.find(self._identity["checkpoint"])

    def _document(self, folder) -> dict[str, Any]:
        path = RunFolder(folder, self._primary).results_path
        return multihost.from_primary_doing(self._primary, lambda: records.read(path))

    def _document_of_sweep(self) -> dict[str, Any]:
        steps = self._steps()
        states = {n: self._state(n) for n in steps}
        failed = "failed" in states.values()
        status = ("failed" if failed else "finished") if self._ended else "unfinished"
        return {
            "schema_version": SCHEMA_VERSION,
            "status": status,
            "fingerprint": self._identity,
            "steps": [
                {
                    "step": n,
                    "checkpoint": self._paths[n],
                    "checkpoint_time": self._times.get(n, self._recorded_times.get(n)),
                    "folder": f"step_{n}",
                    "status": states[n],
                    "reason": _reason(self._failures.get(n)),
                    "learning_rate": optimizer_lib.at_step(self._rate, n),
                }
                for n in steps
            ],
            "measurements": sweep_curves.curves(
                {n: self._documents[n] for n in steps if n in self._documents}
            ),
            "neighbors": self._neighbors.entries(steps, self._documents),
            "notes": list(self._neighbors.notes),
        }

    def _state(self, step: int) -> str:
        if step in self._failures:
            return "failed"
        return self._documents.get(step, {"status": "pending"})["status"]

    def _write(self) -> None:
        """The sweep's own files, `sweep.json` last."""

        def write():
            document = self._document_of_sweep()
            page = sweep_page.render(document, self._documents)
            files.write_bytes(self._path / "report.html", page.encode())
            events.write(
                self._path / "tensorboard",
                sweep_curves.scalars(self._documents, document["neighbors"]),
            )
            records.write(self._path / "sweep.json", document)

        multihost.from_primary_doing(self._primary, write)

    def _check_folder(self) -> None:
        with files.reading(self._path):
            names = (
                {x.name for x in self._path.iterdir()} if self._path.is_dir() else set()
            )
        first = {".sweep.json.part", ".report.html.part", "report.html", "sweep.lock"}
        if "sweep.json" not in names and names - first - {"tensorboard"}:
            raise ValueError(
                "ANALYSIS_OUTPUT_DIR must be new or empty, or hold this same sweep: "
                f"{self._path} holds {', '.join(sorted(names)[:5])} and no sweep.json."
            )
        if not self._path.is_dir() and self._path.exists():
            raise ValueError(
                f"ANALYSIS_OUTPUT_DIR must be a folder: {self._path} is a file."
            )

    def _recorded(self) -> dict[str, Any] | None:
        path = self._path / "sweep.json"
        with files.reading(path):
            if not path.exists():
                return None
        found = records.read(path)
        records.check_schema(path, found, SCHEMA_VERSION)
        names = identity.differences(found["fingerprint"], self._identity)
        if names:
            raise ValueError(
                "ANALYSIS_OUTPUT_DIR must be new or empty, or hold this same sweep: "
                f"{self._path} holds another one, which differs in {', '.join(names)}."
            )
        return found

    def _restore(self, found: dict[str, Any] | None) -> None:
        if found is None:
            return
        for x in found["steps"]:
            self._recorded_times[x["step"]] = x["checkpoint_time"]
        self._neighbors.restore(found)

    def _stopped(self) -> int:
        logging.error(
            "Stopped by SIGTERM: what was measured is saved in %s; start the same "
            "command again to resume.",
            self._path,
        )
        return preemption.STATUS

    def _finish(self) -> int:
        if self._failures and not self._documents:
            raise next(iter(self._failures.values()))
        self._ended = True
        self._write()
        states = {n: self._state(n) for n in self._steps()}
        self._neighbors.forget_vectors()
        if self._primary:
            print_line(f"Sweep over {len(states)} steps: {self._path / 'report.html'}")
        return int("failed" in states.values())


def _reason(error: Exception | None) -> str | None:
    return None if error is None else str(error)


def _values(found: dict[int, str]) -> set[str]:
    return set(found.values())


def _needs_optimizer(measurements) -> bool:
    return any(measurement.optimizer_setting for measurement in measurements)


def _wait(seconds: int) -> bool:
    """Whether the time passed without a signal to stop."""
    for _ in range(seconds):
        if preemption.told():
            return False
        time.sleep(1)
    return not preemption.told()
