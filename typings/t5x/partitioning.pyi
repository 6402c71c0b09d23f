from typing import Any

import jax

class DataLayout:
    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool

class BasePartitioner:
    @property
    def mesh(self) -> jax.sharding.Mesh: ...
    @property
    def data_partition_spec(self) -> jax.sharding.PartitionSpec: ...
    @property
    def data_mesh_size(self) -> int: ...
    def get_data_layout(
        self, batch_size: int | None = None, host_index: int | None = None
    ) -> DataLayout: ...

def __getattr__(name: str) -> Any: ...
