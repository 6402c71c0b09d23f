"""What a Lanczos run leaves on disk: each vector once, and never another run's."""

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
        states.append(state)

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
    state = grown(0, 7, lambda state: saved.save(state, 0))
    found = restored(saved)
    np.testing.assert_array_equal(vectors(found), vectors(state))
    np.testing.assert_array_equal(found.space.projected, state.space.projected)
    assert found.metadata() == state.metadata()


def test_each_vector_is_written_once(saved, monkeypatch):
    save, written = vector_store.save, []

    def watched(path, tree):
        written.append(path.name)
        save(path, tree)

    monkeypatch.setattr(vector_store, "save", watched)
    state = grown(0, 6, lambda state: saved.save(state, 0))
    assert written == [f"vector_0_{i}" for i in range(state.space.basis.size)]
    saved.save(state, 1)  # as after a restart
    left = sorted(path.name for path in saved.path.glob("vector_*"))
    assert left == [f"vector_1_{i}" for i in range(state.space.basis.size)]


def test_vectors_without_an_index_are_not_taken_for_this_run(saved):
    assert restored(saved) is None
    saved.save(grown(0, 3), 0)
    (saved.path / "state.json").unlink()
    assert restored(saved) is None  # what a measurement does first
    state = grown(1, 3)
    saved.save(state, 0)
    np.testing.assert_array_equal(vectors(restored(saved)), vectors(state))


def test_arrays_taken_from_a_state_are_not_changed_by_later_steps():
    taken = []

    def take(state):
        arrays = state.arrays()
        taken.append((arrays, jax.tree.map(np.array, arrays)))

    grown(0, 6, take)
    for arrays, copies in taken:
        jax.tree.map(np.testing.assert_array_equal, arrays, copies)
