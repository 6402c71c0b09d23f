"""Vectors on disk, written and read by orbax in the shardings of the parameters."""

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jaxtyping import PyTree

from t5x_fwdloss.analysis.store import files, multihost, records
from t5x_fwdloss.analysis.store.checksum import checksum

INDEX = "vectors.json"


def save(path: epath.Path, vectors: PyTree) -> None:
    """Write a tree of arrays to `path`, replacing it; completely or not at all.

    Called by every process. A failure raises `StorageError`.
    """
    with files.writing(path), _checkpointer() as checkpointer:
        checkpointer.save(path, _numbered(vectors), force=True)
        checkpointer.wait_until_finished()


def restore(path: epath.Path, like: PyTree) -> PyTree:
    """The tree saved at `path`; a failure raises `StorageError`.

    Args:
        path: the path given to `save`.
        like: arrays or their descriptions, whose shapes and shardings it takes.
    """
    leaves, structure = jax.tree.flatten(like)
    target = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves
    ]
    with files.reading(path), _checkpointer() as checkpointer:
        found = checkpointer.restore(path, _numbered(target))
    return jax.tree.unflatten(structure, [found[k] for k in sorted(found)])


def save_all(path: epath.Path, vectors: Iterable[PyTree], *, is_primary: bool) -> None:
    """Write vectors as `vector_0`, ..., and last the record of their checksums.

    Called by every process. A failure raises `StorageError`.
    """
    checksums = []
    for number, vector in enumerate(vectors):
        save(path / f"vector_{number}", vector)
        checksums.append(checksum(vector))
    multihost.from_primary_doing(
        is_primary, lambda: records.write(path / INDEX, {"checksums": checksums})
    )


def restore_one(
    path: epath.Path, number: int, like: PyTree, *, is_primary: bool
) -> PyTree | None:
    """One of the vectors that `save_all` wrote; None if there are fewer.

    A damaged one raises `StorageError`.
    """
    found = multihost.from_primary_doing(is_primary, lambda: records.read(path / INDEX))
    wanted = found["checksums"]
    if number >= len(wanted):
        return None
    return checked(path / f"vector_{number}", like, wanted[number])


def checked(path: epath.Path, like: PyTree, wanted: str) -> PyTree:
    """The tree saved at `path`, with its checksum verified.

    Args:
        path: the path given to `save`.
        like: arrays or their descriptions.
        wanted: the checksum.

    Raises:
        StorageError: it cannot be read, or its checksum differs.
    """
    vector = restore(path, like)
    if checksum(vector) != wanted:
        raise files.StorageError(
            f"{path} must hold what was saved there: its checksum differs. Move "
            f"{path.parent} away, or choose another folder."
        )
    return vector


@contextlib.contextmanager
def _checkpointer():
    # Orbax logs thirty lines per save, which would hide the progress lines.
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            yield checkpointer
    finally:
        logging.set_verbosity(before)


def _numbered(tree: Any) -> dict[str, Any]:
    return {f"leaf_{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
