from typing import Any

class BaseTrainer:
    train_metrics_manager: Any
    train_state: Any
    _model: Any
    _partitioner: Any
    _train_state_axes: Any
    _compiled_train_step: Any
    _partitioned_train_step: Any
    def _get_step_rng(self, step: Any) -> Any: ...
    def train(
        self, batch_iter: Any, num_steps: int, start_step: int | None = None
    ) -> Any: ...
    def compile_train(self, batch: Any) -> None: ...

def __getattr__(name: str) -> Any: ...
