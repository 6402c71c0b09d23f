"""Checkpoints: what is written is restored, whole or not at all, and misfits are named."""

import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from t5x_fwdloss.standalone import checkpoints

from . import subjects

OPTIMIZER = optax.adamw(1e-3)


def params_of(**changes):
    model = subjects.model(**changes)
    return model.get_initial_params(jax.random.key(0), subjects.packed_batch())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with checkpoint_3 and checkpoint_12, and what is in the latter."""
    folder = tmp_path_factory.mktemp("checkpoints")
    params = params_of()
    state = OPTIMIZER.init(params)
    manager = checkpoints.open_manager(str(folder))
    checkpoints.save(manager, 3, jax.tree.map(np.zeros_like, params), state)
    state = OPTIMIZER.update(params, state, params)[1]
    checkpoints.save(manager, 12, params, state)
    manager.close()
    return folder, params, state


def test_parameters_and_step_come_back_to_the_bit(written):
    folder, params, _ = written
    shapes = jax.eval_shape(lambda: params)
    for path in (folder, folder / "checkpoint_12"):
        step, restored = checkpoints.restore_params(str(path), shapes)
        assert step == 12
        subjects.assert_same_trees(restored, params)
    step, restored = checkpoints.restore_params(str(folder / "checkpoint_3"), shapes)
    assert step == 3
    assert not any(np.any(x) for x in jax.tree.leaves(restored))


def test_optimizer_state_comes_back_to_the_bit(written):
    folder, params, state = written
    restored = checkpoints.restore_optimizer(str(folder), OPTIMIZER.init(params))
    subjects.assert_same_trees(restored, state)


def test_an_optimizer_without_state_is_saved_too(tmp_path):
    params = {"w": np.ones(2, np.float32)}
    state = optax.sgd(0.1).init(params)
    manager = checkpoints.open_manager(str(tmp_path))
    checkpoints.save(manager, 1, params, state)
    manager.close()
    assert checkpoints.restore_optimizer(str(tmp_path), state) == state


def test_only_the_latest_checkpoints_are_kept(tmp_path):
    params = {"w": np.ones(2, np.float32)}
    manager = checkpoints.open_manager(str(tmp_path), keep=2)
    for step in (1, 2, 3):
        checkpoints.save(manager, step, params, ())
    manager.close()
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["checkpoint_2", "checkpoint_3"]


KILLED_WHILE_SAVING = """
import os, sys
import jax.numpy as jnp
import orbax.checkpoint as ocp
from t5x_fwdloss.standalone import checkpoints

manager = checkpoints.open_manager(sys.argv[1])
params = {"w": jnp.arange(1000.0)}
checkpoints.save(manager, 1, params, ())
ocp.PyTreeCheckpointHandler.finalize = lambda *_, **__: os._exit(9)
checkpoints.save(manager, 2, {"w": params["w"] + 1}, ())
"""


def test_a_run_killed_while_saving_leaves_no_half_checkpoint(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)], check=False
    )
    assert killed.returncode == 9
    names = sorted(p.name for p in tmp_path.iterdir())
    assert len(names) == 2  # the first, and what the second had written so far
    assert names[0] == "checkpoint_1"
    assert names[1].startswith("checkpoint_2.")
    like = {"w": np.zeros(1000, np.float32)}
    step, restored = checkpoints.restore_params(str(tmp_path), like)
    assert step == 1
    np.testing.assert_array_equal(restored["w"], np.arange(1000))
    # The next run saves the same step in place of the remains.
    manager = checkpoints.open_manager(str(tmp_path))
    assert manager.latest_step() == 1
    checkpoints.save(manager, 2, like, ())
    manager.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint_1", "checkpoint_2"]


def test_no_checkpoint_is_named_with_what_is_there(tmp_path):
    like = {"w": np.zeros(2)}
    with pytest.raises(ValueError, match=r"missing there is nothing"):
        checkpoints.restore_params(str(tmp_path / "missing"), like)
    with pytest.raises(ValueError, match="it holds nothing"):
        checkpoints.restore_params(str(tmp_path), like)
    (tmp_path / "events.out").write_text("")
    (tmp_path / "checkpoint_x").mkdir()
    with pytest.raises(ValueError, match=r"it holds checkpoint_x, events\.out"):
        checkpoints.restore_params(str(tmp_path), like)
    with pytest.raises(ValueError, match=r"events\.out there is a file"):
        checkpoints.restore_params(str(tmp_path / "events.out"), like)


def test_other_formats_are_refused(tmp_path):
    legacy = tmp_path / "checkpoint_5"
    legacy.mkdir()
    (legacy / "target.w").mkdir()
    with pytest.raises(
        ValueError, match=r"folder 'state': .*checkpoint_5 holds target.w"
    ):
        checkpoints.find(str(legacy))
    (legacy / "checkpoint").write_bytes(b"")
    with pytest.raises(ValueError, match="T5X's older format, which only T5X reads"):
        checkpoints.find(str(tmp_path))


def test_parameters_that_do_not_fit_are_named_on_both_sides(written):
    folder, _, _ = written
    with pytest.raises(
        ValueError,
        match=r"2 differ: decoder/logits_dense/kernel: checkpoint \(16, 384\), model "
        r"\(16, 256\); token_embedder/embedding: checkpoint \(384, 16\), model \(256",
    ):
        checkpoints.restore_params(str(folder), params_of(vocab_size=256))
    with pytest.raises(ValueError, match=r"checkpoint \(16, 384\), model has none\.$"):
        checkpoints.restore_params(str(folder), params_of(logits_via_embedding=True))
    with pytest.raises(ValueError, match=r"checkpoint has none, .*; and 6 more\.$"):
        checkpoints.restore_params(str(folder), params_of(num_encoder_layers=2))


def test_state_of_another_optimizer_is_refused(written):
    folder, params, _ = written
    state = optax.sgd(1e-3, momentum=0.9).init(params)
    with pytest.raises(
        ValueError, match=r"optimizer's state .*trace.*checkpoint has none"
    ):
        checkpoints.restore_optimizer(str(folder), state)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2]
    ),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
}


def files_of(folder):
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(path.relative_to(folder) for path in found)


# A restore that failed leaves futures of Orbax's behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_named_or_restored_in_full(tmp_path, damage):
    normal = np.random.default_rng(0).normal(size=999)
    params = jax.tree.map(np.float32, {"w": normal, "b": np.ones(2)})
    whole = tmp_path / "whole"
    manager = checkpoints.open_manager(str(whole))
    checkpoints.save(manager, 1, params, OPTIMIZER.init(params))
    manager.close()
    refused = []
    for number, name in enumerate(files_of(whole)):
        here = tmp_path / str(number)
        shutil.copytree(whole, here)
        damage(here / name)
        try:
            found = checkpoints.restore_params(str(here), params)[1]
            state = checkpoints.restore_optimizer(str(here), OPTIMIZER.init(params))
        except ValueError as error:
            refused.append(str(error))
        else:
            subjects.assert_same_trees(found, params)
            subjects.assert_same_trees(state, OPTIMIZER.init(params))
    assert len(refused) >= 4
    for words in refused:
        assert re.fullmatch(
            rf"{tmp_path}/\d+/checkpoint_1/.* must be whole and readable: .*", words
        )


def test_a_folder_that_a_stopped_save_left_is_no_checkpoint(written):
    folder, _, _ = written
    left = folder / "checkpoint_15.orbax-checkpoint-tmp"
    (left / "state").mkdir(parents=True)
    try:
        assert checkpoints.find(str(folder)).name == "checkpoint_12"
        with pytest.raises(
            ValueError, match="is incomplete, left by a run that was stopped"
        ):
            checkpoints.find(str(left))
    finally:
        shutil.rmtree(left)


def test_a_link_that_leads_nowhere_is_no_checkpoint(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="loop there is nothing"):
        checkpoints.find(str(tmp_path / "loop"))
