"""The fixed list of batches of an analysis, from a T5X `DatasetConfig`.

A batch is one global array per feature, laid out over the mesh as T5X's trainer lays out
its batches. Every process reads all examples of the few batches and keeps its devices'
part: with shards of the data, as a trainer reads them, a batch's examples or their
order would depend on the number of processes.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import seqio
import tensorflow as tf
from jax.experimental import multihost_utils
from t5x import models, partitioning, utils

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.command_line import batch_of_ones as batch_of_ones_lib
from t5x_fwdloss.command_line import seqio_sentences

Batch = dict[str, jax.Array]
TASK = settings.Rule(
    "the name of a task or mixture, a string, or a task itself",
    lambda x: isinstance(x, str) or hasattr(x, "splits"),
    alone=True,
)
LENGTH = settings.Positive | None | Sequence[settings.Positive | None]
CONFIG = {
    "mixture_or_task_name": Annotated[Any, TASK],
    "task_feature_lengths": Mapping[settings.Words, LENGTH],
    "split": settings.Words,
    "batch_size": settings.Positive,
    "seed": int | None,
    "use_cached": bool,
    "pack": bool,
    "module": settings.Words | None,
}


def load_batches(
    cfg: utils.DatasetConfig,
    num_batches: int,
    partitioner: partitioning.BasePartitioner,
    feature_converter_cls: Callable[..., seqio.FeatureConverter],
) -> list[Batch]:
    """The first batches of one pass over the data, as arrays on the mesh.

    Args:
        cfg: T5X's dataset configuration; a seed of None counts as 0, because the list
            of batches must be the same in every run.
        num_batches: how many batches; the data must have that many.
        partitioner: T5X's partitioner.
        feature_converter_cls: the model's feature converter.

    Raises:
        ValueError: unknown task, a batch size that the mesh does not divide, data that
            SeqIO cannot read, or too little data.
    """
    check_task(cfg)
    check_batch_size(cfg.batch_size, partitioner.data_mesh_size)
    if cfg.seed is None:
        cfg = dataclasses.replace(cfg, seed=0)
    with seqio_sentences.reading(task_name(cfg), cfg.split):
        ds = utils.get_dataset(
            cfg,
            shard_id=0,
            num_shards=1,
            feature_converter_cls=feature_converter_cls,
            num_epochs=1,
        )
        local = _first(ds, num_batches)
    found = int(np.min(multihost_utils.process_allgather(np.int32(len(local)))))
    if found < num_batches:
        raise ValueError(
            f"{task_name(cfg)!r}, split {cfg.split!r}, must give NUM_BATCHES = "
            f"{num_batches} batches of BATCH_SIZE = {cfg.batch_size}: got {found}"
            f"{'' if found else ' (no full batch)'}."
        )
    return [_global(batch, partitioner) for batch in local]


def batch_of_ones(
    cfg: utils.DatasetConfig,
    partitioner: partitioning.BasePartitioner,
    feature_converter_cls: Callable[..., seqio.FeatureConverter],
) -> Batch:
    """A batch with the shapes and the layout of those of `load_batches`, without data.

    A batch size that the mesh does not divide raises `ValueError`.

    Args:
        cfg: T5X's dataset configuration.
        partitioner: T5X's partitioner.
        feature_converter_cls: the model's feature converter.
    """
    check_batch_size(cfg.batch_size, partitioner.data_mesh_size)
    converter = feature_converter_cls(pack=cfg.pack)
    ones = batch_of_ones_lib.batch_of_ones(
        converter, cfg.task_feature_lengths, cfg.batch_size
    )
    return _global(ones, partitioner)


def check_config(cfg: utils.DatasetConfig) -> None:
    """Pass if the fields of T5X's dataset configuration have the right types.

    `ValueError` names the first with a wrong type, by gin's macro.
    """
    names = {"use_cached": "USE_CACHED_TASKS", "module": "MIXTURE_OR_TASK_MODULE"}
    for name, kind in CONFIG.items():
        settings.check(names.get(name, name.upper()), getattr(cfg, name), kind)


def check_task(cfg: utils.DatasetConfig) -> None:
    """Pass if the task or mixture is registered.

    Raises:
        ValueError: with the closest registered names, or why its module is not imported.
    """
    if cfg.module:
        try:
            utils.import_module(cfg.module)
        except Exception as error:
            raise ValueError(
                "MIXTURE_OR_TASK_MODULE must be a module that can be imported: got "
                f"{cfg.module!r}, which raises {type(error).__name__}: "
                f"{seqio_sentences.reason(error)}"
            ) from error
    task = cfg.mixture_or_task_name
    if not isinstance(task, str):
        return
    names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    if task not in names:
        close = difflib.get_close_matches(task, names, n=5, cutoff=0.5) or sorted(names)
        raise ValueError(
            f"MIXTURE_OR_TASK_NAME must be a registered SeqIO task or mixture: got "
            f"{task!r}; {'close to it' if task else 'registered'}: "
            f"{', '.join(close[:5]) or 'none'}. A task is registered when its module is "
            f"imported: add 'import my_project.tasks' to a gin file."
        )


def check_vocabularies(
    cfg: utils.DatasetConfig,
    model: models.BaseTransformerModel,
    verify: Callable[..., None],
) -> None:
    """Pass if the task and the model have the same vocabularies.

    Args:
        cfg: T5X's dataset configuration.
        model: T5X's model.
        verify: T5X's `verify_matching_vocabs` or a function like it.

    Raises:
        ValueError: if they differ, or the task has not exactly one vocabulary per side.
    """
    try:
        verify(cfg, model)
    except Exception as error:
        raise ValueError(
            f"The vocabularies of the task {task_name(cfg)!r} must be those of MODEL: "
            f"{seqio_sentences.reason(error)}"
        ) from error


def check_batch_size(batch_size: int, data_mesh_size: int) -> None:
    """Pass if the data axis of the mesh divides the batch.

    Raises:
        ValueError: if it does not, or if the batch is empty.
    """
    if batch_size < 1 or batch_size % data_mesh_size:
        raise ValueError(
            "BATCH_SIZE must be a positive multiple of the data axis of the mesh: got "
            f"BATCH_SIZE = {batch_size}, data axis = {data_mesh_size}."
        )


def check_mesh(partitioner: partitioning.BasePartitioner) -> None:
    """Pass if T5X's partitioner can lay out its mesh over the present devices.

    Raises:
        ValueError: with the reason, such as a number of partitions that does not divide
            them.
    """
    try:
        assert partitioner.mesh is not None
        assert partitioner.data_mesh_size > 0
    except Exception as error:
        raise ValueError(
            f"{type(partitioner).__name__} must have settings that lay out a mesh over "
            f"the {jax.device_count()} devices: got {type(error).__name__}: "
            f"{seqio_sentences.reason(error)}"
        ) from error


def shapes_and_types(batch: Mapping[str, Any]):
    """The global shapes and dtypes of a batch, as T5X's initializer takes them."""
    shapes = {name: tuple(x.shape) for name, x in batch.items()}
    return shapes, {name: x.dtype for name, x in batch.items()}


def _first(ds, num_batches):
    iterator = ds.as_numpy_iterator() if isinstance(ds, tf.data.Dataset) else iter(ds)
    found = []
    for batch in iterator:
        found.append(dict(batch))
        if len(found) == num_batches:
            break
    return found


def _global(batch, partitioner) -> Batch:
    sharding = jax.sharding.NamedSharding(
        partitioner.mesh, partitioner.data_partition_spec
    )

    def placed(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    return {name: placed(np.asarray(x)) for name, x in batch.items()}


def task_name(cfg: utils.DatasetConfig) -> str:
    """The name of the task or mixture."""
    task = cfg.mixture_or_task_name
    return task if isinstance(task, str) else task.name
