from typing import Any

class OptimizerDef:
    hyper_params: Any
    def init_state(self, params: Any) -> Any: ...

class OptaxWrapper(OptimizerDef):
    optax_optimizer: Any

class Optimizer:
    optimizer_def: Any
    state: Any
    target: Any
    def __init__(self, optimizer_def: Any, state: Any, target: Any) -> None: ...
