"""Negative, zero and undecided: what a reader is told of the signs in a spectrum.

Without z-loss the Hessian of the softmax regression is positive semidefinite, and its
null space is known: a constant added to all logits of a feature changes nothing, which
makes one zero eigenvalue for each feature and one for the bias.
"""

import json

import numpy as np
import pytest

from t5x_fwdloss.analysis import Diagonal, SpectralDensity
from t5x_fwdloss.analysis.measurements import Context

from . import runs, toy

SIZE = (toy.FEATURES + 1) * toy.CLASSES
EPS = float(np.finfo(np.float32).eps)


def batches(unused=0):
    """The toy's batches with the last `unused` features switched off."""
    found = toy.batches(6)
    for batch in found if unused else []:
        batch["features"][..., -unused:] = 0.0
    return found


def numbers_of(path, measurement, unused=0):
    """The measurement's numbers, from the file that a reader opens."""
    objective = runs.objective(batches(unused))
    assert runs.run(path, objective=objective, measurements=[measurement]) == 0
    document = json.loads((path / "results.json").read_text())
    return document["measurements"][0]["results"]


@pytest.mark.parametrize("unused", [0, 1])
def test_a_density_has_no_negative_part_where_the_truth_has_none(tmp_path, unused):
    numbers = numbers_of(
        tmp_path, SpectralDensity(num_probes=12, num_steps=SIZE), unused
    )
    used = toy.FEATURES + 1 - unused
    zeros = used + unused * toy.CLASSES
    negative, zero = (numbers[f"{name}_fraction"] for name in ("negative", "zero"))
    assert negative["value"] == negative["error"] == 0.0
    assert abs(zero["value"] - zeros / SIZE) <= 4 * zero["error"]
    assert 0 < zero["error"] < 0.1
    scale = numbers["largest_node"]["value"]
    steps = used * (toy.CLASSES - 1) + 1  # distinct eigenvalues, zero among them
    level = numbers["zero_level"]
    assert level["value"] == pytest.approx(10 * EPS * steps**0.5 * scale, rel=0.15)
    assert level["unit"] == numbers["trace"]["unit"]


def test_the_diagonals_signs_are_those_beyond_their_errors(tmp_path):
    numbers = numbers_of(tmp_path, Diagonal(num_probes=64), unused=1)
    # The true diagonal is positive, and zero for the feature that is switched off.
    assert numbers["dense.kernel/negative_fraction"]["value"] == 0.0
    assert numbers["dense.kernel/zero_fraction"]["value"] == 1 / toy.FEATURES
    assert numbers["dense.kernel/undecided_fraction"]["value"] < 1 / toy.FEATURES
    assert numbers["dense.bias/zero_fraction"]["value"] == 0.0


def test_few_probes_leave_signs_undecided_and_not_negative(tmp_path, monkeypatch):
    # An indefinite matrix with a small diagonal: what four probes see is noise.
    rng = np.random.default_rng(0)
    signs = np.r_[-np.ones(6), np.zeros(4), np.ones(6)]
    noise = rng.normal(size=(SIZE, SIZE)) * np.abs(signs)
    matrix = 1e-3 * np.diag(signs) + np.triu(noise * np.abs(signs)[:, None], 1)
    matrix = (matrix + matrix.T).astype(np.float32)

    def fractions(path, matrix, num_probes):
        product = toy.product_with(matrix)
        monkeypatch.setattr(Context, "product", lambda *_: product)
        settings = {"num_probes": num_probes, "block_size": 1}
        numbers = numbers_of(path, Diagonal(**settings))
        # Leaves in order: bias (4 entries), kernel (12).
        return {
            sign: (4 * numbers[f"dense.bias/{sign}_fraction"]["value"])
            + 12 * numbers[f"dense.kernel/{sign}_fraction"]["value"]
            for sign in ("negative", "zero", "undecided")
        }

    noisy = fractions(tmp_path / "noisy", matrix, 4)
    assert noisy == {"negative": 0, "zero": 4, "undecided": pytest.approx(12)}
    exact = fractions(tmp_path / "exact", np.diag(signs).astype(np.float32), 4)
    assert exact == {"negative": pytest.approx(6), "zero": 4, "undecided": 0}
