"""Vectors on disk, written and read by orbax in the shardings of the parameters."""

import contextlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jaxtyping import PyTree

from t5x_fwdloss.analysis import files


def save(path: epath.Path, vectors: PyTree) -> None:
    """Write a tree of arrays, in place of what is at `path`; whole, or nothing is there.

    Called by every process. What cannot be written raises `StorageError`.
    """
    with files.writing(path), _checkpointer() as checkpointer:
        checkpointer.save(path, _numbered(vectors), force=True)
        checkpointer.wait_until_finished()


def restore(path: epath.Path, like: PyTree) -> PyTree:
    """The tree saved at `path`; what cannot be read raises `StorageError`.

    Args:
        path: what `save` was given.
        like: arrays or their descriptions, whose shapes and shardings it takes.
    """
    leaves, structure = jax.tree.flatten(like)
    target = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves
    ]
    with files.reading(path), _checkpointer() as checkpointer:
        found = checkpointer.restore(path, _numbered(target))
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
