from collections.abc import Callable, Sequence
from typing import Any

def parse_gin_flags(
    gin_search_paths: Sequence[str],
    gin_files: Sequence[str],
    gin_bindings: Sequence[str],
    skip_unknown: bool | Sequence[str] = False,
    finalize_config: bool = True,
) -> None: ...
def run(main: Callable[[Sequence[str]], Any]) -> None: ...
def __getattr__(name: str) -> Any: ...
