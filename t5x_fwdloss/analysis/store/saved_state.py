"""The saved state of a measurement: its vectors by orbax, the rest as one JSON file.

A vector does not change: it is written once, however often its state is saved. The JSON
file is replaced last and names the vectors it belongs to, so a kill at any moment
leaves either the old or the new state; vectors that it does not name are removed.
Numbers in it are float64, written so that they read back the same.
"""

import weakref
from collections.abc import Container
from typing import Any, NamedTuple, TypeVar

import jax
from etils import epath
from jaxtyping import PyTree

from t5x_fwdloss.analysis.store import files, multihost, records, vector_store
from t5x_fwdloss.analysis.store.checksum import checksum
from t5x_fwdloss.curvature.vectors import packing

State = TypeVar("State")


class _Written(NamedTuple):
    """A vector on disk, identified by a weak reference to the first of its arrays."""

    leaf: weakref.ref
    name: str
    checksum: str


class SavedState:
    """The saved state of one measurement."""

    def __init__(self, path: epath.Path, is_primary: bool):
        """Nothing is read or written yet.

        Args:
            path: the folder.
            is_primary: whether this process writes the JSON file.
        """
        self.path, self.is_primary = path, is_primary
        self._written: list[_Written] = []
        self._count = 0

    @property
    def _index(self) -> epath.Path:
        return self.path / "state.json"

    def save(self, state: Any) -> None:
        """Save the state; called by every process.

        Args:
            state: a state of the curvature engine, a dataclass as `packing` takes it.
        """
        numbers, vectors = packing.pack(state)
        self._written = [self._write(vector) for vector in vectors]
        named = [(written.name, written.checksum) for written in self._written]
        document = {"state": numbers, "vectors": named}

        def write():
            records.write(self._index, document)
            self._remove_all_but(dict(named))

        multihost.from_primary_doing(self.is_primary, write)
        multihost.wait("state saved")

    def _write(self, vector) -> _Written:
        leaf = jax.tree.leaves(vector)[0]
        for written in self._written:
            if written.leaf() is leaf:
                return written
        name = f"vector_{self._count}"
        self._count += 1
        vector_store.save(self.path / name, vector)
        return _Written(weakref.ref(leaf), name, checksum(vector))

    def restore(self, like: PyTree, state_class: type[State]) -> State | None:
        """The saved state, with vectors laid out like `like`; None if there is none.

        Args:
            like: a vector.
            state_class: the class of the state.
        """
        found = multihost.from_primary_doing(self.is_primary, self._read)
        multihost.wait("state read")
        if found is None:
            return None
        vectors = [
            self._vector(name, wanted, like) for name, wanted in found["vectors"]
        ]
        with files.reading(self._index):
            return packing.unpack(state_class, found["state"], vectors, like)

    def _read(self) -> dict[str, Any] | None:
        with files.reading(self._index):
            saved = self._index.exists()
        found = records.read(self._index) if saved else None
        files.remove_parts(self.path)
        self._remove_all_but(dict(found["vectors"]) if found else ())
        return found

    def _vector(self, name, wanted, like):
        vector = vector_store.checked(self.path / name, like, wanted)
        leaf = weakref.ref(jax.tree.leaves(vector)[0])
        self._written.append(_Written(leaf, name, wanted))
        self._count = max(self._count, int(name.removeprefix("vector_")) + 1)
        return vector

    def _remove_all_but(self, names: Container[str]) -> None:
        for old in self.path.glob("vector_*"):
            if old.name not in names:
                files.remove(old)
