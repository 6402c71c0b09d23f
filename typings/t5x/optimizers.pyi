from typing import Any

class OptimizerDef:
    hyper_params: Any
    def init_state(self, params: Any) -> Any: ...

class OptaxWrapper(OptimizerDef):
    optax_optimizer: Any
