"""On a mesh the numbers are the same and vectors lie where the parameters lie."""

import json
import os
import subprocess
import sys

import pytest

from t5x_fwdloss.analysis.store import checksum

from . import runs, sharded_program


@pytest.fixture(scope="module")
def sharded(repository):
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.analysis.sharded_program"],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vectors_keep_the_shardings_of_the_parameters(sharded):
    assert len(sharded["kept"]) == 9
    assert all(sharded["kept"].values())


def test_numbers_equal_those_of_one_device(sharded):
    objective = runs.objective()
    assert sharded["hash"] == objective.batches_hash
    params = sharded_program.toy.parameters()
    assert sharded["checksum"] == checksum.checksum(params)
    alone = sharded_program.numbers(objective, sharded_program.toy.parameters())
    assert set(alone) == set(sharded["numbers"])
    for name, value in alone.items():
        assert sharded["numbers"][name] == pytest.approx(value, rel=1e-5, abs=1e-7)


def test_more_batches_and_vectors_than_may_wait_at_one_time_are_summed(sharded):
    # Where they were not, all devices stood still for ever.
    alone = sharded_program.many(sharded_program.toy.parameters(), lambda x: x)
    assert alone["num_batches"] == 40
    assert sharded["many"] == pytest.approx(alone, rel=1e-5)
