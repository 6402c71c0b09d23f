"""Eigenvalues far smaller than the largest, and eigenvalues that occur often."""

import numpy as np
import pytest

from . import cells, dense

EPS = float(np.finfo(np.float32).eps)


def numbers_at(entry, end):
    return [
        number
        for name, number in entry.found["results"].items()
        if name.startswith(f"{end}_")
    ]


def test_a_small_eigenvalue_is_converged_by_its_own_magnitude(kept, truth):
    values = np.linalg.eigvalsh(truth.matrices["hessian"]) + cells.SHIFT
    # A residual that is small relative to the largest would not tell even the sign.
    assert -5e-3 * values.max() < values[0] < 0 < values[1]
    entry = kept["shifted"]
    (number,) = numbers_at(entry, "smallest")
    tolerance = cells.TOLERANCE_OF_SHIFTED
    assert number["converged"]
    assert number["value"] == pytest.approx(values[0], rel=tolerance)
    level = 10 * EPS * np.sqrt(number["count"]) * values.max()
    allowed = tolerance * abs(values[0]) + level
    assert entry.arrays["allowed"] == pytest.approx([allowed], rel=tolerance)
    assert number["error"] <= allowed * (1 + tolerance)


@pytest.mark.parametrize("matrix", cells.ENDS)
def test_each_copy_of_an_eigenvalue_has_its_place(kept, truth, matrix):
    inside = dense.group(cells.OF_SIGNS)
    values = np.linalg.eigvalsh(truth.matrices[matrix][np.ix_(inside, inside)])
    scale = np.abs(values).max()
    assert (np.abs(values) < 1e-7 * scale).mean() > 0.7
    entry = kept[f"null_space-{matrix}"]
    for end, order, count in zip(
        ("largest", "smallest"), (values[::-1], values), cells.ENDS[matrix], strict=True
    ):
        numbers = numbers_at(entry, end)
        assert len(numbers) == count
        for number, expected in zip(numbers, order, strict=False):
            # The product's rounding adds to that of the steps.
            level = 20 * EPS * np.sqrt(number["count"]) * scale
            assert number["converged"]
            assert number["value"] == pytest.approx(expected, rel=1e-3, abs=level)
            assert number["error"] <= 1e-3 * abs(expected) + level
