"""The output folder of one run: other runs are rejected, the same run resumes there.

A folder belongs to a run if it was new or empty when the run began. Its claim there is
`unfinished/run.json` while it runs, and the fingerprint in `results.json` once it has
ended. Finished measurements stay in `unfinished/` until all are finished, each whole or
not at all; `results.json` is written last, so that a folder that has it is complete.
Nothing in a folder of another run, or with other files, is touched.
"""

import contextlib
import dataclasses
import os
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from t5x_fwdloss.analysis.numbers import (
    MeasurementResult,
    result_from_json,
    result_to_json,
)
from t5x_fwdloss.analysis.store import files, identity, lock, multihost, records

# The format of intermediate states, to be incremented when a state gets other members.
FORMAT = 5
_CHOOSE = "Choose another ANALYSIS_OUTPUT_DIR."


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder in which one run keeps its results.

    Attributes:
        path: the output folder.
        is_primary: whether this process writes; the others only read.
        owner: an identifier of this start of the run.
    """

    path: epath.Path
    is_primary: bool
    owner: str = dataclasses.field(
        default_factory=lambda: (
            f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex[:8]})"
        )
    )

    @property
    def results_path(self) -> epath.Path:
        """The finished document."""
        return self.path / "results.json"

    @property
    def _work(self) -> epath.Path:
        return self.path / "unfinished"

    @property
    def _claim(self) -> epath.Path:
        return self._work / "run.json"

    def check(self, fingerprint: dict[str, Any]) -> None:
        """Reject a folder that this run may not write to; touches nothing.

        Another run's results, unfinished ones that another version saved, or files that
        no run of this package wrote raise `ValueError`.

        Args:
            fingerprint: the known part of the run's identity, from `identity`.
        """
        self._agreed(lambda: self._check(files.to_json(fingerprint)))

    @contextlib.contextmanager
    def claimed(self, fingerprint: dict[str, Any]) -> Iterator[None]:
        """Hold the folder for this run alone, to begin or to resume.

        A folder that `check` rejects, or that another process writes to, raises
        `ValueError`.

        Args:
            fingerprint: the run's full identity.
        """
        wanted = files.to_json(fingerprint)
        with contextlib.ExitStack() as stack:

            def claim():
                with files.writing(self._work):
                    self._work.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.held(self._work / "lock", self.path))
                # Checked again: another process may have been here since.
                self._check(wanted)
                files.remove_parts(self._work)
                files.remove_parts(self.path)
                claim = {"unfinished_format": FORMAT, "owner": self.owner}
                records.write(self._claim, wanted | claim)

            self._agreed(claim)
            yield

    def document(self) -> dict[str, Any] | None:
        """The content of `results.json` if every measurement has finished."""
        found = self._agreed(self._results)
        return found if found and found.get("status") == "finished" else None

    def clear(self) -> None:
        """Remove what a finished run left because it ended too early."""
        if not self.is_primary or not self._work.is_dir():
            return
        # Another process may be removing them, or the folder may be read-only.
        with contextlib.suppress(files.StorageError):
            if self._claim.exists() or not self._foreign_work():
                with lock.held(self._work / "lock", self.path):
                    self._remove_work()

    def finished(self, name: str) -> MeasurementResult | None:
        """The measurement's stored result, if it has finished; agreed by all processes.

        A damaged one raises `ValueError`.
        """
        arrays = {}

        def read():
            found, stored = self._stored(name)
            arrays.update(stored)
            return found

        found = self._agreed(read)
        # Only the primary process reports: the others need no arrays.
        return None if found is None else result_from_json(found, arrays)

    def keep(self, result: MeasurementResult) -> None:
        """Store a finished measurement and drop its intermediate state.

        A failure, or another start of this run in the folder, raises `ValueError`.
        """

        def store():
            self._check_owner()
            files.write_arrays(self._work / f"{result.name}.npz", result.arrays)
            records.write(self._work / f"{result.name}.json", result_to_json(result))
            files.remove(self.state_path(result.name))

        self._agreed(store)

    def state_path(self, name: str) -> epath.Path:
        """The folder of a measurement's intermediate state."""
        return self._work / f"{name}.state"

    def vectors_path(self, name: str) -> epath.Path:
        """The folder of a measurement's final vectors."""
        return self.path / f"{name}_vectors"

    def complete(self, document: dict[str, Any], other_files: dict[str, bytes]) -> None:
        """Write everything to its final place, `results.json` last.

        Args:
            document: the content of `results.json`.
            other_files: whole files by name, such as the report.
        """
        if not self.is_primary:
            return
        self._check_owner()
        for source in self._work.glob("*.npz"):
            with files.reading(source):
                content = source.read_bytes()
            files.write_bytes(self.path / source.name, content)
        for name, content in other_files.items():
            files.write_bytes(self.path / name, content)
        records.write(self.results_path, document)
        if document.get("status") == "finished":
            self._remove_work()

    def _agreed(self, action) -> Any:
        return multihost.from_primary_doing(self.is_primary, action)

    def _check(self, wanted) -> None:
        found = self._found()
        if found is None:
            self._check_empty()
            return
        if self._claim.exists() and self._is_unfinished():
            # Every version can read finished runs; unfinished ones need this format.
            wanted = wanted | {"unfinished_format": FORMAT}
        names = identity.differences(found, wanted)
        if not names:
            return
        listed = "; ".join(
            f"{n} there is {_short(found.get(n))}, now {_short(wanted.get(n))}"
            for n in names[:3]
        )
        raise ValueError(
            f"the output folder must be new or hold this same run: {self.path} holds a "
            f"different run's results ({listed}). {_CHOOSE}"
        )

    def _results(self) -> dict[str, Any] | None:
        with files.reading(self.results_path):
            if not self.results_path.exists():
                return None
        found = files.read_json(self.results_path)
        ours = {"fingerprint", records.CHECKSUM}
        if isinstance(found, dict) and not ours & found.keys():
            raise ValueError(
                f"the output folder must be new or hold this same run: {self.path} has a "
                f"results.json that is not of this package. {_CHOOSE}"
            )
        return records.read(self.results_path)

    def _is_unfinished(self) -> bool:
        results = self._results()
        return not (results and results.get("status") == "finished")

    def _found(self) -> dict[str, Any] | None:
        """The fingerprint of the run that the folder belongs to."""
        with files.reading(self._claim):
            claimed = self._claim.exists()
        if claimed and self._is_unfinished():
            return records.read(self._claim)
        results = self._results()
        return None if results is None else results["fingerprint"]

    def _check_empty(self) -> None:
        with files.reading(self.path):
            is_folder, there = self.path.is_dir(), self.path.exists()
            linked = files.is_local(self.path) and os.path.islink(self.path)
            names = sorted(x.name for x in self.path.iterdir()) if is_folder else []
            if "unfinished" in names and not self._foreign_work():
                names.remove("unfinished")
        if not is_folder and (there or linked):
            what = "file" if there else "link that leads nowhere"
            raise ValueError(
                f"ANALYSIS_OUTPUT_DIR must be a folder: {self.path} is a {what}."
            )
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                "the output folder must be new or empty, or hold this same run: "
                f"{self.path} holds {', '.join(names[:5])}{more}, and no record of a run "
                f"that they belong to. {_CHOOSE}"
            )

    def _foreign_work(self) -> bool:
        # A run that is killed before its claim is written leaves only these.
        names = {path.name for path in self._work.iterdir()}
        return bool(names - {"lock", f".{self._claim.name}.part"})

    def _check_owner(self) -> None:
        owner = None
        if self._claim.exists():
            owner = records.read(self._claim).get("owner")
        if owner != self.owner:
            raise files.StorageError(
                f"Only one run may write to {self.path} at a time: "
                f"{owner or 'something'} has taken it over, so this run stops."
            )

    def _remove_work(self) -> None:
        # The claim is removed last: without it the rest would belong to no run.
        for path in self._work.iterdir():
            if path != self._claim and path.name != "lock":
                files.remove(path)
        files.remove(self._claim)
        files.remove(self._work)

    def _stored(self, name) -> tuple[dict[str, Any] | None, dict[str, np.ndarray]]:
        path = self._work / f"{name}.json"
        with files.reading(path):
            kept = path.exists()
        if kept:
            found = records.read(path)
            return found, records.arrays(found, self._work / f"{name}.npz")
        results = self._results() or {"measurements": []}
        for found in results["measurements"]:
            if found["name"] == name and found["status"] == "finished":
                return found, records.arrays(found, self.path / f"{name}.npz")
        return None, {}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
