"""A run that is killed between any two operations on files ends with the same numbers.

Every operation goes through three functions: a file is written beside its place and moved
over it, a tree is removed, vectors are written by Orbax. Each is killed before, amid and
after its work, one moment after the other, and the same run is started again.
"""

import json

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from stops import Killed

from t5x_fwdloss.analysis import (
    Diagonal,
    Eigenpairs,
    GradientNoiseScale,
    GroupDensities,
    GroupTraces,
    Landscape,
    NewtonStep,
    SpectralDensity,
    Trace,
)
from t5x_fwdloss.analysis.measurements import Context
from t5x_fwdloss.analysis.numbers import result_to_json
from t5x_fwdloss.analysis.objective import preflight
from t5x_fwdloss.analysis.report import page
from t5x_fwdloss.analysis.store import files, saved_state, vector_store

from . import runs, toy


class Moments:
    """Counts the moments at which a process may be killed, and kills it at one."""

    def __init__(self, monkeypatch, kill_at=None):
        self.count, self.kill_at = 0, kill_at
        self._real = {
            name: getattr(files, name)
            for name in ("_write_synced", "sync_folder", "remove")
        }
        self._save = vector_store.save
        monkeypatch.setattr(files, "_write_synced", self._write)
        monkeypatch.setattr(files, "sync_folder", self._sync)
        monkeypatch.setattr(files, "remove", self._remove)
        monkeypatch.setattr(vector_store, "save", self._save_vectors)

    def reached(self):
        """One more moment.

        Raises:
            Killed: it is the one.
        """
        self.count += 1
        if self.count == self.kill_at:
            raise Killed

    def _write(self, path, content):
        self.reached()
        self._real["_write_synced"](path, content[: len(content) // 2])
        self.reached()
        self._real["_write_synced"](path, content)
        self.reached()

    def _sync(self, folder):
        self.reached()
        self._real["sync_folder"](folder)

    def _remove(self, path):
        self.reached()
        inside = sorted(path.iterdir()) if path.is_dir() else []
        if inside:
            self._real["remove"](inside[0])
            self.reached()
        self._real["remove"](path)
        self.reached()

    def _save_vectors(self, path, vectors):
        self.reached()
        # What Orbax leaves when it is killed amid its work.
        unfinished = path.parent / f"{path.name}.orbax-checkpoint-tmp"
        unfinished.mkdir(parents=True)
        (unfinished / "leaf_00000").mkdir()
        self.reached()
        unfinished.rmtree()
        self._save(path, vectors)
        self.reached()


def dense_product(v):
    """A product with a fixed symmetric matrix over the parameters of the toy."""
    flat, unravel = jax.flatten_util.ravel_pytree(v)
    i = jnp.arange(flat.size, dtype=flat.dtype)
    matrix = jnp.diag(i + 1) + jnp.sin(i[:, None] * i[None, :])
    return unravel(matrix @ flat)


PRODUCTS = {
    1: toy.GivenProduct(dense_product),
    2: toy.GivenProduct(jax.vmap(dense_product)),
}


class DenseContext(Context):
    """A context whose every matrix is the one above: nothing of the loss is compiled."""

    def product(self, matrix, block_size=1, at=None):
        return PRODUCTS[block_size]


MEASUREMENTS = {
    "hutchinson": Trace(num_probes=4, block_size=2),
    "sampled": Trace(matrix="sampled_fisher", num_probes=3, block_size=2),
    "hutch++": Trace(estimator="hutch++", num_probes=2, sketch_size=1, block_size=1),
    "xtrace": Trace(estimator="xtrace", num_probes=2, block_size=1),
    "density": SpectralDensity(num_probes=2, num_steps=2),
    "eigenpairs": Eigenpairs(
        num_largest=1,
        num_smallest=0,
        max_steps=4,
        save_eigenvectors=True,
    ),
    "groups": GroupTraces(num_probes=4, block_size=2),
    "diagonal": Diagonal(num_probes=4, block_size=2),
    "noise_scale": GradientNoiseScale(),
    "group_densities": GroupDensities(num_probes=1, num_steps=2),
    "newton": NewtonStep(max_steps=3, tolerance=1e-6),
    "landscape": Landscape(num_points=3),
}


@pytest.fixture(scope="module")
def objective():
    return runs.objective()


def measured(measurement, objective, path):
    """What the measurement finds, without its time, and the vectors that it leaves."""
    context = runs.context(
        path,
        DenseContext,
        objective=objective,
        save_seconds=0,
        vectors_path=lambda name: path / f"{name}_vectors",
    )
    found = measurement.run(context)
    arrays = {name: np.asarray(x).tolist() for name, x in found.arrays.items()}
    vectors = [
        context.saved_vector(measurement.name, number)
        for number in range(measurement.num_vectors)
    ]
    return json.dumps(
        [
            result_to_json(found),
            arrays,
            [np.asarray(x).tolist() for x in jax.tree.leaves(vectors)],
        ]
    )


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_measurement_killed_at_any_moment_ends_with_the_same_numbers(
    name, objective, tmp_path, monkeypatch
):
    measurement, path = MEASUREMENTS[name], epath.Path(tmp_path)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        whole = measured(measurement, objective, path / "whole")
        total = moments.count
    assert total >= 8
    for number in range(1, total + 1):
        here = path / str(number)
        with monkeypatch.context() as patch:
            Moments(patch, kill_at=number)
            with pytest.raises(Killed):
                measured(measurement, objective, here)
        assert measured(measurement, objective, here) == whole, number
        left = {x.name for x in (here / f"{measurement.name}.state").iterdir()}
        assert not [x for x in left if x.endswith((".part", "-tmp"))], number


def test_a_run_killed_at_any_moment_leaves_a_folder_that_is_resumed(
    objective, tmp_path, monkeypatch
):
    """The folder alone: what is measured and drawn is tested elsewhere."""
    monkeypatch.setattr(preflight, "check_objective", lambda *_, **__: [])
    monkeypatch.setattr(page, "render", lambda *_: "the page")
    listed = [Trace(num_probes=2, block_size=2)]
    monkeypatch.setattr(Context, "product", DenseContext.product)

    def run(path):
        return runs.run(path, objective=objective, measurements=listed)

    def content(path):
        found = json.loads((path / "results.json").read_text())
        numbers = [m["results"] for m in found["measurements"]]
        names = {x.name for x in path.iterdir()}
        events = [x for x in names if x.startswith("events.")]
        return numbers, len(events), sorted(names - set(events))

    with monkeypatch.context() as patch:
        moments = Moments(patch)
        assert run(tmp_path / "whole") == 0
        total = moments.count
    whole = content(tmp_path / "whole")
    assert whole[1] == 1
    assert total > 30
    for number in range(1, total + 1):
        here = tmp_path / str(number)
        with monkeypatch.context() as patch:
            Moments(patch, kill_at=number)
            with pytest.raises(Killed):
                run(here)
        finished = (here / "results.json").exists()
        before = (here / "results.json").read_bytes() if finished else b""
        assert run(here) == 0, number
        assert content(here) == whole, number
        if finished:
            assert (here / "results.json").read_bytes() == before


def test_vectors_that_the_saved_state_does_not_name_are_removed(tmp_path):
    path = epath.Path(tmp_path)
    vector_store.save(path / "vector_3_0", {"a": jnp.ones(2)})
    saved = saved_state.SavedState(path, is_primary=True)
    assert saved.restore({"a": jnp.ones(2)}, object) is None
    assert not list(path.iterdir())
