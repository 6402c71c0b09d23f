"""One writer per folder: a lock that ends with the process that holds it.

The lock is the operating system's (`flock`), so that a killed process does not keep it.
It works on local disks and on most network disks. Remote storage (`gs://`) has none: do
not start two runs into one folder there.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator

from absl import logging
from etils import epath

from t5x_fwdloss.analysis.store import files

# Errors of file systems without locks.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def held(path: epath.Path, folder: epath.PathLike) -> Iterator[None]:
    """Hold a lock, whose file exists as long as it is held.

    If another process holds it, `StorageError` names that process.

    Args:
        path: the file of the lock.
        folder: the folder that it locks.
    """
    if not files.is_local(path):
        yield
        return
    with files.writing(path):
        descriptor = _locked(path, folder)
    try:
        with files.writing(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_owner()).encode())
        yield
    finally:
        # Before the lock is released, or this would remove the file of the next holder.
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _locked(path, folder) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 1000)
            os.close(descriptor)
            raise files.StorageError(_busy(folder, owner)) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise
            logging.warning("%s has no locks: start no second run there.", folder)
            return descriptor
        if _is_at(descriptor, path):
            return descriptor
        # The last holder removed the file between our two calls: try again.
        os.close(descriptor)


def _is_at(descriptor, path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _owner() -> dict[str, str | int]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": now}


def _busy(folder, content) -> str:
    try:
        owner = json.loads(content)
        who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return (
        f"Only one run may write to {folder} at a time: {who}, is writing there. Wait "
        "until it has ended, or choose another folder."
    )
