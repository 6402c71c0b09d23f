from collections.abc import Mapping, Sequence
from typing import Any

def apply_assignment_map(
    ckpt_optimizer_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
    assignment_map: Sequence[tuple[str, str | None]],
    require_all_rules_match: bool = True,
) -> Any: ...
def __getattr__(name: str) -> Any: ...
