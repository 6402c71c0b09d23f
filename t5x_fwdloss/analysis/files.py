"""Files that appear whole or not at all, local or in a bucket."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from t5x_fwdloss.analysis.numbers import to_json


class StorageError(ValueError):
    """What a run must read or write cannot be read or written; names the path."""


def user_path(path: epath.PathLike) -> epath.Path:
    """The path that a user gave: a local one absolute, with `~` expanded.

    Args:
        path: local, or in remote storage, such as `gs://bucket/folder`, which stays.

    Raises:
        StorageError: there is no such home folder.
    """
    if not is_local(path):
        return epath.Path(path)
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise StorageError(f"The path must begin with a known home folder: got {path}.")
    return epath.Path(os.path.abspath(expanded))


def is_local(path: epath.PathLike) -> bool:
    """Whether a path is on a file system of this machine."""
    return "://" not in os.fspath(path)


def write_bytes(path: epath.PathLike, content: bytes) -> None:
    """Write a file that is there in full, on the disk itself, or not at all.

    A local file is written under another name beside `path`, synced, and moved over it.
    A remote object appears whole by itself. What cannot be written raises `StorageError`.
    """
    path = epath.Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not is_local(path):
            path.write_bytes(content)
            return
        temporary = path.parent / f".{path.name}.part"
        try:
            _write_synced(temporary, content)
            temporary.replace(path)
        except Exception:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def sync_folder(folder: epath.Path) -> None:
    """Make the names in a local folder last; remote storage does so by itself."""
    if not is_local(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: epath.Path) -> None:
    """Remove a file, or a folder with all that it holds; fine where there is none."""
    with writing(path):
        if path.is_dir():
            path.rmtree(missing_ok=True)
        elif path.exists():
            path.unlink(missing_ok=True)


def remove_parts(folder: epath.Path) -> None:
    """Remove what a write that was killed has left in a folder."""
    for part in folder.glob(".*.part"):
        remove(part)


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
    """The document in a JSON file; what cannot be read raises `StorageError`."""
    with reading(path):
        return json.loads(epath.Path(path).read_text())


def read_arrays(path: epath.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a .npz file; what cannot be read raises `StorageError`."""
    with reading(path):
        content = io.BytesIO(epath.Path(path).read_bytes())
        with np.load(content) as found:
            return {name: found[name] for name in found.files}


@contextlib.contextmanager
def writing(path: epath.PathLike) -> Iterator[None]:
    """Say of whatever fails inside that this path cannot be written.

    Raises:
        StorageError: with the reason, such as a full disk.
    """
    # Every storage library has exceptions of its own: all of them mean the same here.
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(
            f"{path} must be writable: {reason(error)}. What was saved before is kept: "
            "when there is space and permission, start the same command again to resume."
        ) from error


@contextlib.contextmanager
def reading(path: epath.PathLike) -> Iterator[None]:
    """Say of whatever fails inside that this path cannot be read.

    Raises:
        StorageError: with the reason, such as a truncated file.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(
            f"{path} must be whole and readable: {reason(error)}. If it is damaged, move "
            "it away, or choose another folder."
        ) from error


def reason(error: BaseException) -> str:
    """The first line of what an exception says, without a full stop."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = lines[0][:200].rstrip(".") if lines else ""
    return words or type(error).__name__


def _write_synced(path, content) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
