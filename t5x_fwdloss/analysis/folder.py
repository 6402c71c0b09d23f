"""The output folder of one run: refused to any other run, resumed by the same.

While a run goes on, what it has finished lies in `unfinished/`, each measurement whole
or not at all; `results.json` appears last, so that a folder that has it is complete.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from etils import epath

from t5x_fwdloss.analysis import agreement, files
from t5x_fwdloss.analysis.numbers import (
    MeasurementResult,
    result_from_json,
    result_to_json,
)

# Of what measurements save half-way: to be counted up when a state gets other members.
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where one run keeps what it has found.

    Attributes:
        path: the output folder.
        is_primary: whether this process writes; the others only read.
    """

    path: epath.Path
    is_primary: bool

    @property
    def results_path(self) -> epath.Path:
        """The finished document."""
        return self.path / "results.json"

    @property
    def _work(self) -> epath.Path:
        return self.path / "unfinished"

    def open(self, fingerprint: dict[str, Any]) -> None:
        """Claim the folder for the run with this fingerprint, or go on with it.

        Raises:
            ValueError: the folder holds a different run's results, or unfinished ones
                that another version has saved; says what differs.
        """
        problem = None
        if self.is_primary:
            problem = self._difference(fingerprint)
            if problem is None:
                claim = fingerprint | {"unfinished_format": FORMAT}
                files.write_json(self._work / "run.json", claim)
        problem = agreement.from_primary(problem)
        if problem is not None:
            raise ValueError(problem)

    def finished(self, name: str) -> MeasurementResult | None:
        """The measurement's stored result, if it has finished; agreed by all processes."""
        found = arrays = None
        if self.is_primary:
            found, arrays = self._stored(name)
        found = agreement.from_primary(found)
        if found is None:
            return None
        # Only the primary process reports: the others need no arrays.
        return result_from_json(found, arrays or {})

    def keep(self, result: MeasurementResult) -> None:
        """Store a finished measurement and drop its half-way state."""
        if self.is_primary:
            files.write_arrays(self._work / f"{result.name}.npz", result.arrays)
            files.write_json(self._work / f"{result.name}.json", result_to_json(result))
            self._remove(self.state_path(result.name))
        agreement.wait(f"kept {result.name}")

    def state_path(self, name: str) -> epath.Path:
        """Where a measurement may save how far it is."""
        return self._work / f"{name}.state"

    def vectors_path(self, name: str) -> epath.Path:
        """Where a measurement leaves vectors, for good."""
        return self.path / f"{name}_vectors"

    def complete(self, document: dict[str, Any], other_files: dict[str, bytes]) -> None:
        """Write everything in its final place, `results.json` last.

        Args:
            document: the content of `results.json`.
            other_files: whole files by name, such as the report.
        """
        if not self.is_primary:
            return
        for source in self._work.glob("*.npz"):
            files.write_bytes(self.path / source.name, source.read_bytes())
        for name, content in other_files.items():
            files.write_bytes(self.path / name, content)
        files.write_json(self.results_path, document)
        if document.get("status") == "finished":
            self._remove(self._work)

    def _difference(self, fingerprint) -> str | None:
        wanted = files.to_json(fingerprint)
        found = wanted
        if (self._work / "run.json").exists():
            found = files.read_json(self._work / "run.json")
            # What is finished can be read by every version, what is not cannot.
            wanted |= {"unfinished_format": FORMAT}
        elif self.results_path.exists():
            found = files.read_json(self.results_path).get("fingerprint", {})
        if found == wanted:
            return None
        names = [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)]
        listed = "; ".join(
            f"{n} there is {_short(found.get(n))}, now {_short(wanted.get(n))}"
            for n in names[:3]
        )
        return (
            f"the output folder must be new or hold this same run: {self.path} holds a "
            f"different run's results ({listed}). Choose another ANALYSIS_OUTPUT_DIR."
        )

    def _stored(self, name) -> tuple[dict[str, Any] | None, dict[str, np.ndarray]]:
        if (self._work / f"{name}.json").exists():
            found = files.read_json(self._work / f"{name}.json")
            return found, files.read_arrays(self._work / f"{name}.npz")
        if self.results_path.exists():
            for found in files.read_json(self.results_path)["measurements"]:
                if found["name"] == name and found["status"] == "finished":
                    return found, files.read_arrays(self.path / f"{name}.npz")
        return None, {}

    def _remove(self, path: epath.Path) -> None:
        if path.exists():
            path.rmtree()


def is_primary_process() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
