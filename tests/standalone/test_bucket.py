"""Checkpoint, saved state, results, vectors and events in a bucket, by real clients.

TensorFlow's and TensorStore's clients for Google Cloud Storage, the ones that a user has
on a TPU, speak to a store in memory.
"""

import csv
import functools
import io
import json
import shutil
import sys

import gcs
import numpy as np
import pytest

REPORT = (sys.executable, "-m", "t5x_fwdloss.report")
PROGRAM = (sys.executable, "-m", "tests.standalone.in_bucket")
pytestmark = [
    pytest.mark.bucket,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="openssl makes the certificate"
    ),
]


@pytest.fixture(scope="module")
def ended(repository, tmp_path_factory):
    """The store after the run, what the run printed, and its two local folders.

    The reports are written again, as `.csv` beside the local folder and as the page.
    """
    folder = tmp_path_factory.mktemp("bucket")
    here, local = folder / "here", folder / "local"
    here.mkdir()
    with gcs.running(folder) as running:
        run = functools.partial(running.run, repository, here)
        done = run(*PROGRAM, "gs://bucket/run", str(local))
        there = "gs://bucket/run/analysis"
        report = (*REPORT, there)
        page = running.store.objects.pop("bucket/run/analysis/report.html")
        run(*report)
        (folder / "there.csv").write_text(run(*report, "--format=csv").stdout)
        (folder / "here.csv").write_text(run(*REPORT, local, "--format=csv").stdout)
        run(*report, local, f"--output={there}/both.html")
        return running.store, done, here, local, page


def test_a_run_in_a_bucket_is_stopped_resumed_and_finished(ended):
    store, done, here, *_ = ended
    assert json.loads(done.stdout.splitlines()[-1]) == [143, 0, 0, 0]
    assert "nothing measured" in done.stdout
    assert list(here.iterdir()) == []
    names = {name.removeprefix("bucket/run/") for name in store.objects}
    assert {
        "analysis/results.json",
        "analysis/report.html",
        "analysis/config.gin",
        "analysis/hessian_eigenpairs.npz",
        "analysis/hessian_eigenpairs_vectors/vector_0/manifest.ocdbt",
    } <= names
    assert any(name.startswith("analysis/events.out.tfevents") for name in names)
    # No object, not even one that stands for an empty folder, is left of what was saved.
    assert not [n for n in names if "unfinished/" in n or n.endswith(".part")]


def test_what_was_saved_half_way_was_in_the_bucket(ended):
    assert any("unfinished/hessian_eigenpairs.state/" in n for n in ended[0].history)


def test_the_numbers_are_those_of_a_run_on_the_local_disk(ended):
    store, _, _, local, _ = ended
    for path in local.glob("*.npz"):
        content = store.objects[f"bucket/run/analysis/{path.name}"][1]
        there, here = np.load(io.BytesIO(content)), np.load(path)
        assert there.files == here.files
        for name in here.files:
            np.testing.assert_array_equal(there[name], here[name])
    document = json.loads(store.objects["bucket/run/analysis/results.json"][1])
    assert document["checkpoint"] == "gs://bucket/run/model/checkpoint_2"


def rows(path):
    """The numbers of a table of runs, without where they lie."""
    with path.open() as file:
        return [
            {name: x for name, x in row.items() if name not in ("run", "path")}
            for row in csv.DictReader(file)
        ]


def test_the_report_of_a_bucket_is_written_again_and_compared(ended):
    store, _, _, local, page = ended
    again = store.objects["bucket/run/analysis/report.html"][1]
    assert again == page[1]
    there = rows(local.with_name("there.csv"))
    assert len(there) > 2
    assert there == rows(local.with_name("here.csv"))
    both = store.objects["bucket/run/analysis/both.html"][1].decode()
    assert "gs://bucket/run/analysis" in both
    assert str(local) in both
