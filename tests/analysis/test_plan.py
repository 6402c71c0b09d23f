"""The plan of a run: its memory is the run's, its operations are those of closed forms."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from t5x_fwdloss.analysis.plan import compiled

from . import plan_program

WITHIN = 0.15


@pytest.fixture(scope="module")
def bytes_found(repository):
    """By number of devices and measurement, the bytes planned and seen in a run."""
    flags = "--xla_force_host_platform_device_count=9"
    done = subprocess.run(
        [sys.executable, "-m", "tests.analysis.plan_program"],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("devices", ["1", "8"])
def test_the_memory_is_what_a_run_takes(bytes_found, devices):
    found = bytes_found[devices]
    names = [m.name for m in plan_program.measurements()]
    assert list(found) == ["checks", *names]
    for name, sizes in found.items():
        assert sizes["planned"] == pytest.approx(sizes["seen"], rel=WITHIN), name
        # More than this it may not take, or the run ends in the middle.
        assert sizes["planned"] >= 0.99 * sizes["seen"], name


def test_eight_devices_take_less_each(bytes_found):
    for name, sizes in bytes_found["8"].items():
        assert sizes["planned"] < 0.5 * bytes_found["1"][name]["planned"]


def test_operations_in_a_loop_count_as_often_as_it_runs():
    size, length = 24, 7

    @jax.jit
    def function(matrices, x):
        x, _ = jax.lax.scan(lambda x, a: (a @ x, None), x, matrices)
        return x @ x

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    found = compiled.size_of(function, shape(length, size, size), shape(size, size))
    assert found.flops == pytest.approx(2 * size**3 * (length + 1), rel=0.02)
    assert found.output == 4 * size**2
