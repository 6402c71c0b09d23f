"""The saved state of a measurement: its vectors by orbax, the rest as one JSON file.

A vector does not change within one generation (until a restart, or the next probe): it is
written once. The JSON file is replaced last and names the vectors it belongs to, so a
kill at any moment leaves the state before or the state after; vectors that it does not
name are removed. Numbers in it are float64, written so that they read back the same.
"""

import dataclasses
from collections.abc import Container
from typing import Any, TypeVar

import numpy as np
from etils import epath

from t5x_fwdloss.analysis.store import files, multihost, records, vector_store
from t5x_fwdloss.analysis.store.checksum import checksum

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class SavedState:
    """Where the state of one measurement is kept.

    Attributes:
        path: the folder.
        is_primary: whether this process writes the JSON file.
    """

    path: epath.Path
    is_primary: bool
    _checksums: dict[str, str] = dataclasses.field(default_factory=dict, init=False)

    @property
    def _index(self) -> epath.Path:
        return self.path / "state.json"

    def save(self, state: Any, generation: int) -> None:
        """Save the state; called by every process.

        Args:
            state: a state of the curvature engine: `arrays()` and `metadata()`.
            generation: changes whenever vectors do.
        """
        arrays, metadata = state.arrays(), state.metadata()
        checksums = {}
        for number, vector in enumerate(arrays.pop("vectors")):
            name = f"vector_{generation}_{number}"
            if name not in self._checksums:
                vector_store.save(self.path / name, vector)
                self._checksums[name] = checksum(vector)
            checksums[name] = self._checksums[name]
        for name in self._checksums.keys() - checksums.keys():
            del self._checksums[name]
        document = {"metadata": metadata, "arrays": arrays, "vectors": checksums}

        def write():
            records.write(self._index, document)
            self._remove_all_but(checksums)

        multihost.from_primary_doing(self.is_primary, write)
        multihost.wait("state saved")

    def restore(self, like: Any, state_class: type[State]) -> State | None:
        """The saved state, with vectors laid out like `like`; None if there is none.

        Args:
            like: a vector.
            state_class: the class of the state, with `from_saved`.
        """
        self._checksums.clear()
        found = multihost.from_primary_doing(self.is_primary, self._read)
        multihost.wait("state read")
        if found is None:
            return None
        vectors = [
            self._vector(name, wanted, like)
            for name, wanted in found["vectors"].items()
        ]
        make: Any = state_class
        with files.reading(self._index):
            # A null in JSON is a NaN, and becomes one again as a float.
            arrays = {k: np.asarray(x, np.float64) for k, x in found["arrays"].items()}
            return make.from_saved(
                like, arrays | {"vectors": vectors}, found["metadata"]
            )

    def _read(self) -> dict[str, Any] | None:
        with files.reading(self._index):
            saved = self._index.exists()
        found = records.read(self._index) if saved else None
        files.remove_parts(self.path)
        self._remove_all_but(found["vectors"] if found else ())
        return found

    def _vector(self, name, wanted, like):
        vector = vector_store.checked(self.path / name, like, wanted)
        self._checksums[name] = wanted
        return vector

    def _remove_all_but(self, names: Container[str]) -> None:
        for old in self.path.glob("vector_*"):
            if old.name not in names:
                files.remove(old)
