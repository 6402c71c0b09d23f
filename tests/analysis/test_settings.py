"""Every setting of every measurement: right values pass, wrong ones are named.

What is right is told from the default's own type here, never from the annotation.
"""

import dataclasses
import inspect
import math
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from t5x_fwdloss import analysis
from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    Eigenpairs,
    GroupTraces,
    LossComparison,
    NewtonStep,
    SpectralDensity,
    Trace,
    settings,
)
from t5x_fwdloss.analysis.objective import preflight

from . import runs

MEASUREMENTS = [
    kind
    for kind in vars(analysis).values()
    if dataclasses.is_dataclass(kind) and hasattr(kind, "validate")
]
NOT_WHOLE = ["8", 8.5, 8.0, np.float32(8), None, True, math.nan, -1, 10**30, [8], b"8"]
NOT_NUMBERS = ["0.1", None, True, math.nan, math.inf, [0.1], 0.1j, 10**400]
NOT_BOOLS = ["True", 1, 0.0, None, []]
NOT_STRINGS = [5, None, "", " ", True, ["x"], b"x"]
# Settings whose default is None or a list: by name, for every class that has them.
OTHERS = {
    "group": [5, "", ["decoder"], True],
    "groups": ["decoder/.*", {"a": 5}, {5: "a"}, {"": "a"}, ["a"], {"a": None}, 5],
    "max_basis": ["8", 8.5, True, 0, [8]],
    "relative_error": ["0.1", True, 0, math.nan, [0.1]],
    "eigenvectors_of": [5, "", True, ["x"]],
    "checkpoints": ["/x", 5, [5], [""], [None], None, {"/x": 1}],
    "implementations": ["custom_jvp", ["custom_jpv"], [5], None, 5],
    "directions": ["gradient", 5, [5], [""], [None], None, {"gradient": 1}],
    "ranges": [5, "01", [5], [[0, "1"]], [[0, math.nan]], [[None, 1]], None],
    "effective_dimension_at": [0.1, "0.1", ["x"], [0], [-1.0], [math.nan], None],
    "other_split": [5, "", " ", True, ["train"]],
    "chunk_lengths": [8, "8", ["8"], [0], [8.5], [True], None],
}
OUT_OF_RANGE = {
    "confidence": [0.0, 1.0, -0.5, 95],
    "tolerance": [0.0, 1.0, -1e-3],
    "relative_radius": [0.0, -0.1],
}


def wrong_values(kind, field):
    if field.name in OTHERS:
        return OTHERS[field.name]
    by_type = {int: NOT_WHOLE, float: NOT_NUMBERS, bool: NOT_BOOLS, str: NOT_STRINGS}
    wrong = by_type[type(getattr(kind(), field.name))]
    if field.default is None:  # and then filled in
        wrong = [value for value in wrong if value is not None]
    return wrong + OUT_OF_RANGE.get(field.name, [])


def changed(measurement: Any, **values):
    """The measurement as gin makes it, where no type checker of the tests looks on."""
    for name, value in values.items():
        object.__setattr__(measurement, name, value)
    return measurement


@pytest.mark.parametrize("kind", MEASUREMENTS, ids=lambda kind: kind.__name__)
def test_every_setting_is_checked_and_named(kind):
    settings.check_fields(kind())
    for field in dataclasses.fields(kind):
        for value in wrong_values(kind, field):
            with pytest.raises(ValueError, match=" must be ") as refused:
                settings.check_fields(changed(kind(), **{field.name: value}))
            said = str(refused.value)
            assert f"{kind.__name__}.{field.name}" in said, said
            assert re.fullmatch(r"[^\n]+ must be [^\n]+: got [^\n]+\.", said), said


def test_numpy_s_numbers_and_lists_are_numbers_and_lists():
    settings.check_fields(
        changed(
            Eigenpairs(max_basis=40),
            num_largest=np.int64(3),
            tolerance=np.float32(0.1),
            basis_on_host=np.True_,
            damping=1,
        )
    )
    settings.check_fields(LossComparison(chunk_lengths=[4, 8]))
    settings.check_fields(DirectionalDerivatives(checkpoints=[pathlib.Path("/x")]))
    settings.check_fields(GroupTraces(groups={"all": ".*"}))


SENTENCES = {
    "a string for a number": (
        Trace,
        {"num_probes": "8"},
        "Trace.num_probes must be a whole number of at least 2: got '8' (of type str).",
    ),
    "a float that is whole": (
        Trace,
        {"num_probes": 8.0},
        "Trace.num_probes must be a whole number of at least 2: "
        "got 8.0 (of type float).",
    ),
    "out of range": (
        Trace,
        {"num_probes": 1},
        "Trace.num_probes must be a whole number of at least 2: got 1.",
    ),
    "beyond counting": (
        Trace,
        {"num_probes": 2**31},
        "Trace.num_probes must be a whole number of at most 2147483647: "
        "got 2147483648.",
    ),
    "no damping": (
        NewtonStep,
        {"damping": 0.0},
        "NewtonStep.damping must be a finite number above 0: got 0.0.",
    ),
    "no fraction": (
        Eigenpairs,
        {"tolerance": 1.0},
        "Eigenpairs.tolerance must be a finite number between 0 and 1: got 1.0.",
    ),
    "a choice": (
        Trace,
        {"kind": "signs"},
        "Trace.kind must be one of 'rademacher', 'normal': got 'signs'.",
    ),
    "an optional one": (
        Eigenpairs,
        {"max_basis": 0},
        "Eigenpairs.max_basis must be a whole number of at least 1 or None: got 0.",
    ),
    "a group": (
        Eigenpairs,
        {"group": 5},
        "Eigenpairs.group must be a string that is not empty or None: "
        "got 5 (of type int).",
    ),
    "an entry of a list": (
        LossComparison,
        {"chunk_lengths": [8, "16"]},
        "LossComparison.chunk_lengths[1] must be a whole number of at least 1: "
        "got '16' (of type str).",
    ),
    "an entry of a dictionary": (
        GroupTraces,
        {"groups": {"mlp": None}},
        "GroupTraces.groups['mlp'] must be a string that is not empty: got None.",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_sentence_has_name_type_and_range(case):
    kind, values, sentence = SENTENCES[case]
    with pytest.raises(ValueError, match=" must be ") as refused:
        settings.check_fields(changed(kind(), **values))
    assert str(refused.value) == sentence


NOT_LISTS = {
    "no list": (Trace(), "got Trace"),
    "a string": ("[@Trace()]", "got '[@Trace()]' (of type str)"),
    "a class": (
        [Trace],
        "entry 0 is Trace itself (in gin, @Trace()",
    ),
    "the class alone": (Trace, "got Trace itself"),
    "nothing": ([], "got []"),
    "None": (None, "got None"),
    "a name": ([Trace(), "trace"], "entry 1 is 'trace' (of type str)"),
    "a setting": ([changed(Trace(), name=5)], "Trace.name must be"),
}


@pytest.mark.parametrize("case", NOT_LISTS)
def test_a_run_refuses_what_is_no_list_of_measurements(case, tmp_path, monkeypatch):
    measurements, words = NOT_LISTS[case]
    monkeypatch.setattr(preflight, "has_forward_mode", None)  # nothing is traced
    run = inspect.unwrap(analysis.run_analysis)
    with pytest.raises(ValueError, match=" must be ") as refused:
        run(
            runs.objective(),
            None,
            measurements=measurements,
            output_dir=tmp_path / "results",
        )
    assert words in str(refused.value)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("seed", x) for x in ("a", 1.5, None, True)],
        *[("memory_budget", x) for x in ("1GB", 1.5, -1, True, 2**63)],
        *[("output_dir", x) for x in (None, 5, "", " ")],
    ],
)
def test_a_run_checks_its_own_arguments(name, value, monkeypatch):
    monkeypatch.setattr(preflight, "has_forward_mode", None)
    run = inspect.unwrap(analysis.run_analysis)
    arguments = {"measurements": [Trace()], "output_dir": "/nowhere"}
    with pytest.raises(ValueError, match=f"^{name} must be .*: got "):
        run(runs.objective(), None, **arguments | {name: value})


def test_the_hessian_has_no_effective_dimension():
    SpectralDensity(matrix="fisher", effective_dimension_at=(0.1,)).check_settings(())
    SpectralDensity().check_settings(())
    with pytest.raises(
        ValueError,
        match="effective_dimension_at needs a matrix without negative eigenvalues, one "
        "of gauss_newton, fisher, .*: got matrix='hessian'",
    ):
        SpectralDensity(effective_dimension_at=(0.1,)).check_settings(())
