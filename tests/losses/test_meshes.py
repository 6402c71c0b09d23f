"""The laws under shard_map, on a mesh with Explicit axes and over eight devices."""

import os
import subprocess
import sys

import pytest

from losses import mesh_run
from losses.subjects import SUBJECTS


@pytest.mark.parametrize("kind", mesh_run.KINDS)
def test_every_loss_keeps_the_laws_on_a_mesh(kind, repository):
    # Blocks are a matter of one device.
    names = [name for name in SUBJECTS if not SUBJECTS[name].in_blocks]
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
        "--xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(repository), str(repository / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "losses.mesh_run", kind, *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found == dict.fromkeys(names, "ok"), done.stderr[-2000:]
