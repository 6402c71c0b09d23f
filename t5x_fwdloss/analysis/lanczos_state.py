"""A Lanczos run on disk: the vectors of its basis by orbax, the rest as one JSON file.

A vector does not change within one generation (until a restart, or the next probe): it is
written once. The JSON file is replaced last and names the vectors it belongs to, so a
kill at any moment leaves the state before or the state after. Numbers in it are float64,
written so that they read back the same.
"""

import dataclasses
from typing import Any, TypeVar

import numpy as np
from etils import epath

from t5x_fwdloss.analysis import agreement, files, vector_store

State = TypeVar("State")


@dataclasses.dataclass(frozen=True)
class LanczosState:
    """Where the state of one Lanczos run is kept.

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
        if self.is_primary:
            document = {"metadata": metadata, "arrays": arrays, "vectors": names}
            files.write_json(self._index, document)
            self._remove_all_but(names)
        agreement.wait("lanczos state saved")

    def restore(self, like: Any, state_class: type[State]) -> State | None:
        """The saved state, with vectors laid out like `like`; None if there is none.

        Args:
            like: a vector.
            state_class: the class of the state, with `from_saved`.
        """
        found = None
        if self.is_primary:
            if self._index.exists():
                found = files.read_json(self._index)
            self._remove_all_but(found["vectors"] if found else [])
        found = agreement.from_primary(found)
        agreement.wait("lanczos state read")
        if found is None:
            return None
        # A null in JSON is a NaN, and becomes one again as a float.
        arrays = {k: np.asarray(x, np.float64) for k, x in found["arrays"].items()}
        vectors = [
            vector_store.restore(self.path / name, like) for name in found["vectors"]
        ]
        make: Any = state_class
        return make.from_saved(like, arrays | {"vectors": vectors}, found["metadata"])

    def _remove_all_but(self, names: list[str]) -> None:
        for old in self.path.glob("vector_*"):
            if old.name not in names:
                old.rmtree()
