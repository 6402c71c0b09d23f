from typing import Any

HEURISTIC_RULE: Any

class Adafactor:
    hyper_params: Any
    def _parse_rule(self, rule: Any, shape: Any, path: str) -> tuple[Any, Any]: ...
    def _factored_dims(self, shape: Any) -> Any: ...

def __getattr__(name: str) -> Any: ...
