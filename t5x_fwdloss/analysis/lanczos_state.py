"""A Lanczos run on disk: blocks of its basis by orbax, the rest as one JSON file.

A block of vectors that is full does not change again within one generation (until a
restart, or the next probe): it is written once. The JSON file is replaced last and names
the blocks it belongs to, so a kill at any moment leaves the state before or the state
after. Numbers in it are float64, written so that they read back the same.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath

from t5x_fwdloss.analysis import agreement, files, vector_store
from t5x_fwdloss.curvature.probes import stacked_sharding

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
            generation: changes whenever full blocks do.
        """
        arrays, metadata = state.arrays(), state.metadata()
        names = self._save_blocks(arrays.pop("blocks"), metadata["space"], generation)
        if self.is_primary:
            document = {"metadata": metadata, "arrays": arrays, "blocks": names}
            files.write_json(self._index, document)
            self._remove_blocks_but(names)
        agreement.wait("lanczos state saved")

    def restore(self, like: Any, state_class: type[State]) -> State | None:
        """The saved state, with vectors laid out like `like`; None if there is none.

        Args:
            like: a vector.
            state_class: the class of the state, with `from_saved`.
        """
        found = None
        if self.is_primary and self._index.exists():
            found = files.read_json(self._index)
        found = agreement.from_primary(found)
        if found is None:
            return None
        if self.is_primary:
            self._remove_blocks_but(found["blocks"])
        agreement.wait("lanczos state read")
        metadata = found["metadata"]
        rows = metadata["space"]["rows_per_block"]
        stacked = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (rows, *x.shape), x.dtype, sharding=stacked_sharding(x.sharding)
            ),
            like,
        )
        # A null in JSON is a NaN, and becomes one again as a float.
        arrays = {k: np.asarray(x, np.float64) for k, x in found["arrays"].items()}
        blocks = [
            vector_store.restore(self.path / name, stacked) for name in found["blocks"]
        ]
        make: Any = state_class
        return make.from_saved(like, arrays | {"blocks": blocks}, metadata)

    def _save_blocks(self, blocks, space, generation) -> list[str]:
        rows = space["rows_per_block"]
        names = []
        for number, block in enumerate(blocks):
            filled = min(space["size"] - number * rows, rows)
            names.append(f"block_{generation}_{number}_{filled}")
            if not (self.path / names[-1]).exists():
                vector_store.save(self.path / names[-1], block)
        return names

    def _remove_blocks_but(self, names: list[str]) -> None:
        for old in self.path.glob("block_*"):
            if old.name not in names:
                old.rmtree()
