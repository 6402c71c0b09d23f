"""Parameters of a T5X checkpoint, on the mesh, with bad input named before restoring.

Orbax checkpoints and T5X's older formats both restore, through T5X's own manager.
"""

import copy
import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.core import FrozenDict, unfreeze
from t5x import checkpoints, partitioning, utils

# A checkpoint that does not fit differs in few names or in all: three are enough.
NUM_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds, as the model holds it.

    Attributes:
        state: T5X's state, laid out over the mesh.
        step: the training step of the checkpoint.
        path: where it was read.
    """

    state: Any
    step: int
    path: str

    @property
    def params(self) -> Any:
        """The parameter tree."""
        return self.state.params


class Restorer:
    """Restores states for one model on one mesh."""

    def __init__(
        self,
        initializer: utils.TrainStateInitializer,
        partitioner: partitioning.BasePartitioner,
        cfg: utils.RestoreCheckpointConfig,
        use_orbax: bool = True,
    ):
        """Parameters as `initializer` would make them, of the checkpoints of `cfg`.

        Args:
            initializer: T5X's; made with `optimizer_def=None` it leaves out the
                optimizer's state.
            partitioner: T5X's partitioner.
            cfg: T5X's restore configuration; it may rename or transform parameters.
            use_orbax: False only for T5X's single-file checkpoints.
        """
        self._initializer = initializer
        self._partitioner = partitioner
        self._cfg = cfg
        self._use_orbax = use_orbax
        check_mesh(
            initializer.global_train_state_shape.params,
            initializer.train_state_axes.params,
            partitioner.mesh.shape,
        )

    def restore(self, path: str | None = None) -> Restored:
        """The checkpoint at `path`, or at the path of the configuration.

        Raises:
            ValueError: if there is no checkpoint, or if its parameters do not fit.
        """
        cfg = copy.copy(self._cfg)  # not dataclasses.replace: it would rename twice
        cfg.strict = False  # the optimizer's state is dropped
        if path is not None:
            cfg.path, cfg.mode = path, "specific"
        found = find_checkpoint(cfg)
        if not cfg.state_transformation_fns:
            shapes = self._initializer.global_train_state_shape.params
            check_parameters(parameter_shapes(found), _shapes(shapes), found)
        state, _ = utils.create_checkpoint_manager_and_restore(
            self._initializer,
            self._partitioner,
            cfg,
            found,
            fallback_init_rng=None,
            use_orbax=self._use_orbax,
        )
        if state is None:
            raise ValueError(f"T5X could not restore the checkpoint {found}.")
        step = int(np.asarray(utils.get_local_data(state.step)))
        return Restored(state, step, found)


def find_checkpoint(cfg: utils.RestoreCheckpointConfig) -> str:
    """The path of the one checkpoint that the configuration names.

    Raises:
        ValueError: there is none, with what lies there; or there are several.
    """
    if not isinstance(cfg.path, str) or cfg.mode == "all":
        raise ValueError(
            f"An analysis takes one checkpoint: got CHECKPOINT_PATH = {cfg.path!r} with "
            f"mode {cfg.mode!r}."
        )
    path = cfg.path.rstrip("/")
    steps = _steps(path)
    if cfg.mode == "latest" and steps:
        return os.path.join(path, steps[-1])
    if epath.Path(path).exists() and not steps and cfg.mode == "specific":
        return path
    if epath.Path(f"{path}.index").exists():  # TensorFlow's
        return path
    if steps:
        raise ValueError(
            f"CHECKPOINT_PATH must be one checkpoint: {path} is a folder of several; "
            f"give one of {_listed(path, steps)}."
        )
    parent = os.path.dirname(path)
    there = _steps(parent)
    if there:
        what = f"{parent} has {_listed('', there)}"
    elif epath.Path(parent).exists():
        names = sorted(p.name for p in epath.Path(parent).iterdir())
        what = f"{parent} has {_listed('', names) if names else 'nothing in it'}"
    else:
        what = f"the folder {parent} does not exist"
    raise ValueError(f"There is no checkpoint at CHECKPOINT_PATH = {path}: {what}.")


def parameter_shapes(path: str) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the parameters of a checkpoint by name; None where T5X must tell."""
    root = epath.Path(path)
    state = root / "state"
    for folder in (state, root):
        if (folder / "_METADATA").exists():
            metadata = ocp.PyTreeCheckpointHandler().metadata(folder)
            tree = getattr(metadata, "tree", metadata)
            return _shapes(tree.get("target", {}))
    if (root / "checkpoint").exists():
        try:
            found = checkpoints.load_t5x_checkpoint(path, lazy_parameters=True)
        except (AttributeError, KeyError, ValueError):
            return None  # a format that only T5X's restoring code knows
        return _shapes(found["target"])
    return None


def check_parameters(
    found: Mapping[str, tuple[int, ...]] | None,
    wanted: Mapping[str, tuple[int, ...]],
    path: str,
) -> None:
    """Pass if a checkpoint has the parameters of the model, and no others.

    Raises:
        ValueError: names the first few that differ, with both sides.
    """
    if found is None or found == wanted:
        return
    names = [n for n in sorted({**found, **wanted}) if found.get(n) != wanted.get(n)]
    sides = [
        f"{name}: checkpoint {_side(found, name)}, model {_side(wanted, name)}"
        for name in names[:NUM_NAMED]
    ]
    more = f"; and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    raise ValueError(
        f"The parameters of {path} must be those of MODEL: {len(names)} differ: "
        f"{'; '.join(sides)}{more}."
    )


def check_mesh(shapes, axes, mesh_shape: Mapping[str, int]) -> None:
    """Pass if every dimension that is laid over mesh axes is divided by them.

    Raises:
        ValueError: names the parameter, the dimension and the axis.
    """
    specs = _flat(axes)
    for name, shape in _shapes(shapes).items():
        spec = specs.get(name) or ()
        for size, entry in zip(shape, spec, strict=False):
            over = (entry,) if isinstance(entry, str) else tuple(entry or ())
            parts = int(np.prod([mesh_shape[axis] for axis in over], dtype=int))
            if size % parts:
                raise ValueError(
                    f"The mesh must divide every parameter: {name} {shape} has a "
                    f"dimension of {size} over axis {'x'.join(over)} of {parts}."
                )


def _steps(path: str) -> list[str]:
    folder = epath.Path(path)
    if not folder.is_dir():
        return []
    names = [p.name for p in folder.iterdir()]
    found = [n for n in names if re.fullmatch(r"checkpoint_\d+", n)]
    return sorted(found, key=lambda n: int(n.split("_")[1]))


def _listed(folder: str, names, most: int = 8) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(os.path.join(folder, n) for n in names[-most:]) + more


def _flat(tree) -> dict[str, Any]:
    tree = unfreeze(tree) if isinstance(tree, FrozenDict) else tree
    return flax.traverse_util.flatten_dict(dict(tree), sep="/")


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in _flat(tree).items()}


def _side(shapes, name) -> str:
    return str(shapes[name]) if name in shapes else "has none"


def mesh_words(mesh: jax.sharding.Mesh) -> str:
    """The mesh as text, such as `data 1 x model 8`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
