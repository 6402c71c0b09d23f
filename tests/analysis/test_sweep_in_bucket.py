"""A sweep in a bucket, by real clients, against a store in memory."""

import json
import shutil
import sys

import gcs
import pytest

from . import sweep_in_bucket, sweeps

pytestmark = [
    pytest.mark.bucket,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="openssl makes the certificate"
    ),
]


@pytest.fixture(scope="module")
def ended(repository, tmp_path_factory):
    """The store after the sweeps, and what was printed."""
    folder = tmp_path_factory.mktemp("bucket")
    with gcs.running(folder) as running:
        program = (sys.executable, "-m", "tests.analysis.sweep_in_bucket")
        done = running.run(repository, folder, *program, "gs://bucket/run")
        return running.store, json.loads(done.stdout.splitlines()[-1])


def test_a_sweep_takes_the_complete_checkpoints_of_a_bucket(ended):
    _, ((first, restored), (second, again)) = ended
    assert (first, second) == (0, 0)
    assert restored == [100, 200]  # 300 was being written
    # A bucket does not say when a folder was written: what is there is read again.
    assert again == [100, 200, 300]


def test_its_results_are_in_the_bucket_and_those_of_a_local_sweep(ended, tmp_path):
    store, _ = ended
    names = {name.removeprefix("bucket/run/sweep/") for name in store.objects}
    assert {"sweep.json", "report.html"} <= names
    assert any(x.startswith("tensorboard/events.out.tfevents") for x in names)
    # Eigenvectors were there, to be compared, and nothing is left of them.
    assert any("/sweep/vectors/step_200/" in name for name in store.history)
    assert not [x for x in names if x.startswith("vectors") or x.endswith(".part")]
    model_dir = sweeps.model_folder(tmp_path / "model", sweep_in_bucket.STEPS)
    given = {"measurements": [sweep_in_bucket.PAIRS]}
    assert sweeps.run(model_dir, tmp_path / "local", **given) == 0
    there = json.loads(store.objects["bucket/run/sweep/sweep.json"][1])
    here = sweeps.sweep_json(tmp_path / "local")
    assert there["measurements"] == here["measurements"]
    pairs = [(x["earlier"], x["later"], x["end"]) for x in here["neighbors"]]
    assert pairs == [(100, 200, "largest"), (200, 300, "largest")]
    # Between two calls of a sweep only eigenvectors that a measurement saves are kept.
    assert there["neighbors"] == [x for x in here["neighbors"] if x["later"] == 200]
    assert len(there["notes"]) == 1
