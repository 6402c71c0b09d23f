"""What a Lanczos run leaves on disk: each vector once, and never another run's."""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from t5x_fwdloss import curvature
from t5x_fwdloss.analysis.store import saved_state, vector_store

SIZE = 40


def start(seed):
    rng = np.random.default_rng(seed)
    return {"kernel": jnp.asarray(rng.normal(size=SIZE).astype(np.float32))}


def grown(seed, num_steps, on_step=None):
    scale = jnp.linspace(-1.0, 2.0, SIZE)
    product = lambda v: {"kernel": scale * v["kernel"]}
    states = []

    def note(state):
        if on_step is not None:
            on_step(state)
        # The basis gives its memory to the eigenvectors in the end.
        space = copy.copy(state.space)
        space.basis = copy.copy(space.basis)
        states.append(dataclasses.replace(state, space=space))

    curvature.eigenpairs(
        product, start(seed), max_steps=num_steps, tolerance=1e-9, on_step=note
    )
    return states[-1]


def vectors(state):
    return np.stack([np.asarray(v["kernel"]) for v in state.space.basis.vectors])


@pytest.fixture
def saved(tmp_path):
    return saved_state.SavedState(epath.Path(tmp_path) / "pairs", True)


def restored(saved):
    return saved.restore(start(0), curvature.EigenpairsState)


def test_the_state_comes_back_to_the_bit(saved):
    state = grown(0, 7, lambda state: saved.save(state))
    found = restored(saved)
    np.testing.assert_array_equal(vectors(found), vectors(state))
    numbers = [json.dumps(curvature.pack(x)[0]) for x in (found, state)]
    assert numbers[0] == numbers[1]


def test_each_vector_is_written_once(saved, monkeypatch):
    save, written = vector_store.save, []

    def watched(path, tree):
        written.append(path.name)
        save(path, tree)

    monkeypatch.setattr(vector_store, "save", watched)
    state = grown(0, 6, lambda state: saved.save(state))
    size = state.space.basis.size
    assert written == [f"vector_{i}" for i in range(size)]
    # Other vectors, as after a restart.
    basis = state.space.basis
    basis.vectors = [jax.tree.map(jnp.array, v) for v in basis.vectors]
    saved.save(state)
    left = {path.name for path in saved.path.glob("vector_*")}
    assert left == {f"vector_{i}" for i in range(size, 2 * size)}


def test_what_is_resumed_is_not_written_again(saved, monkeypatch):
    saved.save(grown(0, 6))
    state, written = restored(saved), []
    monkeypatch.setattr(vector_store, "save", lambda path, _: written.append(path.name))
    saved.save(state)
    assert written == []


def test_vectors_without_an_index_are_not_taken_for_this_run(saved):
    assert restored(saved) is None
    saved.save(grown(0, 3))
    (saved.path / "state.json").unlink()
    assert restored(saved) is None  # what a measurement does first
    state = grown(1, 3)
    saved.save(state)
    np.testing.assert_array_equal(vectors(restored(saved)), vectors(state))


def test_arrays_taken_from_a_state_are_not_changed_by_later_steps():
    taken = []

    def take(state):
        saved = curvature.pack(state)
        taken.append((saved, jax.tree.map(np.array, saved)))

    grown(0, 6, take)
    for saved, copies in taken:
        jax.tree.map(np.testing.assert_array_equal, saved, copies)
