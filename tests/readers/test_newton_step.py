"""Newton steps in results.json, against dense solutions and losses in float64."""

import numpy as np
import pytest

from . import cells, dense
from .test_numbers import group_names

NAMES = [
    f"newton_step-{matrix}-{variant}"
    for matrix in cells.NEWTON_DAMPING
    for variant in cells.NEWTON_VARIANTS
]
# Of a step whose residual is 1e-4, at the damping of its matrix.
STEP_ERROR = 1e-3


@pytest.fixture(scope="module")
def solution(truth):
    def solve(name):
        """The step in the parameters, by definition, and the matrix on them."""
        _, matrix, variant = name.split("-")
        settings, inside = cells.VARIANTS[variant], cells.in_group(variant)
        root = np.ones(len(inside))
        if settings.get("preconditioned"):
            root = cells.preconditioner_root()
        size = len(inside)
        plain = truth.matrices[matrix]
        damped = root[:, None] * plain * root
        damped = damped + cells.NEWTON_DAMPING[matrix] * np.eye(size)
        x = np.zeros(size)
        x[inside] = np.linalg.solve(
            damped[np.ix_(inside, inside)], (root * truth.gradient)[inside]
        )
        return root * x, plain

    return solve


def check_decreases(entry, truth, prefix, step, matrix):
    predicted = truth.gradient @ step - step @ matrix @ step / 2
    true = truth.shares.sum() - dense.loss(truth.theta - step)
    # What float32 leaves of the difference of two losses.
    rounding = 16 * np.finfo(np.float32).eps * truth.shares.sum()
    for kind, value in (("predicted", predicted), ("true", true)):
        number = entry.number(f"{prefix}{kind}_decrease")
        assert number["value"] == pytest.approx(value, rel=STEP_ERROR, abs=rounding)
        assert (number["unit"], number["error"]) == ("nat/token", None)
    ratio = entry.number(f"{prefix}decrease_ratio")
    error = 4 * rounding / predicted + 2 * STEP_ERROR * abs(true / predicted)
    assert ratio["value"] == pytest.approx(true / predicted, abs=error)
    assert ratio["unit"] == "1"


@pytest.mark.parametrize("name", NAMES)
def test_the_step_and_its_decreases(kept, truth, solution, name):
    entry, (step, matrix) = kept[name], solution(name)
    check_decreases(entry, truth, "", step, matrix)
    length = entry.number("step_norm")
    assert length["value"] == pytest.approx(np.linalg.norm(step), rel=STEP_ERROR)
    assert length["unit"] == "θ"
    assert entry.value("relative_residual") <= 1e-4
    assert entry.found["converged"]
    residuals = entry.arrays["relative_residuals"]
    # The last is by its recurrence; one more product gave the true one.
    assert residuals[0] == 1
    assert residuals[-1] <= 1e-4 < residuals[-2]
    assert entry.value("num_products") == len(residuals)


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_s_part_of_the_step_alone(kept, truth, solution, name):
    entry, (step, matrix) = kept[name], solution(name)
    names = group_names(name.split("-")[2])
    assert len(names) >= 2
    for group in names:
        part = np.where(dense.group(f"{group}/"), step, 0.0)
        if not part.any():
            part = np.where(dense.group(group), step, 0.0)
        check_decreases(entry, truth, f"{group.replace('/', '.')}/", part, matrix)
    ends = "_decrease", "_ratio"
    found = [n for n in entry.found["results"] if "/" in n and n.endswith(ends)]
    assert len(found) == 3 * len(names)


def test_too_little_damping_is_said_and_not_converged(kept, truth):
    entry = kept["newton_step_of_negative"]
    lowest = np.linalg.eigvalsh(truth.matrices["hessian"])[0]
    assert lowest < -1
    assert not entry.found["converged"]
    assert not entry.number("predicted_decrease")["converged"]
    (note,) = entry.found["notes"]
    assert "negative curvature" in note
    assert "damping must exceed minus the smallest eigenvalue, and 1 does not" in note


@pytest.mark.parametrize("name", NAMES)
def test_the_plots_draw_the_numbers(kept, name):
    entry, (axis,), (search,) = kept[name], kept.axes(name), kept.axes(name, 1)
    labels = [text.get_text() for text in axis.get_yticklabels()]
    assert labels[0] == "whole step"
    prefixes = ["", *(f"{label}/" for label in labels[1:])]
    wanted = [
        entry.value(f"{prefix}{kind}_decrease")
        for kind in ("predicted", "true")
        for prefix in prefixes
    ]
    assert [bar.get_width() for bar in axis.patches] == wanted
    legend = [text.get_text() for text in axis.get_legend().get_texts()]
    assert legend == ["predicted decrease", "true decrease"]
    residuals = entry.arrays["relative_residuals"]
    np.testing.assert_array_equal(search.lines[0].get_ydata(), residuals)
    assert set(search.lines[1].get_ydata()) == {1e-4}
