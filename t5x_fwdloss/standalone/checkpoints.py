"""Checkpoints that T5X and the standalone host both read.

The layout is that of `t5x.train` with Orbax: `MODEL_DIR/checkpoint_<step>/state` holds
`{"target": parameters, "state": {"step": step}}`. Beside it, `optimizer` holds the
optax state, which only the standalone host reads, as only T5X reads its own optimizer's
state; both hosts read parameters and step of either. A folder appears under its name
only when it is complete, so a killed run leaves no half-written checkpoint.
"""

import importlib.util
import re
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.analysis.store import files
from t5x_fwdloss.standalone import hugging_face

PREFIX = "checkpoint"
UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of folders that Orbax is writing


def check_place(model_dir: str) -> None:
    """Checks that checkpoints can be saved at such a path.

    Orbax's manager reads the properties of a `gs://` bucket with Google's own client.

    Raises:
        ValueError: it is in a bucket (`gs://`), and that client is not installed.
    """
    if model_dir.startswith("gs://") and not _has_google_client():
        raise ValueError(
            f"Training into a bucket must have Google's client for it: MODEL_DIR is "
            f"{model_dir}, and google-cloud-storage is not installed; pip install "
            "google-cloud-storage (the extra gcs of this package), or train into a "
            "local folder and copy it."
        )


def _has_google_client() -> bool:
    try:
        return importlib.util.find_spec("google.cloud.storage") is not None
    except ModuleNotFoundError:  # no package google.cloud at all
        return False


def open_manager(model_dir: str, keep: int | None = None) -> ocp.CheckpointManager:
    """The manager of a training run's checkpoints; `keep` of them, None for all."""
    return ocp.CheckpointManager(
        files.user_path(model_dir),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            step_prefix=PREFIX,
            enable_async_checkpointing=False,
        ),
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(),
            "optimizer": ocp.PyTreeCheckpointHandler(),
        },
    )


def save(manager: ocp.CheckpointManager, step: int, params, optimizer_state) -> None:
    """Writes `checkpoint_<step>`, or nothing at all; a full disk is a `StorageError`."""
    state = {"target": params, "state": {"step": step}}
    with files.writing(epath.Path(manager.directory) / f"{PREFIX}_{step}"):
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(state),
                # With the step: Orbax rejects a tree without leaves (plain SGD).
                optimizer=ocp.args.PyTreeSave({"step": step, "optax": optimizer_state}),
            ),
            force=True,
        )


def find(path: str) -> epath.Path:
    """The folder `checkpoint_<step>` at a path: itself, or the latest in it.

    A checkpoint in Hugging Face's format is the folder itself.

    Raises:
        ValueError: if there is none, listing what is there, or if it is of T5X's older
            format.
    """
    folder = files.user_path(path)
    with files.reading(folder):
        names = sorted(x.name for x in folder.iterdir()) if folder.is_dir() else []
    if UNFINISHED in folder.name:
        raise ValueError(
            f"CHECKPOINT_PATH must be a whole checkpoint: {folder} is incomplete, left by "
            "a run that was stopped while it saved."
        )
    if _step(folder) is None:
        found = [folder / name for name in names if _step(folder / name) is not None]
        if not found and hugging_face.is_checkpoint(folder):
            return folder
        if not found:
            there = (
                f"it holds {', '.join(names) or 'nothing'}"
                if folder.is_dir()
                else ("there is a file" if folder.exists() else "there is nothing")
            )
            raise ValueError(
                "CHECKPOINT_PATH must be a folder checkpoint_<step>, or one that holds "
                f"such folders: at {folder} {there}."
            )
        folder = max(found, key=lambda x: _step(x) or 0)
        names = sorted(x.name for x in folder.iterdir())
    if "checkpoint" in names:
        raise ValueError(
            f"{folder} is a checkpoint of T5X's older format, which only T5X reads: use "
            "python -m t5x_fwdloss.analyze, or let t5x.train restore and save it."
        )
    if "state" not in names:
        raise ValueError(
            f"A checkpoint must hold a folder 'state': {folder} holds "
            f"{', '.join(names) or 'nothing'}."
        )
    return folder


def _step(folder: epath.Path) -> int | None:
    match = re.fullmatch(rf"{PREFIX}_(\d+)", folder.name)
    return int(match[1]) if match and folder.is_dir() else None


def restore_params(path: str, like: Any) -> tuple[int, Any]:
    """The step and the parameters of a checkpoint, written by T5X or by us.

    Or by the library transformers of Hugging Face, which keeps no step: 0.

    Args:
        path: as in `find`.
        like: the model's parameters, or their shapes and dtypes, which must
            be the same; each leaf is restored with the sharding given here, if any.
    """
    folder = find(path)
    if hugging_face.is_checkpoint(folder):
        return 0, hugging_face.restore_params(folder, like)
    stored = _stored(folder / "state")
    with files.reading(folder / "state"):
        found = _shapes(stored["target"])
    parameters.check_same(found, _shapes(like), str(folder))
    wanted = {"target": like, "state": {"step": 0}}
    restored = _restored(folder / "state", wanted)
    return int(restored["state"]["step"]), restored["target"]


def restore_optimizer(path: str, like: Any) -> Any:
    """The optimizer's state of a checkpoint that the standalone host wrote.

    A checkpoint without one raises `ValueError`.
    """
    folder = _optimizer_folder(path)
    found = _shapes(_stored(folder).get("optax", {}))
    name = str(folder.parent)
    words = ("arrays of the optimizer's state", "OPTIMIZER")
    parameters.check_same(found, _shapes(like), name, *words)
    return _restored(folder, {"optax": like})["optax"]


def _optimizer_folder(path: str) -> epath.Path:
    folder = find(path)
    if not (folder / "optimizer").is_dir():
        raise ValueError(
            f"{folder} must hold the optimizer's state: it does not (T5X wrote it?); to "
            "train, start from it in a new MODEL_DIR; to analyze, use python -m "
            "t5x_fwdloss.analyze."
        )
    return folder / "optimizer"


def _stored(folder: epath.Path) -> Any:
    with files.reading(folder):
        return ocp.PyTreeCheckpointHandler().metadata(folder).tree


def _restored(folder: epath.Path, wanted: Any) -> Any:
    with files.reading(folder):
        return ocp.PyTreeCheckpointHandler().restore(folder, args=_arguments(wanted))


def _arguments(wanted) -> ocp.args.PyTreeRestore:
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def restore_args(leaf):
        if not hasattr(leaf, "shape"):
            return ocp.RestoreArgs(restore_type=np.ndarray)
        sharding = getattr(leaf, "sharding", None) or here
        return ocp.ArrayRestoreArgs(sharding=sharding, dtype=leaf.dtype)

    arguments = jax.tree.map(restore_args, wanted)
    return ocp.args.PyTreeRestore(wanted, arguments, partial_restore=True)


def _shapes(tree) -> dict[str, Any]:
    # A named tuple is stored as a dict: only the names of keys can be compared.
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = ["/".join(map(_name, path)) for path, _ in leaves]
    return {
        n: parameters.shape_and_kind(x) for n, (_, x) in zip(names, leaves, strict=True)
    }


def _name(key) -> str:
    found = (getattr(key, kind, None) for kind in ("name", "key", "idx"))
    return str(next(x for x in found if x is not None))
