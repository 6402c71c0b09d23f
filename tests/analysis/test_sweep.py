"""A sweep's files against single runs of its checkpoints, bit for bit."""

import itertools
import logging
import math
import os
import re

import jax
import numpy as np
import pytest
import stops
import tensorflow as tf
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.analysis import Eigenpairs
from t5x_fwdloss.analysis.numbers import result_from_json
from t5x_fwdloss.analysis.store import files, records
from t5x_fwdloss.analysis.sweep import sweep

from . import runs, sweeps, toy

# The figures of the finished sweep, by name.
DRAWN = {}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    model_dir = sweeps.model_folder(folder / "model")
    assert sweeps.run(model_dir, folder / "out", drawn=DRAWN) == 0
    return model_dir, folder / "out"


def test_every_step_has_the_numbers_of_a_single_run(finished, tmp_path):
    model_dir, out = finished
    objective = runs.objective()
    for step in sweeps.STEPS:
        params, host = sweeps.load(model_dir / f"checkpoint_{step}")
        single = tmp_path / f"{step}"
        given = {"measurements": sweeps.measurements(), "host": host}
        assert runs.run(single, params=params, objective=objective, **given) == 0
        assert sweeps.results(out / f"step_{step}") == sweeps.results(single)


def test_the_curves_are_the_numbers_of_the_steps(finished):
    _, out = finished
    document = sweeps.sweep_json(out)
    assert [x["step"] for x in document["steps"]] == list(sweeps.STEPS)
    assert document["status"] == "finished"
    for number, step in enumerate(sweeps.STEPS):
        for entry in sweeps.results(out / f"step_{step}"):
            (curves,) = [
                x for x in document["measurements"] if x["name"] == entry["name"]
            ]
            assert set(curves["numbers"]) == set(entry["results"])
            for name, expected in entry["results"].items():
                curve = curves["numbers"][name]
                assert curve["steps"][number] == step
                assert curve["unit"] == expected["unit"]
                for column, key in {
                    "values": "value",
                    "errors": "error",
                    "error_kinds": "error_kind",
                    "intervals": "interval",
                    "converged": "converged",
                }.items():
                    assert curve[column][number] == expected[key]


CURVE = {"steps", "unit", "values", "errors", "error_kinds", "intervals", "converged"}


def test_other_members_have_another_schema(finished):
    """Where this fails, sweep.json changed: count SCHEMA_VERSION up, then write it."""
    document = sweeps.sweep_json(finished[1])
    (curve, *_) = document["measurements"][0]["numbers"].values()
    assert document["schema_version"] == sweep.SCHEMA_VERSION == 1
    assert set(document) == {
        *("schema_version", "status", "fingerprint", "steps", "measurements"),
        *("neighbors", "notes", "sha256"),
    }
    assert set(document["steps"][0]) == {
        *("step", "checkpoint", "checkpoint_time", "folder", "status", "reason"),
        "learning_rate",
    }
    assert set(curve) == CURVE


def test_a_sweep_of_another_schema_is_refused_and_kept(tmp_path):
    model_dir, out = sweeps.model_folder(tmp_path / "model"), tmp_path / "out"
    given = {"measurements": sweeps.FEW, "steps": [sweeps.STEPS[0]]}
    assert sweeps.run(model_dir, out, **given) == 0
    path = out / "sweep.json"
    document = records.read(path)
    records.write(path, document | {"schema_version": 7})
    before = path.read_bytes()
    with pytest.raises(files.StorageError, match="schema_version .*: got 7"):
        sweeps.run(model_dir, out, **given)
    assert path.read_bytes() == before


def test_the_curves_are_drawn_with_their_errors_as_bands(finished):
    _, out = finished
    for measurement in sweeps.sweep_json(out)["measurements"]:
        figure = DRAWN[f"sweep-{measurement['name']}"]
        lines = [x for axis in figure.axes for x in axis.lines]
        bands = [x for axis in figure.axes for x in axis.collections]
        for name, curve in measurement["numbers"].items():
            values = np.array(curve["values"], float)
            errors = np.array([x or 0.0 for x in curve["errors"]])
            found = [
                x
                for x in lines
                if np.array_equal(x.get_ydata(), values, equal_nan=True)
            ]
            assert found, name
            assert list(found[0].get_xdata()) == curve["steps"]
            corners = np.concatenate([values - errors, values + errors])
            drawn = [np.unique(x.get_paths()[0].vertices[:, 1]) for x in bands]
            assert any(np.array_equal(x, np.unique(corners)) for x in drawn), name
        assert any(np.any(x) for x in map(_errors, measurement["numbers"].values()))


def _errors(curve):
    return [x for x in curve["errors"] if x is not None]


def test_events_have_every_number_at_its_step(finished):
    _, out = finished
    (path,) = (out / "tensorboard").glob("events.out.tfevents.*")
    found = {}
    for event in tf.compat.v1.train.summary_iterator(str(path)):
        for value in event.summary.value:
            found[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
    expected = {}
    for step in sweeps.STEPS:
        for entry in sweeps.results(out / f"step_{step}"):
            for name, number in result_from_json(
                entry | {"seconds": 0.0}, {}
            ).numbers.items():
                tag = f"{entry['name']}/{name}"
                expected[step, tag] = number.value
                if number.error is not None:
                    expected[step, f"{tag}/error"] = number.error
    for x in sweeps.sweep_json(out)["neighbors"]:
        tag = f"{x['measurement']}/{x['end']}_overlap_with_step_before"
        expected[x["later"], tag] = x["overlap"]
    expected = {k: np.float32(x) for k, x in expected.items() if math.isfinite(x)}
    assert found == expected


def test_overlaps_are_those_of_dense_eigenvectors(finished):
    _, out = finished
    spaces = {step: dense_spaces(step) for step in sweeps.STEPS}
    found = sweeps.sweep_json(out)["neighbors"]
    pairs = [(100, 200), (200, 300)]
    assert {(x["earlier"], x["later"], x["end"]) for x in found} == {
        (*pair, end) for pair in pairs for end in ("largest", "smallest")
    }
    for x in found:
        before, here = (spaces[x[k]][x["end"]] for k in ("earlier", "later"))
        expected = np.sum((before.T @ here) ** 2) / before.shape[1]
        if x["end"] == "largest":
            np.testing.assert_allclose(x["overlap"], expected, atol=1e-4)
        assert x["num_vectors"] == [before.shape[1]] * 2
        assert x["converged"] == all(
            number["converged"]
            for step in (x["earlier"], x["later"])
            for entry in sweeps.results(out / f"step_{step}")
            for name, number in entry["results"].items()
            if re.fullmatch(rf"{x['end']}_\d+", name)
        )


def dense_spaces(step):
    whole = toy.examples()
    normalizer = whole["decoder_loss_weights"].sum()
    _, vectors = np.linalg.eigh(
        toy.dense_hessian(toy.parameters(step), whole, normalizer)
    )
    return {"largest": vectors[:, -2:], "smallest": vectors[:, :1]}


def test_the_flat_order_of_the_dense_hessian():
    flat, _ = ravel_pytree(toy.parameters(100))
    assert flat.shape == (len(dense_spaces(100)["largest"]),)


def test_the_second_checkpoint_compiles_nothing(tmp_path):
    model_dir = sweeps.model_folder(tmp_path / "model")
    compiled = {}

    class Count(logging.Handler):
        def emit(self, record):
            words = re.match(r"Finished XLA compilation of (\S+)", record.getMessage())
            if words:
                compiled.setdefault(loaded[-1], set()).add(words[1])

    loaded, logger, handler = [0], logging.getLogger("jax._src.dispatch"), Count()

    def load(path):
        loaded.append(sweeps.step_of(path))
        return sweeps.load(path)

    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            assert sweeps.run(model_dir, tmp_path / "out", load=load) == 0
    finally:
        logger.removeHandler(handler)
    # The functions of the objective and of its products, which are its own.
    own = {f"jit({name})" for name in ("counted", "linearize", "apply", "<lambda>")}
    assert own <= compiled[100]
    # Functions of vectors that only the comparison with an earlier step needs.
    assert not own & compiled.get(200, set())
    assert 300 not in compiled


def test_finished_steps_are_not_restored_again(finished):
    model_dir, out = finished
    before = (out / "sweep.json").read_bytes()

    def load(path):
        raise AssertionError(path)

    assert sweeps.run(model_dir, out, load=load) == 0
    assert (out / "sweep.json").read_bytes() == before


def test_a_step_that_was_trained_again_is_refused(tmp_path):
    model_dir = sweeps.model_folder(tmp_path / "model", (1,))
    given = {"measurements": sweeps.FEW, "objective": runs.objective()}
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 0
    os.utime(model_dir / "checkpoint_1", (1, 1))
    # Copied, with the same parameters.
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 0
    os.utime(model_dir / "checkpoint_1", (2, 2))

    def load(path):
        return toy.parameters(9), sweeps.load(path)[1]

    with pytest.raises(ValueError, match="different run's results.*parameters"):
        sweeps.run(model_dir, tmp_path / "out", load=load, **given)


def test_a_sweep_that_is_stopped_resumes_with_the_same_bits(
    finished, tmp_path, monkeypatch
):
    model_dir, expected = finished
    statuses, given = [], {"objective": runs.objective(), "steps": sweeps.STEPS[:2]}
    for number in range(60):
        with monkeypatch.context() as patch:
            stops.signal_at(9 + number % 3, patch.setattr)
            statuses.append(sweeps.run(model_dir, tmp_path / "out", **given))
        if statuses[-1] == 0:
            break
    assert statuses[-1] == 0
    assert set(statuses[:-1]) == {143}
    assert len(statuses) > 3
    for step in sweeps.STEPS[:2]:
        folder = f"step_{step}"
        assert sweeps.results(tmp_path / "out" / folder) == sweeps.results(
            expected / folder
        )
    found, wanted = sweeps.sweep_json(tmp_path / "out"), sweeps.sweep_json(expected)
    assert found["neighbors"] == [x for x in wanted["neighbors"] if x["later"] == 200]
    assert not (tmp_path / "out" / "vectors").exists()


def test_a_checkpoint_that_fails_does_not_stop_the_others(tmp_path):
    model_dir = sweeps.model_folder(tmp_path / "model")

    def load(path):
        if sweeps.step_of(path) == 100:
            raise files.StorageError("It is damaged.")
        params, host = sweeps.load(path)
        if sweeps.step_of(path) == 200:
            params = jax.tree.map(lambda x: x * np.nan, params)
        return params, host

    given = {"measurements": sweeps.FEW}
    assert sweeps.run(model_dir, tmp_path / "out", load=load, **given) == 1
    document = sweeps.sweep_json(tmp_path / "out")
    assert [x["status"] for x in document["steps"]] == ["failed", "failed", "finished"]
    assert document["steps"][0]["reason"] == "It is damaged."
    assert "parameter" in document["steps"][1]["reason"]
    # The same command, with whole checkpoints, measures what failed.
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 0


def test_eigenvectors_that_are_not_kept_are_left_out_and_said(tmp_path):
    model_dir = sweeps.model_folder(tmp_path / "model", (1, 2))
    given = {"measurements": [Eigenpairs(num_largest=1, num_smallest=0, max_steps=3)]}
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 0
    (model_dir / "checkpoint_3").mkdir()
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 0
    document = sweeps.sweep_json(tmp_path / "out")
    assert [(x["earlier"], x["later"]) for x in document["neighbors"]] == [(1, 2)]
    assert not document["neighbors"][0]["converged"]  # three steps are too few
    (note,) = document["notes"]
    assert "between steps 2 and 3 is left out" in note
    assert note in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (1, 3, 2)])
def test_saved_eigenvectors_are_compared_with_a_step_of_another_call(tmp_path, order):
    model_dir = sweeps.model_folder(tmp_path / "model", order[:-1])
    pairs = Eigenpairs(
        num_largest=1, num_smallest=0, max_steps=8, save_eigenvectors=True
    )
    given = {"measurements": [pairs], "objective": runs.objective()}
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 0
    sweeps.model_folder(model_dir, order[-1:])
    assert sweeps.run(model_dir, tmp_path / "out", **given) == 0
    found = sweeps.sweep_json(tmp_path / "out")["neighbors"]
    # Of steps between which a third one was measured later, nothing is left.
    expected = list(itertools.pairwise(sorted(order)))
    assert [(x["earlier"], x["later"]) for x in found] == expected
    for x in found:
        first, second = (
            dense_spaces(x[k])["largest"][:, -1] for k in ("earlier", "later")
        )
        np.testing.assert_allclose(x["overlap"], (first @ second) ** 2, atol=1e-3)
