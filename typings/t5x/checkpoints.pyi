from collections.abc import Sequence
from typing import Any

def load_t5x_checkpoint(
    path: str,
    step: int | None = None,
    state_transformation_fns: Sequence[Any] = (),
    remap: bool = True,
    restore_dtype: Any = None,
    lazy_parameters: bool = False,
) -> Any: ...
def __getattr__(name: str) -> Any: ...
