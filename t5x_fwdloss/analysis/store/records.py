"""Records: files with a checksum, which a run reads back.

A record is a JSON object that holds the SHA-256 of the rest of its content. Any later
change, even of one digit, is found when it is read, so that a run never resumes with
another number.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x_fwdloss.analysis.numbers import to_json
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


def _digest(content) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
