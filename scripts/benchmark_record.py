"""The record beside every benchmark's numbers: versions, device, load."""

import importlib.metadata
import json
import os
import pathlib
import platform

import jax


def environment() -> dict:
    """Versions and machine, for the record."""
    names = ("jax", "jaxlib", "flax", "numpy")
    return {
        **{name: importlib.metadata.version(name) for name in names},
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "processors": os.cpu_count(),
        "load_at_start": [round(x, 1) for x in os.getloadavg()],
    }


def write(report: dict, path: pathlib.Path | None) -> None:
    """The report as JSON, if a path was given."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
