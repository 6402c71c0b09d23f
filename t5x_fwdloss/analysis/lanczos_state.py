"""A Lanczos run on disk: blocks of its basis by orbax, the rest as one JSON file.

A block of vectors that is full never changes again until a restart: it is written once.
The JSON file is replaced last and names the blocks it belongs to, so a kill at any
moment leaves the state before or the state after. Numbers in it are float64, written so
that they read back the same.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from t5x_fwdloss.analysis import agreement, files
from t5x_fwdloss.curvature import EigenpairsState
from t5x_fwdloss.curvature.probes import stacked_sharding


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

    def save(self, state: EigenpairsState) -> None:
        """Save the state; called by every process."""
        names = self._save_blocks(state)
        if self.is_primary:
            arrays = state.arrays()
            document = {
                "metadata": state.metadata(),
                "projected": arrays["projected"],
                "history": arrays["history"],
                "blocks": names,
            }
            files.write_json(self._index, document)
            self._remove_blocks_but(names)
        agreement.wait("lanczos state saved")

    def restore(self, like: Any) -> EigenpairsState | None:
        """The saved state, with vectors laid out like `like`; None if there is none."""
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
        arrays = {
            "blocks": [
                self._restore_block(name, like, metadata["space"]["rows_per_block"])
                for name in found["blocks"]
            ],
            "projected": np.asarray(found["projected"], np.float64),
            "history": np.asarray(
                [[np.nan if x is None else x for x in row] for row in found["history"]]
            ),
        }
        return EigenpairsState.from_saved(like, arrays, metadata)

    def _remove_blocks_but(self, names: list[str]) -> None:
        for old in self.path.glob("block_*"):
            if old.name not in names:
                old.rmtree()

    def _save_blocks(self, state: EigenpairsState) -> list[str]:
        space = state.metadata()["space"]
        rows = space["rows_per_block"]
        names = []
        with _checkpointer() as checkpointer:
            for number, block in enumerate(state.arrays()["blocks"]):
                filled = min(space["size"] - number * rows, rows)
                name = f"block_{state.num_restarts}_{number}_{filled}"
                names.append(name)
                if not (self.path / name).exists():
                    checkpointer.save(self.path / name, _numbered(block))
                    checkpointer.wait_until_finished()
        return names

    def _restore_block(self, name: str, like: Any, rows: int) -> Any:
        leaves, structure = jax.tree.flatten(like)
        target = [
            jax.ShapeDtypeStruct(
                (rows, *x.shape), x.dtype, sharding=stacked_sharding(x.sharding)
            )
            for x in leaves
        ]
        with _checkpointer() as checkpointer:
            found = checkpointer.restore(self.path / name, _numbered(target))
        return jax.tree.unflatten(structure, [found[k] for k in sorted(found)])


@contextlib.contextmanager
def _checkpointer():
    # Orbax logs thirty lines a save; between two lines of progress that is noise.
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            yield checkpointer
    finally:
        logging.set_verbosity(before)


def _numbered(tree: Any) -> dict[str, Any]:
    return {f"leaf_{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
