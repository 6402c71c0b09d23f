"""The members of results.json, which readers of it rely on: known, and numbered."""

import json

from t5x_fwdloss.analysis import Trace
from t5x_fwdloss.analysis.store import finished_run

from . import runs
from .test_report_again import Broken
from .test_training_record import PROBES, write

NUMBER = {"value", "unit", "error", "error_kind", "interval", "converged", "count"}
FINISHED = {"notes", "seconds", "results", "converged", "arrays_sha256"}
ENTRY = {"name", "kind", "matrix", "settings", "status"}
# What schema 1 has; names of one's own, such as those of results, are left out.
MEMBERS = {
    "": {
        *("schema_version", "status", "finished_at", "checkpoint", "step", "task"),
        *("seed", "loss", "normalizer", "num_tokens", "num_batches", "batch_shapes"),
        *("batches_hash", "dropout_seed", "matmul_precision", "activation_dtype"),
        *("parameters_checksum", "loss_value", "optimizer", "num_parameters"),
        *("parameters_left_out", "environment", "products", "preflight"),
        *("measurements", "fingerprint", "model", "num_labels_outside_vocabulary"),
        *("seconds", "training", "sha256"),
    },
    "loss": {
        *("loss_impl", "loss_chunk_length", "z_loss", "label_smoothing"),
        "loss_normalizing_factor",
    },
    "normalizer": {"kind", "W", "unit", "words"},
    "environment": {
        *("versions", "python", "commit", "device_kind", "num_devices"),
        *("num_processes", "mesh", "time", "platform"),
    },
    "model": {"class", "sizes", "parameter_dtypes"},
}


def test_other_members_have_another_schema(tmp_path):
    """Where this fails, results.json changed: count SCHEMA_VERSION up, then write it."""
    write(tmp_path / "model", PROBES)
    host = runs.host(checkpoint=str(tmp_path / "model" / "checkpoint_50"))
    measured = [Trace(num_probes=2), Broken()]
    assert runs.run(tmp_path / "run", host=host, measurements=measured) == 1
    document = json.loads((tmp_path / "run" / "results.json").read_text())
    found = {part: set(document[part] if part else document) for part in MEMBERS}
    (check, *_) = document["preflight"]
    trace, broken = document["measurements"]
    assert (finished_run.SCHEMA_VERSION, found) == (1, MEMBERS)
    assert document["schema_version"] == 1
    assert set(check) == {"first", "meaning", "name", "second", "tolerance"}
    assert set(trace) == ENTRY | FINISHED
    assert set(broken) == ENTRY | {"reason"}
    assert set(trace["results"]["trace"]) == NUMBER
