import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio
from t5x import models, partitioning

@dataclasses.dataclass
class RestoreCheckpointConfig:
    path: str | Sequence[str]
    mode: str = "latest"
    assignment_map: Sequence[tuple[str, str | None]] | None = None
    strict: bool = True
    fallback_to_scratch: bool = False
    dtype: str | None = None
    restore_dataset: bool = False
    checkpointer_cls: Any = ...
    state_transformation_fns: Sequence[Any] = ()

@dataclasses.dataclass
class DatasetConfig:
    mixture_or_task_name: Any
    task_feature_lengths: Mapping[str, int]
    split: str
    batch_size: int
    shuffle: bool
    seed: int | None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    module: str | None = None

class TrainStateInitializer:
    global_train_state_shape: Any
    train_state_axes: Any
    def __init__(
        self,
        optimizer_def: Any,
        init_fn: Any,
        input_shapes: Mapping[str, Any],
        partitioner: partitioning.BasePartitioner,
        input_types: Mapping[str, Any] | None = None,
    ) -> None: ...

def create_checkpoint_manager_and_restore(
    train_state_initializer: TrainStateInitializer,
    partitioner: partitioning.BasePartitioner,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    restore_path: str | None,
    fallback_init_rng: Any,
    save_checkpoint_cfg: Any = None,
    model_dir: str | None = None,
    ds_iter: Any = None,
    use_orbax: bool = False,
) -> tuple[Any, Any]: ...
def get_dataset(
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    feature_converter_cls: Callable[..., seqio.FeatureConverter],
    num_epochs: int | None = None,
    continue_from_last_checkpoint: bool = False,
) -> Any: ...
def get_local_data(x: Any) -> Any: ...
def import_module(module: str) -> None: ...
def verify_matching_vocabs(
    cfg: DatasetConfig, model: models.BaseTransformerModel
) -> None: ...
def __getattr__(name: str) -> Any: ...
