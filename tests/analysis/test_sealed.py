"""What a run reads back is what was written, down to one number, or is refused.

The changes here leave files that are whole and of the right kind: nothing but a checksum
tells them from what was written.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis import Trace
from t5x_fwdloss.analysis.store import files, records, vector_store

from . import runs

TRACE = [Trace(num_probes=2, block_size=2)]


def test_a_record_with_another_number_is_refused(tmp_path):
    path = tmp_path / "samples.json"
    records.write(path, {"samples": [1.5, 2.5]})
    assert records.read(path) == {"samples": [1.5, 2.5]}
    path.write_text(path.read_text().replace("2.5", "2.6"))
    with pytest.raises(files.StorageError, match="its checksum is missing or differs"):
        records.read(path)


def test_a_record_without_its_checksum_is_refused(tmp_path):
    path = tmp_path / "samples.json"
    path.write_text(json.dumps({"samples": [1.5]}))
    with pytest.raises(files.StorageError, match="its checksum is missing or differs"):
        records.read(path)


def test_arrays_of_another_run_are_refused(tmp_path):
    assert runs.run(tmp_path, measurements=TRACE) == 0
    path = tmp_path / "hessian_trace.npz"
    with np.load(path) as found:
        arrays = dict(found)
    arrays["samples"] = arrays["samples"] + 1e-9
    np.savez(path, **arrays)
    with pytest.raises(files.StorageError, match=r"trace.npz must hold the arrays"):
        runs.run(tmp_path, measurements=TRACE)


def test_another_vector_in_the_place_of_a_saved_one_is_refused(tmp_path):
    path = files.user_path(tmp_path / "vectors")
    vectors = [{"a": jnp.arange(4.0)}, {"a": jnp.ones(4)}]
    vector_store.save_all(path, vectors, is_primary=True)
    read = lambda n: vector_store.restore_one(path, n, vectors[0], is_primary=True)
    np.testing.assert_array_equal(read(1)["a"], vectors[1]["a"])
    assert read(2) is None
    vector_store.save(path / "vector_1", {"a": jnp.ones(4).at[2].set(1.0001)})
    with pytest.raises(files.StorageError, match="vector_1 must hold what was saved"):
        read(1)
