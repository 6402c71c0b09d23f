"""Products that cannot be right stop the run, or the measurement, and say why."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis import (
    Eigenpairs,
    PreflightError,
    Trace,
)
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct

from . import runs, toy

SEMIDEFINITE = ("gauss_newton", "fisher", "sampled_fisher", "empirical_fisher")


def wrong_for_the_third(monkeypatch):
    """What a compiler that makes a wrong function for stacked vectors leaves."""
    right = MatrixProduct.stacked

    def wrong(self, vectors):
        return jax.tree.map(lambda x: x.at[2].multiply(1.1), right(self, vectors))

    monkeypatch.setattr(MatrixProduct, "stacked", wrong)


@pytest.mark.parametrize("matrix", ["hessian", *SEMIDEFINITE])
def test_stacked_products_are_compared_before_they_are_used(
    matrix, monkeypatch, tmp_path
):
    wrong_for_the_third(monkeypatch)
    message = (
        r"the check 'the .*, 4 vectors at once equal one by one' failed: .* on a CPU set "
        r"the environment variable XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=, "
        r"or block_size = 1\."
    )
    measurements = [Trace(matrix=matrix, num_probes=4, block_size=4)]
    with pytest.raises(PreflightError, match=message):
        runs.run(tmp_path / "four", measurements=measurements)


def test_single_products_need_no_comparison(monkeypatch, tmp_path):
    wrong_for_the_third(monkeypatch)
    measurements = [Trace(num_probes=4, block_size=1)]
    assert runs.run(tmp_path / "one", measurements=measurements) == 0


def test_the_comparison_is_reported_once_a_matrix(tmp_path):
    measurements = [Trace(name=name, num_probes=4, block_size=4) for name in ("a", "b")]
    assert runs.run(tmp_path, measurements=measurements) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    (check,) = [c for c in document["preflight"] if "one by one" in c["name"]]
    assert check["name"].startswith("the Hessian, 4 vectors")
    # Sharper than the products are long: nothing passes by chance.
    assert 0 <= check["first"] <= check["tolerance"]
    trace = document["measurements"][0]["results"]["trace"]["value"]
    assert check["tolerance"] < 1e-2 * abs(trace)


def with_negated(objective, matrix):
    """The objective with a matrix that is negative semidefinite instead."""
    right = objective._linear_maps[matrix]
    negated = lambda function: lambda *args: jax.tree.map(jnp.negative, function(*args))
    objective._linear_maps[matrix] = dataclasses.replace(
        right, apply=negated(right.apply), direct=negated(right.direct)
    )
    return objective


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("matrix", SEMIDEFINITE)
def test_a_semidefinite_matrix_with_a_negative_form_is_stopped(
    matrix, block_size, tmp_path
):
    objective = with_negated(runs.objective(z_loss=0.01), matrix)
    measurements = [Trace(matrix=matrix, num_probes=4, block_size=block_size)]
    assert runs.run(tmp_path, objective=objective, measurements=measurements) == 1
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["status"] == "failed"
    (entry,) = document["measurements"]
    assert entry["matrix"] == matrix
    assert (
        "must not be negative along any vector, being positive semi"
        in (entry["reason"])
    )
    assert entry["reason"] in (tmp_path / "report.html").read_text()


def test_what_may_be_negative_is_not_stopped(tmp_path):
    objective = with_negated(runs.objective(), "hessian")
    measurements = [Trace(num_probes=4)]
    assert runs.run(tmp_path, objective=objective, measurements=measurements) == 0


def test_gauss_newton_of_a_loss_that_is_not_convex_is_not_stopped(tmp_path):
    """Far below zero the z-loss makes the Hessian in the logits negative."""
    params = toy.parameters()
    params["dense"]["bias"] = params["dense"]["bias"] - 100.0
    objective = runs.objective(z_loss=0.05)
    status = runs.run(
        tmp_path,
        objective=objective,
        params=params,
        measurements=[Trace(matrix="gauss_newton", num_probes=4)],
    )
    assert status == 0
    document = json.loads((tmp_path / "results.json").read_text())
    found = document["measurements"][0]["results"]["trace"]
    dense = toy.dense_hessian(params, toy.examples(), objective.W, z_loss=0.05)
    assert np.linalg.eigvalsh(dense)[0] < 0
    assert found["value"] == pytest.approx(np.trace(dense), abs=4 * found["error"])


def test_a_null_space_is_not_taken_for_negative(tmp_path):
    """Every row of logits may be shifted: rounding decides the sign there."""
    measurements = [
        Eigenpairs(matrix="gauss_newton", num_largest=2, num_smallest=4, max_steps=30),
    ]
    objective = runs.objective()
    assert runs.run(tmp_path, objective=objective, measurements=measurements) == 0
