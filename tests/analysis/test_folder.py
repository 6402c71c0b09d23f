"""Whose a folder is: a run's own is resumed or left as it is, any other is not touched."""

import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree
from stops import Killed

from t5x_fwdloss.analysis import Trace, measurement_list, optimizer
from t5x_fwdloss.analysis.store import (
    files,
    folder,
    lock,
    records,
    saved_state,
    vector_store,
)

from . import runs, toy


class Bent(toy.SoftmaxRegression):
    """Another network: its logits bend."""

    def _compute_logits(self, params, batch, dropout_rng=None):
        return 4 * jnp.tanh(super()._compute_logits(params, batch, dropout_rng) / 4)


class Narrow(toy.SoftmaxRegression):
    """The same network in bfloat16."""

    def _compute_logits(self, params, batch, dropout_rng=None):
        dense = {k: x.astype(jnp.bfloat16) for k, x in params["dense"].items()}
        narrow = batch | {"features": batch["features"].astype(jnp.bfloat16)}
        found = super()._compute_logits({"dense": dense}, narrow, dropout_rng)
        return found.astype(jnp.float32)


def of_model(kind):
    model = kind(factor="NUM_REAL_TARGET_TOKENS")
    return runs.Objective.from_model(model, toy.batches(6))


TRACE = [Trace(num_probes=2, block_size=2)]


def everything_in(path):
    """Every file below a folder, with its bytes and the time of its last change."""
    found = {}
    for x in sorted(path.rglob("*")):
        content = x.read_bytes() if x.is_file() else None
        found[str(x.relative_to(path))] = (content, x.lstat().st_mtime_ns)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "analysis"
    assert runs.run(path, measurements=TRACE) == 0
    return path


def test_a_finished_folder_is_left_as_it_is(finished, capsys):
    before = everything_in(finished)
    host = runs.host(config_text="# another command\n")
    assert runs.run(finished, measurements=TRACE, host=host) == 0
    assert everything_in(finished) == before
    when = json.loads((finished / "results.json").read_text())["finished_at"]
    said = capsys.readouterr().out
    assert f"This run was finished on {when}: nothing measured.\n" in said
    assert "hessian_trace" in said


NETWORKS = {
    "parameters": ({"params": toy.parameters(9)}, "parameters there is"),
    "network": ({"objective": of_model(Bent)}, "loss_value there is"),
    "dtype": (
        {"objective": of_model(Narrow)},
        "activation_dtype there is 'float32', now 'bfloat16'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), NETWORKS.values(), ids=NETWORKS)
def test_another_networks_results_are_not_handed_out(finished, changes, message):
    before = everything_in(finished)
    with pytest.raises(ValueError, match=f"different run's results.*{message}"):
        runs.run(finished, measurements=TRACE, **changes)
    assert everything_in(finished) == before


@pytest.mark.parametrize("changes", [x for x, _ in NETWORKS.values()], ids=NETWORKS)
def test_an_unfinished_run_of_another_network_is_touched_nowhere(tmp_path, changes):
    leave_unfinished(tmp_path)
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match="different run's results"):
        runs.run(tmp_path, measurements=TRACE, **changes)
    assert everything_in(tmp_path) == before


def leave_unfinished(path):
    """The folder of a run that was killed before it kept anything."""
    keep = folder.RunFolder.keep
    folder.RunFolder.keep = lambda *_: (_ for _ in ()).throw(Killed)
    try:
        with pytest.raises(Killed):
            runs.run(path, measurements=TRACE, save_seconds=0)
    finally:
        folder.RunFolder.keep = keep


def test_another_checkpoint_in_a_direction_is_part_of_the_run(tmp_path):
    listed = [
        runs.DirectionalDerivatives(
            along_gradient=False, num_random=0, num_points=0, checkpoints=("/other",)
        )
    ]
    assert runs.run(tmp_path, measurements=listed) == 0
    assert runs.run(tmp_path, measurements=listed) == 0
    other = runs.host(load_params=lambda _: toy.parameters(5))
    with pytest.raises(ValueError, match="other_checkpoints there is"):
        runs.run(tmp_path, measurements=listed, host=other)


def test_another_optimizer_is_another_run_where_it_preconditions(tmp_path):
    def host(scale=1.0, **settings):
        diagonal = jax.tree.map(lambda x: scale + jnp.abs(x), toy.parameters())
        found = optimizer.Preconditioner(diagonal, "adam", **settings)
        return runs.host(load_preconditioner=lambda: found)

    listed = [Trace(num_probes=2, block_size=2, preconditioned=True)]
    runs.run(tmp_path, measurements=listed, host=host(learning_rate=0.1))
    before = everything_in(tmp_path)
    near = host(1 + 1e-6, learning_rate=0.1)  # as on another mesh
    assert runs.run(tmp_path, measurements=listed, host=near) == 0
    for other in (host(1.01, learning_rate=0.1), host(learning_rate=0.2)):
        with pytest.raises(ValueError, match="different run.*preconditioner"):
            runs.run(tmp_path, measurements=listed, host=other)
    assert everything_in(tmp_path) == before


FOREIGN = {
    "a model's folder": ("checkpoint_4/state/x", "config.gin"),
    "notes": ("unfinished/notes.txt",),
    "a state without its record": ("unfinished/hessian_trace.state/state.json",),
    "vectors without their record": ("hessian_trace_vectors/vector_0/x",),
    "a hidden file": (".git/HEAD",),
    "another package's results": ("results.json",),
}


@pytest.mark.parametrize("names", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_of_somebody_elses_files_is_not_touched(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"accuracy": 1}')
    before = everything_in(tmp_path)
    with pytest.raises(ValueError, match=r"must be new or.*Choose another") as error:
        runs.run(tmp_path, measurements=TRACE)
    assert names[0].split("/")[0] in str(error.value)
    assert everything_in(tmp_path) == before


def test_an_empty_folder_and_the_traces_of_an_early_kill_are_taken(tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "lock").write_text('{"pid": 1}')
    (tmp_path / "unfinished" / ".run.json.part").write_text("{")
    assert runs.run(tmp_path, measurements=TRACE) == 0
    assert not (tmp_path / "unfinished").exists()


DAMAGE = {"truncated": lambda x: x[: len(x) // 2], "empty": lambda _: b""}
DAMAGE["binary"] = lambda _: bytes(range(256))
DAMAGE["of another kind"] = lambda _: b"[1, 2]"


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["results.json", "hessian_trace.npz"])
def test_damaged_results_are_named(finished, tmp_path, name, damage):
    for x in finished.iterdir():
        (tmp_path / x.name).write_bytes(x.read_bytes())
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    before = everything_in(tmp_path)
    with pytest.raises(files.StorageError, match=f"{name} must (be whole|hold)"):
        runs.run(tmp_path, measurements=TRACE)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "hessian_trace.state/state.json"])
def test_a_damaged_unfinished_run_is_named(tmp_path, name, damage):
    leave_unfinished(tmp_path)
    path = tmp_path / "unfinished" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        files.StorageError, match=f"{path.name} must (be whole|hold)"
    ) as e:
        runs.run(tmp_path, measurements=TRACE)
    assert "\n" not in str(e.value)
    assert path.exists()


# A restore that failed leaves futures of Orbax's behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_vectors_are_named(tmp_path):
    like = {"a": jnp.arange(2000.0)}
    vector_store.save(tmp_path_of(tmp_path), like)
    data = [x for x in tmp_path.rglob("*") if x.is_file() and "/d/" in str(x)]
    assert data
    for path in data:
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(files.StorageError, match="vector must be whole and readable"):
        vector_store.restore(tmp_path_of(tmp_path), like)


# A restore that failed leaves futures of Orbax's behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_flipped_bit_in_a_saved_vector_is_found(tmp_path):
    """Orbax gives back what is on the disk, right or wrong."""

    @dataclasses.dataclass
    class State:
        """A state of one vector."""

        vector: PyTree

    # Noise that cannot be compressed.
    noise = np.random.default_rng(0).normal(size=4000)
    like = {"a": jnp.asarray(noise, jnp.float32)}
    saved = saved_state.SavedState(files.user_path(tmp_path), is_primary=True)
    saved.save(State(like))
    assert (saved.restore(like, State).vector["a"] == like["a"]).all()
    largest = max(
        (x for x in tmp_path.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)
    with pytest.raises(files.StorageError, match="vector_0 must (hold|be whole)"):
        saved.restore(like, State)


def tmp_path_of(tmp_path):
    return files.user_path(tmp_path / "vector")


def test_a_file_or_a_loop_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder: .*file is a file"):
        runs.run(tmp_path / "file", measurements=TRACE)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match=r"loop (is a link|must be whole)"):
        runs.run(tmp_path / "loop", measurements=TRACE)
    with pytest.raises(ValueError, match="file.* must be"):
        runs.run(tmp_path / "file" / "inside", measurements=TRACE)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written_is_said_and_resumed(tmp_path, monkeypatch, code):
    write, count = files._write_synced, []

    def failing(path, content):
        count.append(path)
        if len(count) == 3:
            raise OSError(code, os.strerror(code))
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_synced", failing)
        with pytest.raises(files.StorageError, match=os.strerror(code)) as error:
            runs.run(tmp_path, measurements=TRACE)
    assert str(count[-1].parent) in str(error.value)
    assert "start the same command again to resume" in str(error.value)
    assert not list(tmp_path.rglob("*.part"))
    assert runs.run(tmp_path, measurements=TRACE) == 0


def test_a_home_folder_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(files.user_path("~/x/../y")) == str(tmp_path / "y")
    assert str(files.user_path("gs://bucket/~/x")) == "gs://bucket/~/x"
    with pytest.raises(files.StorageError, match="known home folder: got ~nobody_"):
        files.user_path("~nobody_here/x")


HOLD = """
import sys, time
from etils import epath
from t5x_fwdloss.analysis.store import lock
with lock.held(epath.Path(sys.argv[1]) / "lock", sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_at_once_and_a_killed_one_holds_nothing(
    tmp_path, repository
):
    leave_unfinished(tmp_path)
    work = tmp_path / "unfinished"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=repository,
    )
    try:
        assert other.stdout.readline() == b"held\n"
        before = everything_in(tmp_path)
        with pytest.raises(ValueError, match=f"one run.*process {other.pid} on .*Wait"):
            runs.run(tmp_path, measurements=TRACE)
        assert everything_in(tmp_path) == before
    finally:
        other.kill()
        other.communicate()
    assert (work / "lock").exists()
    assert runs.run(tmp_path, measurements=TRACE) == 0


def test_a_lock_that_was_removed_and_made_anew_is_not_held_twice(tmp_path):
    path = files.user_path(tmp_path / "lock")
    again = pytest.raises(files.StorageError, match=f"process {os.getpid()} on")
    with lock.held(path, "there"), again, lock.held(path, "there"):
        pass
    assert not path.exists()
    with lock.held(path, "there"):
        assert path.exists()


def test_the_lock_of_a_file_that_its_last_holder_removed_is_none(tmp_path, monkeypatch):
    path, real, calls = files.user_path(tmp_path / "lock"), fcntl.flock, []

    def flock(descriptor, how):
        if not calls:  # between our opening and our locking
            os.unlink(path)
        calls.append(how)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock.held(path, "there"):
        assert path.exists()
    assert len(calls) == 2


def test_a_run_whose_folder_was_taken_over_stops(tmp_path, monkeypatch):
    """As where there are no locks, in remote storage."""
    keep = folder.RunFolder.keep

    def taken_over(self, result):
        claim = tmp_path / "unfinished" / "run.json"
        records.write(claim, records.read(claim) | {"owner": "process 7 elsewhere"})
        keep(self, result)

    monkeypatch.setattr(folder.RunFolder, "keep", taken_over)
    with pytest.raises(files.StorageError, match="process 7 elsewhere has taken it"):
        runs.run(tmp_path, measurements=TRACE)
    assert not (tmp_path / "unfinished" / "hessian_trace.json").exists()


BAD_NAMES = ["../../victim", "a/b", "run", "RESULTS", "unfinished", ".hidden", "a\nb"]
BAD_NAMES += ["a:b", "", None, 5, "x" * 300, "é", "a b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_no_name_of_a_file_is_refused(tmp_path, name):
    listed = [Trace(num_probes=2)]
    object.__setattr__(listed[0], "name", name)  # past the tests' own type checker
    with pytest.raises(
        ValueError, match="name of a measurement must|name must be a str"
    ):
        runs.run(tmp_path / "new", measurements=listed)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "names",
    [("x", "X"), ("x", "x.state"), ("x_vectors", "x"), ("a", "a.npz"), ("x", "x.JSON")],
)
def test_names_that_share_a_file_are_refused(names):
    with pytest.raises(ValueError, match="its own name|differ by more than"):
        measurement_list.check_names(names)


def test_plain_names_are_taken():
    measurement_list.check_names(
        ["hessian_trace", "a.b-c_1", "x" * 100, pathlib.Path("y").name]
    )


def test_all_of_the_seed_is_used(tmp_path):
    """Seeds that agree in their lower 32 bits draw other probes."""
    traces = []
    for seed in (0, 2**32):
        assert runs.run(tmp_path / str(seed), measurements=TRACE, seed=seed) == 0
        found = json.loads((tmp_path / str(seed) / "results.json").read_text())
        traces.append(found["measurements"][0]["results"]["trace"]["value"])
    assert traces[0] != traces[1]
    for seed in (-1, 10**23):
        with pytest.raises(ValueError, match="seed must be a whole number of at"):
            runs.run(tmp_path / "new", measurements=TRACE, seed=seed)
    assert not (tmp_path / "new").exists()
