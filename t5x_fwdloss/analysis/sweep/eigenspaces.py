"""How far the top eigenspaces of neighboring steps of a sweep overlap.

The eigenvectors of a step are needed until the next one has been compared with it. Where
a measurement does not save them itself, they are kept in the sweep's folder until then.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.of_matrix.eigenpairs import Eigenpairs
from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.analysis.store import files, multihost, vector_store
from t5x_fwdloss.analysis.store.folder import RunFolder
from t5x_fwdloss.curvature.vectors import directions, probes

NO_VECTORS = (
    "The overlap of {name} between steps {earlier} and {later} is left out: the "
    "eigenvectors of one of them are not kept. Eigenpairs.save_eigenvectors = True keeps "
    "them."
)
ENDS = ("largest", "smallest")


class Neighbors:
    """The overlaps of a sweep's steps with the steps before them.

    Attributes:
        notes: sentences on overlaps that are left out, for the report.
    """

    def __init__(
        self, measurements: Sequence[Any], path: epath.Path, *, is_primary: bool
    ):
        """Reads nothing yet.

        Args:
            measurements: the sweep's; those of eigenpairs are compared.
            path: the sweep's folder.
            is_primary: whether this process writes.
        """
        self.notes: dict[str, None] = {}
        self._measurements = [x for x in measurements if isinstance(x, Eigenpairs)]
        self._path, self._primary = path, is_primary
        self._found: dict[tuple[str, str, int, int], dict[str, Any]] = {}

    def vectors(self, step: int) -> epath.Path:
        """Where a step's eigenvectors are kept that its run does not save."""
        return self._path / "vectors" / f"step_{step}"

    def restore(self, document: Mapping[str, Any]) -> None:
        """Take over what `sweep.json` has."""
        for x in document["neighbors"]:
            self._found[x["measurement"], x["end"], x["earlier"], x["later"]] = x
        self.notes = dict.fromkeys(document["notes"])

    def compare(
        self, step: int, documents: Mapping[int, dict[str, Any]], params: PyTree
    ) -> None:
        """Compare a step that was measured now with those next to it.

        Args:
            step: the step.
            documents: the measured steps of the sweep, with their results.
            params: the step's parameters, for the layout of vectors.
        """
        steps = sorted(documents)
        pairs = [pair for pair in itertools.pairwise(steps) if step in pair]
        if pairs:
            like = probes.random_like(0, parameters.placed(parameters.widened(params)))
            for measurement in self._measurements:
                for pair in pairs:
                    self._compare(measurement, *pair, documents, like)
        if self._primary:
            for earlier in steps[: steps.index(step)][-1:]:
                files.remove(self.vectors(earlier))

    def entries(self, steps: Sequence[int], documents) -> list[dict[str, Any]]:
        """The overlaps of measured steps that are neighbors, for `sweep.json`."""
        pairs = set(itertools.pairwise(steps))
        return [
            x
            for _, x in sorted(self._found.items(), key=lambda x: x[0][2:])
            if x["later"] in documents and (x["earlier"], x["later"]) in pairs
        ]

    def forget_vectors(self) -> None:
        """Remove what was kept for a next step."""
        if self._primary:
            files.remove(self._path / "vectors")

    def _compare(self, measurement, earlier, later, documents, like) -> None:
        name = measurement.name
        before = self._spaces(measurement, earlier, documents[earlier], like)
        here = self._spaces(measurement, later, documents[later], like)
        if before is None or here is None:
            if all((name, e, earlier, later) not in self._found for e in ENDS):
                words = NO_VECTORS.format(name=name, earlier=earlier, later=later)
                self.notes[words] = None
            return
        for end in ENDS:
            first, second = before.get(end, []), here.get(end, [])
            if first and second:
                self._found[name, end, earlier, later] = {
                    "measurement": name,
                    "end": end,
                    "earlier": earlier,
                    "later": later,
                    "overlap": directions.subspace_overlap(first, second),
                    "num_vectors": [len(first), len(second)],
                    "converged": all(
                        number["converged"]
                        for step in (earlier, later)
                        for label, number in _pairs(documents[step], name).items()
                        if label.startswith(end)
                    ),
                }

    def _spaces(
        self, measurement, step, document, like
    ) -> dict[str, list[PyTree]] | None:
        """The eigenvectors of each end; None where they are not kept."""
        name = measurement.name
        if _entry(document, name) is None:
            return None
        path = self.vectors(step) / name
        if measurement.save_eigenvectors:
            folder = RunFolder(self._path / f"step_{step}", self._primary)
            path = folder.vectors_path(name)
        index = path / vector_store.INDEX
        if not multihost.from_primary_doing(self._primary, index.exists):
            return None
        found: dict[str, list[PyTree]] = {}
        for number, label in enumerate(_pairs(document, name)):
            vector = vector_store.restore_one(
                path, number, like, is_primary=self._primary
            )
            found.setdefault(label.partition("_")[0], []).append(vector)
        return found


def _entry(document, name) -> dict[str, Any] | None:
    for entry in document["measurements"]:
        if entry["name"] == name and entry["status"] == "finished":
            return entry
    return None


def _pairs(document, name) -> dict[str, dict[str, Any]]:
    """The eigenvalues, in the order of their vectors."""
    entry = _entry(document, name) or {"results": {}}
    is_pair = re.compile(r"(largest|smallest)_\d+").fullmatch
    return {label: x for label, x in entry["results"].items() if is_pair(label)}
