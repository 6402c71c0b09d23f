"""Where a run was made: versions, commit, devices, time."""

import datetime
import importlib.metadata
import pathlib
import platform
import subprocess
from typing import Any

import jax

PACKAGES = (
    "t5x_fwdloss",
    "jax",
    "jaxlib",
    "flax",
    "orbax-checkpoint",
    "seqio",
    "numpy",
    "t5x",
)


def describe(mesh: Any = None) -> dict[str, Any]:
    """The environment as plain data, for `results.json`.

    Args:
        mesh: the `jax.sharding.Mesh` of the run, if it has one.
    """
    device = jax.devices()[0]
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "commit": commit(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "mesh": None if mesh is None else {k: int(v) for k, v in mesh.shape.items()},
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """The installed version of every package that can change a result."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the work tree this package runs from; None for a wheel."""
    root = pathlib.Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
