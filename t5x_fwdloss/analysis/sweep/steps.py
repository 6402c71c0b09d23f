"""The checkpoints of a training run that a sweep measures: `CHECKPOINT_STEPS`."""

import os
import re
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.store import files, multihost

ALL = "all"
_EVERY = re.compile(r"every ([1-9]\d{0,17})")
_WORDS = settings.Rule(
    "'all' or 'every N', such as 'every 1000'",
    lambda x: x == ALL or bool(_EVERY.fullmatch(x)),
    alone=True,
)
_NOT_EMPTY = settings.Rule("that is not empty", lambda x: len(x) > 0)
CheckpointSteps = (
    Annotated[str, _WORDS] | Annotated[Sequence[settings.Count], _NOT_EMPTY]
)
# Steps that an error message lists.
NUM_LISTED = 12


def check(
    path: Any, chosen: Any, *, follow: bool, train_steps: int | None, output_dir: Any
) -> None:
    """Reject what no sweep can measure, before anything is read or compiled.

    Args:
        path: the model folder.
        chosen: the value of `CHECKPOINT_STEPS`; None: there is no sweep.
        follow: whether to wait for further checkpoints.
        train_steps: the step at which the training ends; None: unknown.
        output_dir: the folder of the sweep, whose finished steps need no checkpoint.

    Raises:
        ValueError: in one sentence.
    """
    if chosen is None:
        if follow:
            raise ValueError(
                "--follow must have CHECKPOINT_STEPS, the checkpoints to measure: got "
                "None; set --gin.CHECKPOINT_STEPS=\"'all'\"."
            )
        return
    settings.check("CHECKPOINT_STEPS", chosen, CheckpointSteps)
    settings.check("CHECKPOINT_PATH", path, settings.Path)
    if follow and train_steps is None:
        raise ValueError(
            "--follow must have TRAIN_STEPS, the step at which the training ends: got "
            "None; set --gin.TRAIN_STEPS."
        )
    beyond = _listed(chosen) if follow and not isinstance(chosen, str) else []
    beyond = [step for step in beyond if step > (train_steps or 0)]
    if beyond:
        raise ValueError(
            "CHECKPOINT_STEPS must not be beyond TRAIN_STEPS where --follow waits for "
            f"them: got {shown(beyond)}, and TRAIN_STEPS = {train_steps}."
        )
    folder = files.user_path(path)

    def look():
        there = folder.exists()
        steps = sorted({*find(path), *finished(output_dir)})
        return there, there and not folder.is_dir(), steps

    # Another process may see another content of the folder, and would end alone.
    is_primary = jax.process_index() == 0
    there, is_file, found = multihost.from_primary_doing(is_primary, look)
    if re.fullmatch(r"checkpoint_\d+", folder.name) or is_file:
        raise ValueError(
            "CHECKPOINT_PATH must be a model folder, which holds folders "
            f"checkpoint_<step>, where CHECKPOINT_STEPS is given: got {folder}."
        )
    if not found and not follow:
        raise ValueError(
            "CHECKPOINT_PATH must be a model folder, which holds folders "
            f"checkpoint_<step>, where CHECKPOINT_STEPS is given: {folder} "
            f"{'holds none' if there else 'does not exist'}."
        )
    if not follow:
        select(chosen, found, str(folder))


def select(
    chosen: str | Sequence[int], found: Sequence[int], where: str = ""
) -> list[int]:
    """The steps that are chosen, in order.

    Args:
        chosen: a valid value of `CHECKPOINT_STEPS`.
        found: the steps that there are.
        where: the model folder, if steps that are not there are an error.

    Raises:
        ValueError: it names the steps that are not there, and those that are.
    """
    if isinstance(chosen, str):
        match = _EVERY.fullmatch(chosen)
        stride = int(match[1]) if match else 1
        steps = [step for step in found if step % stride == 0]
        if where and not steps:
            raise ValueError(
                f"CHECKPOINT_STEPS must choose a checkpoint of {where}: got {chosen!r}, "
                f"and there are {shown(found)}."
            )
        return sorted(steps)
    steps = _listed(chosen)
    missing = [step for step in steps if step not in set(found)]
    if where and missing:
        raise ValueError(
            f"CHECKPOINT_STEPS must be steps of checkpoints in {where}: got "
            f"{shown(missing)}, and there are {shown(found)}."
        )
    return [step for step in steps if step in set(found)]


def find(path: Any) -> dict[int, str]:
    """The complete checkpoints in a model folder: step to path."""
    folder = files.user_path(path)
    with files.reading(folder):
        inside = list(folder.iterdir()) if folder.is_dir() else []
    found = {}
    for one in inside:
        match = re.fullmatch(r"checkpoint_(\d+)", one.name)
        if match and _is_complete(one):
            found[int(match[1])] = os.fspath(one)
    return dict(sorted(found.items()))


def finished(output_dir: Any) -> list[int]:
    """The steps that have results in the folder of a sweep."""
    folder = files.user_path(output_dir)
    with files.reading(folder):
        inside = list(folder.iterdir()) if folder.is_dir() else []
    matches = [(re.fullmatch(r"step_(\d+)", one.name), one) for one in inside]
    return sorted(
        int(match[1])
        for match, one in matches
        if match and (one / "results.json").exists()
    )


def time_of(path: str) -> int | None:
    """When a checkpoint was written; None where the storage does not say."""
    try:
        return int(epath.Path(path).stat().mtime) or None
    except (OSError, TypeError, AttributeError):
        return None


def shown(steps: Sequence[int]) -> str:
    """The steps as text, the first and the last of many."""
    words = [str(step) for step in steps]
    if len(words) > NUM_LISTED:
        half = NUM_LISTED // 2
        words = [*words[:half], "...", *words[-half:]]
    return ", ".join(words) or "none"


def _listed(chosen) -> list[int]:
    return sorted({int(step) for step in np.asarray(chosen).ravel()})


def _is_complete(path) -> bool:
    # A folder that is being written has another name, and in a bucket no marker. T5X's
    # older format, whose file is "checkpoint", has neither.
    if not path.is_dir():
        return False
    if (path / "checkpoint").exists():
        return True
    try:
        return bool(ocp.utils.is_checkpoint_finalized(path))
    except (ValueError, OSError):
        return False
