"""Files that are written as a whole or not at all, local or in a bucket."""

import contextlib
import errno
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from t5x_fwdloss.analysis.numbers import to_json

# Errors of parsers at damaged content.
DAMAGED = (
    json.JSONDecodeError,
    UnicodeError,
    RecursionError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)
# Errors of readers at missing or wrong parts.
OTHER_PARTS = (LookupError, TypeError, AttributeError)
# TensorStore's messages, which Orbax quotes: the operating system's words among its
# own, or a status code in front.
QUOTED = [
    os.strerror(code)
    for code in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
    )
]
STATUSES = {
    r"\bNOT_FOUND\b|not found in checkpoint|does not exist": "a file in it is missing",
    r"\b(DATA_LOSS|INVALID_ARGUMENT|FAILED_PRECONDITION|OUT_OF_RANGE)\b|"
    "reading array index": "a file in it is damaged",
}


class StorageError(ValueError):
    """A file that a run needs cannot be read or written; the message names its path."""


def user_path(path: epath.PathLike) -> epath.Path:
    """The path that a user gave: a local one absolute, with `~` expanded.

    Args:
        path: local, or in remote storage, such as `gs://bucket/folder`, which is kept.

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
    """Write a file to disk completely or not at all.

    A local file is written under another name beside `path`, synced, and moved over it.
    A remote object is always written as a whole. A failure raises `StorageError`.
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
    """Sync the names in a local folder to disk; remote storage does so by itself."""
    if not is_local(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: epath.Path) -> None:
    """Remove a file, or a folder with its content, if it exists."""
    with writing(path):
        if path.is_dir():
            path.rmtree(missing_ok=True)
        elif path.exists():
            path.unlink(missing_ok=True)


def remove_parts(folder: epath.Path) -> None:
    """Remove the leftovers of a killed write from a folder."""
    for part in folder.glob(".*.part"):
        remove(part)


def write_json(path: epath.PathLike, document: Any) -> None:
    """Write strict, indented JSON: no NaN, no Infinity."""
    text = json.dumps(to_json(document), indent=2, allow_nan=False, ensure_ascii=False)
    write_bytes(path, (text + "\n").encode())


def write_arrays(path: epath.PathLike, arrays: dict[str, np.ndarray]) -> None:
    """Write a compressed .npz file."""
    buffer = io.BytesIO()
    named: Any = {name: np.asarray(x) for name, x in arrays.items()}
    np.savez_compressed(buffer, **named)
    write_bytes(path, buffer.getvalue())


def read_json(path: epath.PathLike) -> Any:
    """The document in a JSON file; a failure raises `StorageError`."""
    with reading(path):
        return json.loads(epath.Path(path).read_text())


def read_arrays(path: epath.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a .npz file; a failure raises `StorageError`."""
    with reading(path):
        content = io.BytesIO(epath.Path(path).read_bytes())
        # NumPy calls anything else pickled.
        zipfile.ZipFile(content).close()
        content.seek(0)
        with np.load(content) as found:
            return {name: found[name] for name in found.files}


def writing(path: epath.PathLike) -> contextlib.AbstractContextManager[None]:
    """Turn any failure inside into an error that this path cannot be written.

    `StorageError` has the reason, such as a full disk.
    """
    return _failing(
        f"{path} must be writable",
        "What was saved before is kept: when there is space and permission, start the "
        "same command again to resume.",
    )


def reading(path: epath.PathLike) -> contextlib.AbstractContextManager[None]:
    """Turn any failure inside into an error that this path cannot be read.

    `StorageError` has the reason, such as a truncated file.
    """
    return _failing(
        f"{path} must be whole and readable",
        "If it is damaged, move it away, or choose another folder.",
    )


@contextlib.contextmanager
def _failing(wanted: str, remedy: str) -> Iterator[None]:
    # Every storage library has its own exceptions, which all mean the same here.
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"{wanted}: {reason(error)}. {remedy}") from error


def reason(error: BaseException) -> str:
    """Why something cannot be read or written, in a few words.

    Messages of JSON, NumPy, Orbax and TensorStore on damaged files are about their
    internals and replaced; for anything else it is the first line of the exception.
    """
    found = storage_reason(error)
    if found:
        return found
    if isinstance(error, OTHER_PARTS):
        return "a part of it is missing or of another kind"
    return first_line(error) or type(error).__name__


def storage_reason(error: BaseException) -> str:
    """The reason that files or a storage give by this error; '' if it is unclear."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, DAMAGED):
        return "its content is damaged"
    if isinstance(error, OTHER_PARTS):
        return ""
    text = str(error)
    found = [words for words in QUOTED if words in text]
    found += [words for code, words in STATUSES.items() if re.search(code, text)]
    if found:
        return found[0]
    status = re.match(r"([A-Z]{2}[A-Z_]+): ", text)
    return (
        f"the storage reports {status[1].replace('_', ' ').lower()}" if status else ""
    )


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200].rstrip(".") if lines else ""


def _write_synced(path, content) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
