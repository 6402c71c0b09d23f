"""Records: files with a checksum, which a run reads back.

A record is a JSON object that holds the SHA-256 of the rest of its content. Any later
change, even of one digit, is found when it is read, so that a run never resumes with
another number.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x_fwdloss.analysis.numbers import arrays_digest, to_json
from t5x_fwdloss.analysis.store import files

CHECKSUM = "sha256"


def write(path: epath.PathLike, document: Mapping[str, Any]) -> None:
    """Write a document with its checksum, whole or not at all."""
    content = to_json(dict(document))
    files.write_json(path, content | {CHECKSUM: _digest(content)})


def read(path: epath.PathLike) -> dict[str, Any]:
    """The document that was written, without its checksum.

    Args:
        path: the file.

    Raises:
        StorageError: it cannot be read, or was changed since.
    """
    found = files.read_json(path)
    with files.reading(path):
        if isinstance(found, dict) and found.pop(CHECKSUM, None) == _digest(found):
            return found
    raise files.StorageError(
        f"{path} must hold what a run of this version wrote there: its checksum "
        "is missing or differs. If it is damaged, move it away, or choose another folder."
    )


def check_schema(
    path: epath.PathLike, document: Mapping[str, Any], version: int
) -> None:
    """Check that a document has the members that this version reads.

    Args:
        path: its file.
        document: its content.
        version: the `schema_version` that this version writes there.

    Raises:
        StorageError: it has another one, or none.
    """
    found = document.get("schema_version", "none")
    if found != version:
        raise files.StorageError(
            f"{path} must have the schema_version of this version, {version}: got "
            f"{found}; another version wrote it, and it is left as it is."
        )


def arrays(found: Mapping[str, Any], path: epath.PathLike) -> dict[str, np.ndarray]:
    """The arrays of a stored result.

    Args:
        found: the result, with the checksum of its arrays.
        path: their file.

    Raises:
        StorageError: they are not the arrays that were stored with it.
    """
    stored = files.read_arrays(path)
    if arrays_digest(stored) != found["arrays_sha256"]:
        raise files.StorageError(
            f"{path} must hold the arrays that a run wrote there: their checksum "
            "differs. If it is damaged, move it away, or choose another folder."
        )
    return stored


def _digest(content) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
