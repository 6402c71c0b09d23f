"""Every measurement on two real processes of two devices each: it ends, and is right."""

import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from . import sweeps, two_processes

# Two processes on two cores, on a machine that is busy.
pytestmark = pytest.mark.timeout(900)

# Differ with the mesh or from run to run: memory, times, numbers of products, rounding.
SKIPPED = ("time", "memory", "orthogonality", "num_products")


def start_both(repository, folder, *argv):
    """The same program as two processes that find each other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.analysis.two_processes", str(folder)]
    environment = os.environ | {
        "PYTHONPATH": f"{repository}{os.pathsep}{repository / 'tests'}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
        # Machine code need not be fast.
        "--xla_backend_optimization_level=0",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    return [
        subprocess.Popen(
            [*command, f"localhost:{port}", "2", str(index), *argv],
            cwd=repository,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def finish(processes, timeout):
    """Output and errors of each; all are killed when the time is over."""
    try:
        return [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def numbers(folder):
    document = json.loads((folder / "results.json").read_text())
    return {
        f"{measured['name']}/{name}": number["value"]
        for measured in document["measurements"]
        for name, number in measured["results"].items()
        if not any(part in name for part in SKIPPED)
    }


@pytest.fixture(scope="module")
def both(repository, tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    processes = start_both(repository, folder)
    outputs = finish(processes, timeout=500)
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_every_measurement_gives_what_one_process_gives(both, tmp_path):
    assert two_processes.run(tmp_path) == 0
    alone, together = numbers(tmp_path), numbers(both[0])
    assert set(alone) == set(together)
    assert len(alone) > 100
    for name, value in alone.items():
        # A quotient of two numbers has the error of both.
        rel = 3e-5 if name.endswith("step_to_minimum") else 1e-5
        assert together[name] == pytest.approx(value, rel=rel, abs=1e-6), name


def test_one_process_knows_the_run_of_two_as_its_own(both):
    before = (both[0] / "results.json").read_bytes()
    assert two_processes.run(both[0]) == 0
    assert (both[0] / "results.json").read_bytes() == before


def test_what_is_spread_over_processes_is_touched_by_compiled_functions_only(both):
    for said in both[1]:
        assert said["one_by_one"] == []


def test_a_sweep_of_two_processes_is_that_of_one(both, tmp_path):
    folder, outputs = both
    # Followed to its end, and finished before.
    assert [said["sweep"] for said in outputs] == [[0, 0]] * 2
    assert two_processes.sweep(tmp_path / "alone") == [0, 0]
    together, alone = (
        sweeps.sweep_json(folder.with_name(f"{name}_sweep"))
        for folder, name in ((folder, folder.name), (tmp_path / "alone", "alone"))
    )
    for document in (together, alone):
        assert [(x["step"], x["status"]) for x in document["steps"]] == [
            (1, "finished"),
            (2, "finished"),
        ]
    (measured,), (expected,) = (x["measurements"] for x in (together, alone))
    for name, rel in (("largest_1", 1e-5), ("gradient_in_largest", 1e-3)):
        found = measured["numbers"][name]
        assert found["steps"] == [1, 2]
        wanted = expected["numbers"][name]["values"]
        assert found["values"] == pytest.approx(wanted, rel=rel)
    overlaps = [
        {x["end"]: x["overlap"] for x in document["neighbors"]}["largest"]
        for document in (together, alone)
    ]
    assert overlaps[0] == pytest.approx(overlaps[1], rel=1e-4)


def test_how_many_batches_are_linearized_is_agreed(both):
    # One process has memory for a few batches, the other for all.
    products = json.loads((both[0] / "results.json").read_text())["products"]
    number, total = map(int, re.match(r"(\d+) of (\d+)", products["hessian"]).groups())
    assert 0 < number < total


def test_a_signal_to_one_makes_both_save_and_leave_and_both_resume(
    both, repository, tmp_path
):
    leaving = start_both(repository, tmp_path, "3")
    said = finish(leaving, timeout=300)
    assert [process.returncode for process in leaving] == [143, 143], said
    assert "start the same command again to resume" in said[0][1]
    assert any((tmp_path / "unfinished").glob("*.state")), said
    resumed = start_both(repository, tmp_path, "0")
    said = finish(resumed, timeout=300)
    assert [process.returncode for process in resumed] == [0, 0], said
    for name in ("hessian_eigenpairs.npz", "hessian_spectral_density.npz"):
        undisturbed, found = np.load(both[0] / name), np.load(tmp_path / name)
        assert undisturbed.files == found.files
        for array in found.files:
            np.testing.assert_array_equal(found[array], undisturbed[array])
