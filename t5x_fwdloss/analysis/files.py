"""Files that appear whole or not at all, local or in a bucket."""

import io
import json
import os
from typing import Any

import numpy as np
from etils import epath

from t5x_fwdloss.analysis.numbers import to_json


def write_bytes(path: epath.PathLike, content: bytes) -> None:
    """Write to a temporary name beside `path`, then move over it in one step."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.unlink()


def write_json(path: epath.PathLike, document: Any) -> None:
    """Write strict JSON, readable by a person: no NaN, no Infinity."""
    text = json.dumps(to_json(document), indent=2, allow_nan=False, ensure_ascii=False)
    write_bytes(path, (text + "\n").encode())


def write_arrays(path: epath.PathLike, arrays: dict[str, np.ndarray]) -> None:
    """Write a compressed .npz file."""
    buffer = io.BytesIO()
    named: Any = {name: np.asarray(x) for name, x in arrays.items()}
    np.savez_compressed(buffer, **named)
    write_bytes(path, buffer.getvalue())


def read_json(path: epath.PathLike) -> Any:
    """The document in a JSON file."""
    return json.loads(epath.Path(path).read_text())


def read_arrays(path: epath.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a .npz file."""
    with np.load(io.BytesIO(epath.Path(path).read_bytes())) as found:
        return {name: found[name] for name in found.files}
