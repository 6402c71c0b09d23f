"""Parameters of a T5X checkpoint, on the mesh; bad input is named before restoring.

Orbax checkpoints and T5X's older formats both restore, through T5X's own manager.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.core import FrozenDict, unfreeze
from t5x import checkpoints, partitioning, state_utils, utils

from t5x_fwdloss import progress
from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.analysis.store import files

# A checkpoint that does not fit differs in few names or in all: three are enough.


@dataclasses.dataclass(frozen=True)
class Restored:
    """The content of a checkpoint, in the model's form.

    Attributes:
        state: T5X's state, laid out over the mesh.
        step: the training step of the checkpoint.
        path: the path it was read from.
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
            initializer: T5X's; created with `optimizer_def=None` it leaves out the
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

        Either may be a folder of checkpoints, of which the latest is restored. If there
        is none, or its parameters do not fit, it raises `ValueError`.
        """
        cfg = copy.copy(self._cfg)  # not dataclasses.replace: it would rename twice
        cfg.strict = False  # the optimizer's state is dropped
        cfg.restore_dataset = False
        if path is not None:
            cfg.path = path
        found = find_checkpoint(cfg)
        cfg.path, cfg.mode = found, "specific"
        wanted = _shapes(self._initializer.global_train_state_shape.params)
        fit_to_checkpoint(cfg, parameter_shapes(found), wanted)
        with progress.stage(f"Restoring {found}", is_primary=jax.process_index() == 0):
            return self._restored(cfg, found)

    def _restored(self, cfg, found) -> Restored:
        """The state that T5X restores.

        Raises:
            ValueError: T5X restores nothing.
        """
        with _restoring(found):
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


def described(
    initializer: utils.TrainStateInitializer,
    partitioner: partitioning.BasePartitioner,
) -> Any:
    """The shapes of the parameters that `Restorer` would restore, on their mesh.

    A mesh that does not divide them raises `ValueError`.

    Args:
        initializer: T5X's.
        partitioner: T5X's partitioner.
    """
    shapes = initializer.global_train_state_shape.params
    axes = initializer.train_state_axes.params
    check_mesh(shapes, axes, partitioner.mesh.shape)

    def one(shape, spec):
        sharding = jax.sharding.NamedSharding(partitioner.mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(one, unfreeze(shapes), unfreeze(axes))


@contextlib.contextmanager
def _restoring(path: str) -> Iterator[None]:
    """Turn any error of T5X inside into one that this checkpoint could not be read.

    T5X's code reads files and applies the configuration: only errors of files or a
    storage are called damage, the others keep their type and words.

    Raises:
        StorageError: with the path.
    """
    with files.reading(path):
        try:
            yield
        except Exception as error:
            if isinstance(error, files.StorageError) or files.storage_reason(error):
                raise
            words = f"{type(error).__name__}: {files.first_line(error)}"
            raise files.StorageError(
                f"The checkpoint {path} could not be read: {words.rstrip(': ')}. Either a "
                "part of it is missing or of another kind, or RestoreCheckpointConfig or "
                "MODEL asks T5X for what it cannot restore."
            ) from error


def find_checkpoint(cfg: utils.RestoreCheckpointConfig) -> str:
    """The path of the checkpoint that the configuration names.

    That is the path itself, or the latest checkpoint in it, in either mode of T5X.

    Raises:
        ValueError: there is none, listing what is there; or several are requested.
    """
    if not isinstance(cfg.path, str) or cfg.mode == "all":
        raise ValueError(
            f"An analysis takes one checkpoint: got CHECKPOINT_PATH = {cfg.path!r} with "
            f"mode {cfg.mode!r}."
        )
    path = os.fspath(files.user_path(cfg.path)).rstrip("/")
    steps = _steps(path)
    if steps:
        return os.path.join(path, steps[-1])
    if _is_checkpoint(path):
        return path
    if epath.Path(f"{path}.index").exists():  # TensorFlow's
        return path
    folder = path if epath.Path(path).is_dir() else os.path.dirname(path)
    there = _steps(folder)
    if there:
        what = f"{folder} has {_listed('', there)}"
    elif epath.Path(folder).exists():
        names = sorted(p.name for p in epath.Path(folder).iterdir())
        what = f"{folder} has {_listed('', names) if names else 'nothing in it'}"
    else:
        what = f"the folder {folder} does not exist"
    raise ValueError(f"There is no checkpoint at CHECKPOINT_PATH = {path}: {what}.")


def fit_to_checkpoint(
    cfg: utils.RestoreCheckpointConfig,
    found: Mapping[str, Any] | None,
    wanted: Mapping[str, Any],
) -> None:
    """Changes a restore configuration so that no parameter starts from scratch.

    Models that add parameters to a pretrained one (prompts, adapters) say in their gin
    file how training starts: `assignment_map` leaves the new ones out and
    `fallback_to_scratch` draws them. A checkpoint that training saved has them all:
    then both settings are dropped, as T5X drops them when it resumes. An
    `assignment_map` that renames parameters of another model is kept.

    Args:
        cfg: T5X's restore configuration of one path.
        found: shapes of the checkpoint's parameters by name; None: unknown.
        wanted: those of the model.

    A checkpoint that lacks parameters, or has others, raises `ValueError`.
    """
    cfg.fallback_to_scratch = False
    if cfg.assignment_map is not None and found is not None:
        rest = cfg.state_transformation_fns[1:]  # T5X puts the map in front
        rename = functools.partial(
            state_utils.apply_assignment_map,
            assignment_map=cfg.assignment_map,
            require_all_rules_match=False,  # some are for the optimizer's state
        )
        cfg.state_transformation_fns = rest if found == wanted else (rename, *rest)
        if found != wanted and not rest:
            _check_renamed(rename, found, wanted, cfg.path)
    if not cfg.state_transformation_fns and found is not None:
        parameters.check_same(found, wanted, str(cfg.path))


def _check_renamed(rename, found, wanted, path) -> None:
    """Pass if a map gives every parameter of the model one of the checkpoint.

    Raises:
        ValueError: the map leaves parameters out, or does not fit the checkpoint.
    """
    nested = [
        flax.traverse_util.unflatten_dict(
            {f"target/{name}": shape for name, shape in shapes.items()}, sep="/"
        )
        for shapes in (found, wanted)
    ]
    try:
        renamed = _flat(rename(*nested).get("target", {}))
    except ValueError as error:
        reason = str(error).split(". Must")[0]
        raise ValueError(
            f"The assignment_map must fit the checkpoint {path}: {reason}."
        ) from error
    lacking = sorted(set(wanted) - set(renamed))
    if lacking:
        more = len(lacking) - parameters.NUM_NAMED
        raise ValueError(
            "The checkpoint must have every parameter of MODEL, because an analysis "
            f"starts none from scratch, whatever fallback_to_scratch says: {path} has "
            f"no {', '.join(lacking[: parameters.NUM_NAMED])}{f' and {more} more' * (more > 0)}; "
            "give a checkpoint that training with this model saved."
        )
    renamed = {name: renamed[name] for name in wanted}
    parameters.check_same(renamed, wanted, path)


def _is_checkpoint(path: str) -> bool:
    root = epath.Path(path)
    parts = ("state", "checkpoint", "_METADATA")  # Orbax's, and T5X's older formats'
    return any((root / part).exists() for part in parts)


def parameter_shapes(path: str) -> dict[str, Any] | None:
    """Shapes of a checkpoint's parameters by name; None if only T5X can read them."""
    root = epath.Path(path)
    state = root / "state"
    for folder in (state, root):
        if (folder / "_METADATA").exists():
            with files.reading(folder):
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


def check_mesh(shapes, axes, mesh_shape: Mapping[str, int]) -> None:
    """Pass if mesh axes divide every dimension that is sharded over them.

    Raises:
        ValueError: it names the parameter, the dimension and the axis.
    """
    specs = _flat(axes)
    for name, leaf in _flat(shapes).items():
        shape = tuple(leaf.shape)
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


def _shapes(tree) -> dict[str, Any]:
    return {name: parameters.shape_and_kind(x) for name, x in _flat(tree).items()}


def mesh_words(mesh: jax.sharding.Mesh) -> str:
    """The mesh as text, such as `data 1 x model 8`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
