"""Parameters, labels and groups that a run refuses, or counts, and what a reader sees."""

import io
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis import (
    Eigenpairs,
    GroupTraces,
    Objective,
    Trace,
)
from t5x_fwdloss.analysis.objective import preflight
from t5x_fwdloss.analysis.objective.finite import NonFiniteLossError
from t5x_fwdloss.analysis.report import terminal
from t5x_fwdloss.curvature.vectors import groups

from . import runs, toy

QUICK = [Trace(num_probes=2)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_refused_by_block(
    value, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "has_forward_mode", None)  # nothing is traced
    params = toy.parameters()
    params["dense"]["kernel"] = params["dense"]["kernel"].at[1, 2].set(value)
    message = (
        f"every parameter must be finite: the checkpoint gives {value} in dense/ke"
    )
    with pytest.raises(NonFiniteLossError, match=message):
        runs.run(tmp_path / "results", params=params, measurements=QUICK)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("factor", [None, 3.0, "NUM_REAL_TARGET_TOKENS"])
def test_data_without_a_token_that_counts_are_refused(factor):
    batches = toy.batches(6)
    for batch in batches:
        batch["decoder_loss_weights"] = np.zeros_like(batch["decoder_loss_weights"])
    with pytest.raises(
        ValueError, match="at least one token that counts: every one of"
    ):
        runs.objective(batches, factor=factor)


def without_weights():
    batches = toy.batches(6)
    for batch in batches:
        del batch["decoder_loss_weights"]
    return batches


def with_weights_on_padding():
    """A packed batch whose weights count what belongs to no segment, too."""
    batches = toy.batches(6)
    for batch in batches:
        batch["decoder_segment_ids"] = batch["decoder_loss_weights"].astype(np.int32)
        batch["decoder_positions"] = np.zeros_like(batch["decoder_segment_ids"])
        batch["decoder_positions"][:] = np.arange(toy.LENGTH)
        batch["decoder_loss_weights"] = np.ones_like(batch["decoder_loss_weights"])
    return batches


class Shifted(toy.SoftmaxRegression):
    """Logits that can be moved token by token."""

    def _compute_logits(self, params, batch, dropout_rng=None):
        logits = super()._compute_logits(params, batch, dropout_rng)
        return logits + params["shift"] if "shift" in params else logits


def moved_by_logits(batch, factor):
    """The number of tokens whose logits the loss depends on."""
    model = Shifted(factor=factor)
    shift = jnp.zeros((*batch["decoder_target_tokens"].shape, toy.CLASSES))
    loss = lambda x: model.loss_sum(toy.parameters() | {"shift": x}, batch)[0]
    return int((jnp.abs(jax.grad(loss)(shift)).max(-1) > 0).sum())


@pytest.mark.parametrize(
    ("batches", "factor"),
    [
        (without_weights(), None),
        (without_weights(), 3.0),
        (without_weights(), "NUM_TOTAL_TARGET_TOKENS"),
        (with_weights_on_padding(), "NUM_REAL_TARGET_TOKENS"),
        (with_weights_on_padding(), "AVERAGE_PER_SEQUENCE"),
    ],
)
def test_tokens_are_counted_as_the_loss_counts_them(
    batches, factor, tmp_path, monkeypatch
):
    monkeypatch.setattr(preflight, "check_objective", lambda *_, **__: [])
    objective = runs.objective(batches, factor=factor)
    assert runs.run(tmp_path, objective=objective, measurements=QUICK) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    counted = sum(moved_by_logits(batch, factor) for batch in batches)
    assert document["num_tokens"] == counted
    assert f"{counted:,} tokens that count" in (tmp_path / "report.html").read_text()


def test_labels_of_padding_are_not_outside_of_the_vocabulary():
    batches = without_weights()
    batches[0]["decoder_target_tokens"][0, 0] = -1
    for factor, count in (("NUM_REAL_TARGET_TOKENS", 0), (None, 1)):
        objective = runs.objective(batches, factor=factor)
        assert objective.num_labels_outside(toy.parameters()) == count


def with_labels(dtype, *labels):
    """Batches in which the first tokens, which all count, have these labels."""
    batches = toy.batches(6)
    for batch in batches:
        batch["decoder_target_tokens"] = batch["decoder_target_tokens"].astype(dtype)
        batch["decoder_loss_weights"][:, 0] = 1.0
    for row, label in enumerate(labels):
        batches[row % 2]["decoder_target_tokens"][row, 0] = label
    # A label that does not count, because its weight is zero.
    batches[1]["decoder_target_tokens"][0, 1] = 99
    batches[1]["decoder_loss_weights"][0, 1] = 0.0
    return batches


@pytest.mark.parametrize(
    ("dtype", "labels", "count"),
    [
        (np.int32, (), 0),
        (np.int32, (toy.CLASSES - 1,), 0),
        (np.int32, (toy.CLASSES, 10**6, -1), 3),
        (np.int8, (toy.CLASSES, 100), 2),
        (np.uint8, (200,), 1),
    ],
)
def test_labels_outside_of_the_vocabulary_are_counted(dtype, labels, count):
    objective = runs.objective(with_labels(dtype, *labels))
    assert objective.num_labels_outside(toy.parameters()) == count


def test_a_reader_is_told_of_labels_outside_of_the_vocabulary(tmp_path, capsys):
    objective = runs.objective(with_labels(np.int32, toy.CLASSES, -1))
    assert runs.run(tmp_path, objective=objective, measurements=QUICK) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["num_labels_outside_vocabulary"] == 2
    assert "2 labels are outside of the network's vocabulary" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "2 of them labels outside of the vocabulary" in page


def test_an_objective_without_logits_counts_no_labels():
    plain = runs.objective()
    objective = Objective(
        lambda params, batch, key: plain._numerator(params, batch, key),
        toy.batches(6),
        normalizer=plain.normalizer,
    )
    assert objective.num_labels_outside(toy.parameters()) is None


def test_a_model_without_z_loss_is_not_read_as_one_with_none():
    model = toy.SoftmaxRegression()
    del model._z_loss
    with pytest.raises(ValueError, match="SoftmaxRegression lacks _z_loss"):
        _ = model.loss_settings


def test_a_model_without_a_loss_of_ours_is_refused():
    with pytest.raises(ValueError, match=r"with_loss gives it .*: got a object\."):
        Objective.from_model(object(), toy.batches(1))


def test_groups_whose_names_differ_in_a_sign_keep_their_numbers(tmp_path):
    given = {"a/b": "dense/bias", "a.b": "dense/kernel", "c/d": ".*"}
    found = GroupTraces(groups=given, num_probes=2)
    assert runs.run(tmp_path, measurements=[found]) == 0
    (measured,) = json.loads((tmp_path / "results.json").read_text())["measurements"]
    sizes = {
        name.rpartition("/")[0]: number["value"]
        for name, number in measured["results"].items()
        if name.endswith("/parameters")
    }
    bias, kernel = toy.CLASSES, toy.CLASSES * toy.FEATURES
    assert sizes == {"a/b": bias, "a.b": kernel, "c.d": bias + kernel}
    # Each parameter is in two of them.
    assert "2 leaves are in none or in several, such as dense/b" in measured["notes"][0]
    with np.load(next(tmp_path.glob("*.npz"))) as arrays:
        assert {"a/b/samples", "a.b/samples", "c.d/samples"} <= set(arrays)


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(.*)*(.*)*(.*)*b"])
def test_a_pattern_of_exponential_time_is_refused(pattern, monkeypatch):
    monkeypatch.setattr(groups, "SECONDS_TO_MATCH", 1)
    params = {"a" * 60: jnp.ones(2)}
    start = time.monotonic()
    with pytest.raises(ValueError, match="quick to match") as refused:
        groups.group_mask(params, pattern)
    assert time.monotonic() - start < 60
    assert re.escape(repr(pattern))[2:-2] in re.escape(str(refused.value))
    assert jax.tree.leaves(groups.group_mask(params, "a+")) == [True]


def test_a_pattern_that_is_none_is_refused_in_every_measurement(tmp_path):
    for pattern in ("(", "[", "*", "(?P<x>a)(?P<x>b)", "(" * 3000):
        for measurement in (
            Eigenpairs(group=pattern),
            GroupTraces(groups={"all": pattern}),
        ):
            with pytest.raises(
                ValueError, match="must be a string that is a regular expression"
            ):
                runs.run(tmp_path / "results", measurements=[measurement])
    assert not (tmp_path / "results").exists()


def test_an_ascii_terminal_gets_signs_that_it_has():
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        terminal.print_line(
            "3.5 \N{PLUS-MINUS SIGN} 0.1 nat per θ², \N{EN DASH} é", stream
        )
        stream.flush()
        assert raw.getvalue() == b"3.5 +- 0.1 nat per theta^2, - \\xe9\n"
    assert terminal.encodable("\N{PLUS-MINUS SIGN}", "utf-8") == "\N{PLUS-MINUS SIGN}"
