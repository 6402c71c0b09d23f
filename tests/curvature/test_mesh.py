"""The engine on eight forced host devices: same numbers, shardings kept, no gather."""

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from . import mesh_run

MESHES = ["2x4", "4x2", "1x8", "2x4 Explicit"]
# A program of one device must not hold a leaf whole, stacked or not, flat or not.
SHAPES = [shape for shape, _ in mesh_run.SHAPES.values()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, repository):
    """The results by mesh, and the text of every program that was compiled."""
    dump = tmp_path_factory.mktemp("programs")
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
        # Partitioning is what is looked at; machine code need not be fast.
        "--xla_backend_optimization_level=0 "
        f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
        "PYTHONPATH": os.pathsep.join([str(repository), str(repository / "tests")]),
        # A program from the cache is not compiled, so not dumped.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-m", "curvature.mesh_run", "1x1", *MESHES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    texts = {
        path.name: path.read_text()
        for path in dump.glob("*after_optimizations.txt")
        if "num_partitions=8" in path.read_text()[:3000]
    }
    return dict(zip(["1x1", *MESHES], results, strict=True)), texts


@pytest.mark.parametrize("mesh", MESHES)
def test_numbers_are_those_of_one_device(runs, mesh):
    one, other = runs[0]["1x1"], runs[0][mesh]
    assert all(one["converged"])
    assert one["num_restarts"] > 0
    for name in ("eigenvalues", "frobenius", "slope", "curvatures"):
        if other[name] is not None:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-5)
    for name, trace in one["traces"].items():
        # Traces may cancel to nearly zero; their scale is the Frobenius norm.
        assert other["traces"][name] == pytest.approx(
            trace, rel=1e-5, abs=1e-5 * one["frobenius"]
        )
    scale = max(one["density"])
    np.testing.assert_allclose(other["density"], one["density"], atol=1e-5 * scale)


@pytest.mark.parametrize("mesh", MESHES)
def test_vectors_keep_the_shardings_of_the_parameters(runs, mesh):
    kept = runs[0][mesh]["kept"]
    assert kept == {name: [True] * len(SHAPES) for name in kept}


def test_no_program_gathers(runs):
    _, texts = runs
    assert len(texts) > 20
    for name, text in texts.items():
        for operation in ("all-gather", "all-to-all", "collective-permute"):
            assert operation not in text, f"{operation} in {name}"


def test_no_program_holds_a_whole_leaf(runs):
    _, texts = runs
    for name, text in texts.items():
        for dtype, dims in re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", text):
            found = tuple(int(dim) for dim in dims.split(","))
            for whole in SHAPES:
                stacked = found[-len(whole) :] == whole
                flat = found[-1] == math.prod(whole)
                assert not stacked, f"{dtype}[{dims}] in {name}"
                assert not flat, f"{dtype}[{dims}] in {name}"
