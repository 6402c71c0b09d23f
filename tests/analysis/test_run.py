"""What a run leaves, what it refuses, and how it goes on."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stops import Killed

from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    Eigenpairs,
    Objective,
    PreflightError,
    Trace,
)
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct
from t5x_fwdloss.analysis.store import files, saved_state

from . import runs, toy


def strict_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((path / "results.json").read_text(), parse_constant=refuse)


def numbers_of(path):
    """Every number and array of a run, for comparison to the bit."""
    document = strict_json(path)
    found = {m["name"]: m["results"] for m in document["measurements"]}
    arrays = {}
    for file in sorted(path.glob("*.npz")):
        with np.load(file) as content:
            arrays |= {f"{file.stem}/{k}": content[k].tolist() for k in content.files}
    return json.dumps([found, arrays])


def test_a_run_leaves_everything_and_nothing_else(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert {name for name in names if not name.startswith("events.")} == {
        "results.json",
        "report.html",
        "config.gin",
        "directional_derivatives.npz",
        "hessian_eigenpairs.npz",
        "hessian_trace.npz",
    }
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert (finished_run / "config.gin").read_text() == "SEED = 3\n"


def test_results_say_what_every_number_is(finished_run):
    document = strict_json(finished_run)
    assert document["status"] == "finished"
    assert document["checkpoint"] == "/models/toy/checkpoint_50"
    assert document["step"] == 50
    assert document["seed"] == runs.SEED
    assert document["normalizer"]["kind"] == "real_tokens"
    assert document["normalizer"]["W"] == document["num_tokens"]
    assert document["matmul_precision"] == "highest"
    assert document["num_batches"] == 2
    for name, module in (("jax", jax), ("numpy", np)):
        assert document["environment"]["versions"][name] == module.__version__
    assert set(document["environment"]["versions"]) >= {"jaxlib", "flax"}
    assert len(document["batches_hash"]) == 64
    matrices = [measurement["matrix"] for measurement in document["measurements"]]
    assert matrices == [None, "hessian", "hessian"]
    for measurement in document["measurements"]:
        assert measurement["seconds"] > 0
        for number in measurement["results"].values():
            assert number["unit"]
            assert number["error"] is not None or number["error_kind"].startswith(
                "exact"
            )
            assert number["converged"] in (True, False)


def test_results_say_which_parameters_were_given(tmp_path):
    params = toy.parameters()
    params["dense"]["kernel"] = params["dense"]["kernel"].astype(jnp.bfloat16)
    params["step"] = jnp.asarray(3)
    listed = [Trace(num_probes=2, block_size=1)]
    assert runs.run(tmp_path, params=params, measurements=listed) == 0
    document = strict_json(tmp_path)
    assert document["parameters_left_out"] == ["step"]
    assert document["num_parameters"] == (toy.FEATURES + 1) * toy.CLASSES
    assert document["model"]["parameter_dtypes"] == ["bfloat16", "float32"]
    page = (tmp_path / "report.html").read_text()
    assert "16 parameters in bfloat16 and float32" in page
    assert "<dt>Left out</dt><dd>step</dd>" in page


def test_microbatches_change_nothing_that_is_reported(finished_run, tmp_path):
    objective = Objective.from_model(
        toy.SoftmaxRegression(factor="NUM_REAL_TARGET_TOKENS"),
        toy.batches(6),
        num_microbatches=3,
    )
    assert runs.run(tmp_path, objective=objective) == 0
    here, there = strict_json(tmp_path), strict_json(finished_run)
    for name in ("num_batches", "batch_shapes", "batches_hash", "num_tokens"):
        assert here[name] == there[name], name
    for found, expected in zip(
        here["measurements"], there["measurements"], strict=True
    ):
        for name, number in expected["results"].items():
            value = found["results"][name]["value"]
            assert value == pytest.approx(number["value"], rel=1e-3, abs=1e-5), name
    losses = [
        np.load(path / "directional_derivatives.npz")["batch_losses"]
        for path in (tmp_path, finished_run)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_events_hold_every_number_at_the_training_step(finished_run):
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(
        str(finished_run), size_guidance={"tensors": 0}
    )
    events.Reload()
    tags = events.Tags()["tensors"]
    assert "hessian_trace/trace" in tags
    assert "hessian_trace/trace/error" in tags
    assert [event.step for event in events.Tensors("hessian_trace/trace")] == [50]


def test_the_same_run_again_changes_nothing(finished_run, monkeypatch):
    def refuse(*_):
        raise AssertionError("measured again")

    before = numbers_of(finished_run)
    for kind in (DirectionalDerivatives, Eigenpairs, Trace):
        monkeypatch.setattr(kind, "run", refuse)
    assert runs.run(finished_run) == 0
    assert numbers_of(finished_run) == before


OTHER_RUNS = {
    "seed": ({"seed": 4}, "seed there is 3, now 4"),
    "step": ({"host": runs.host(step=60)}, "step there is 50, now 60"),
    "checkpoint": ({"host": runs.host(checkpoint="/x")}, "checkpoint there is .*'/x'"),
    "loss": ({"objective": runs.objective(z_loss=0.5)}, "loss there is"),
    "data": ({"objective": runs.objective(toy.batches(6, seed=9))}, "batches there is"),
    "settings": ({"measurements": [Trace()]}, "measurements there is"),
}


@pytest.mark.parametrize(
    ("overrides", "message"), OTHER_RUNS.values(), ids=OTHER_RUNS.keys()
)
def test_a_folder_of_another_run_is_refused(finished_run, overrides, message):
    before = numbers_of(finished_run)
    with pytest.raises(ValueError, match=f"different run's results.*{message}") as e:
        runs.run(finished_run, **overrides)
    assert "Choose another ANALYSIS_OUTPUT_DIR" in str(e.value)
    assert numbers_of(finished_run) == before


def test_a_run_killed_in_lanczos_ends_with_the_same_numbers(
    finished_run, tmp_path, monkeypatch
):
    save = saved_state.SavedState.save

    count = 0

    def save_and_die(self, state):
        nonlocal count
        save(self, state)
        count += 1
        if count % 4 == 0:
            raise Killed

    for _ in range(2):  # at the fourth saved state, and at the eighth
        with monkeypatch.context() as patch:
            patch.setattr(saved_state.SavedState, "save", save_and_die)
            with pytest.raises(Killed):
                runs.run(tmp_path, save_seconds=0)
        assert not (tmp_path / "results.json").exists()
    products, multiply = [], MatrixProduct.__call__

    def counted(self, v):
        products.append(1)
        return multiply(self, v)

    monkeypatch.setattr(MatrixProduct, "__call__", counted)
    assert runs.run(tmp_path) == 0
    assert numbers_of(tmp_path) == numbers_of(finished_run)
    # Three for the self-check; the ninth step, the first eight being saved; three
    # residuals; four that the trace's stacked products are compared with. The directions
    # were finished before.
    assert len(products) == 3 + 1 + 3 + 4
    assert not (tmp_path / "unfinished").exists()


def test_a_relative_output_folder_is_that_of_the_working_directory(
    finished_run, tmp_path, monkeypatch
):
    # Runs long enough to save the state of Lanczos, which refuses relative paths.
    monkeypatch.chdir(tmp_path)
    assert runs.run("here/analysis", save_seconds=0) == 0
    assert numbers_of(tmp_path / "here" / "analysis") == numbers_of(finished_run)


def test_a_run_killed_among_the_probes_ends_with_the_same_numbers(
    finished_run, tmp_path, monkeypatch
):
    write = files.write_json

    def write_and_die(path, document):
        write(path, document)
        if path.parent.name == "hessian_trace.state":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", write_and_die)
        with pytest.raises(Killed):
            runs.run(tmp_path, save_seconds=0)
    assert runs.run(tmp_path) == 0
    assert numbers_of(tmp_path) == numbers_of(finished_run)


STOPPED_RUN = """
import os, signal, sys
from t5x_fwdloss.analysis.store import saved_state
from t5x_fwdloss.command_line.exit_status import exit_status
from tests.analysis import runs
# A shell that starts the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
save = saved_state.SavedState.save
def save_and_stop(self, state):
    save(self, state)
    os.kill(os.getpid(), int(sys.argv[2]))
saved_state.SavedState.save = save_and_stop
command = lambda: runs.run(sys.argv[1], save_seconds=0)
sys.exit(exit_status("analyze", lambda: command, command))
"""


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (
            signal.SIGINT,
            130,
            "analyze: interrupted; start the same command again to resume.",
        ),
    ],
)
def test_a_process_that_is_stopped_leaves_a_folder_that_goes_on(
    finished_run, tmp_path, repository, number, status, said
):
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_RUN, str(tmp_path), str(int(number))],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == status, done.stderr.decode()[-2000:]
    assert said in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert not (tmp_path / "results.json").exists()
    assert runs.run(tmp_path) == 0
    assert numbers_of(tmp_path) == numbers_of(finished_run)


def test_a_nan_stops_its_measurement_and_keeps_the_others(tmp_path, capsys):
    class Breaks(Trace):
        def run(self, context):
            dense = context.params["dense"] | {"kernel": jnp.full((3, 4), jnp.nan)}
            return super().run(dataclasses.replace(context, params={"dense": dense}))

    broken = [Breaks(name="broken", num_probes=4), Trace(num_probes=4)]
    assert runs.run(tmp_path, measurements=broken) == 1
    document = strict_json(tmp_path)
    assert document["status"] == "failed"
    failed, kept = document["measurements"]
    assert failed["status"] == "failed"
    assert "batch 0 gives nan in dense/bias" in failed["reason"]
    assert kept["status"] == "finished"
    assert np.load(tmp_path / "hessian_trace.npz")["samples"].shape == (4,)
    assert "broken FAILED: the product with the Hessian must be finite" in (
        capsys.readouterr().out
    )
    assert (
        "Stopped: the product with the Hessian"
        in (tmp_path / "report.html").read_text()
    )
    # The failed one is tried again; the finished one is kept.
    mended = [dataclasses.replace(broken[0]), broken[1]]
    assert runs.run(tmp_path, measurements=mended) == 1


def test_the_stock_loss_is_refused_before_anything_is_compiled(tmp_path):
    objective = runs.objective(impl="custom_vjp")
    with pytest.raises(PreflightError, match="directional_derivatives needs a loss"):
        runs.run(tmp_path, objective=objective)
    assert not objective.num_traces
    only_trace = [Trace(num_probes=2, block_size=2)]
    assert runs.run(tmp_path / "b", objective=objective, measurements=only_trace) == 0


def test_measurements_need_names_of_their_own(tmp_path):
    listed = [Trace(name=name) for name in ("a", "a")]
    with pytest.raises(ValueError, match="each with its own name: got"):
        runs.run(tmp_path, measurements=listed)


def test_bad_settings_are_refused_before_anything_is_compiled_or_written(tmp_path):
    objective = runs.objective()
    listed = [Trace(), Eigenpairs(max_steps=0)]
    with pytest.raises(ValueError, match="max_steps must be .* at least 1"):
        runs.run(tmp_path / "new", objective=objective, measurements=listed)
    assert not objective.num_traces
    assert not (tmp_path / "new").exists()


def test_another_process_writes_nothing(tmp_path):
    listed = [Trace(num_probes=2, block_size=2)]
    assert (
        runs.run(tmp_path, host=runs.host(is_primary=False), measurements=listed) == 0
    )
    assert list(tmp_path.iterdir()) == []
