"""The saved state of a measurement: its vectors by orbax, the rest as one JSON file.

A vector does not change within one generation (until a restart, or the next probe): it is
written once. The JSON file is replaced last and names the vectors it belongs to, so a
kill at any moment leaves the state before or the state after; vectors that it does not
name are removed. Numbers in it are float64, written so that they read back the same.
"""

import dataclasses
from typing import Any, TypeVar

import numpy as np
from etils import epath

from t5x_fwdloss.analysis import agreement, files, vector_store

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class LanczosState:
    """Where the state of one measurement is kept.

    Attributes:
        path: the folder.
        is_primary: whether this process writes the JSON file.
    """

    path: epath.Path
    is_primary: bool

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
        names = []
        for number, vector in enumerate(arrays.pop("vectors")):
            names.append(f"vector_{generation}_{number}")
            if not (self.path / names[-1]).exists():
                vector_store.save(self.path / names[-1], vector)
        document = {"metadata": metadata, "arrays": arrays, "vectors": names}

        def write():
            files.write_json(self._index, document)
            self._remove_all_but(names)

        agreement.from_primary_doing(self.is_primary, write)
        agreement.wait("state saved")

    def restore(self, like: Any, state_class: type[State]) -> State | None:
        """The saved state, with vectors laid out like `like`; None if there is none.

        Args:
            like: a vector.
            state_class: the class of the state, with `from_saved`.
        """
        found = agreement.from_primary_doing(self.is_primary, self._read)
        agreement.wait("state read")
        if found is None:
            return None
        vectors = [
            vector_store.restore(self.path / name, like) for name in found["vectors"]
        ]
        make: Any = state_class
        with files.reading(self._index):
            # A null in JSON is a NaN, and becomes one again as a float.
            arrays = {k: np.asarray(x, np.float64) for k, x in found["arrays"].items()}
            return make.from_saved(
                like, arrays | {"vectors": vectors}, found["metadata"]
            )

    def _read(self) -> dict[str, Any] | None:
        found = files.read_json(self._index) if self._index.exists() else None
        with files.reading(self._index):
            names = found["vectors"] if found else []
            if not all(isinstance(name, str) for name in names):
                raise TypeError("its vectors have no names")
        files.remove_parts(self.path)
        self._remove_all_but(names)
        return found

    def _remove_all_but(self, names: list[str]) -> None:
        for old in self.path.glob("vector_*"):
            if old.name not in names:
                files.remove(old)
