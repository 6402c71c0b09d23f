"""What results.json says of preconditioned eigenvalues beside their threshold."""

import json

import jax
import jax.numpy as jnp
import pytest

from t5x_fwdloss.analysis import Eigenpairs
from t5x_fwdloss.analysis.optimizer import Preconditioner

from . import runs, toy

THRESHOLD = 38.0
# Settings of the preconditioner, the unit of an eigenvalue, the numbers, a note.
CASES = {
    "a known rate": (
        {"learning_rate": 0.25},
        "1/η",
        {"stability_threshold": (152.0, "1/η"), "learning_rate": (0.25, "η")},
        r"below 38 / η, at its learning rate η = 0.25 here.",
    ),
    "a rate of zero": (
        {"learning_rate": 0.0},
        "1/η",
        {"stability_threshold_times_learning_rate": (38.0, "1")},
        "below 38 / η, at its learning rate η = 0 here.",
    ),
    "an unknown rate": (
        {},
        "1/η",
        {"stability_threshold_times_learning_rate": (38.0, "1")},
        "below 38 / η; its learning rate η is not known to this run: LEARNING_RATE_FN "
        "gives it.",
    ),
    "a rate within": (
        {"includes_learning_rate": True},
        "1",
        {"stability_threshold": (38.0, "1")},
        "is a factor of the eigenvalues, and its steps are stable while they are below "
        "38.",
    ),
    "an unknown momentum": (
        {"learning_rate": 0.25, "threshold": None},
        "1/η",
        {},
        "whose momentum is not one that the threshold of stability is known for.",
    ),
}
OF_STABILITY = ("stability", "learning_rate")


def analyzed(folder, diagonal=None, factor="NUM_REAL_TARGET_TOKENS", **given):
    """The entry of one measurement in results.json, and what the preconditioner is."""
    params = toy.parameters()
    diagonal = jax.tree.map(jnp.ones_like, params) if diagonal is None else diagonal
    settings = {"threshold": THRESHOLD} | given.pop("preconditioner", {})
    found = Preconditioner(diagonal, "some optimizer", **settings)
    few = {"num_largest": 1, "num_smallest": 0, "max_steps": 12}
    measured = [Eigenpairs(preconditioned=True, **few, **given)]
    host = runs.host(load_preconditioner=lambda: found)
    objective = runs.objective(factor=factor)
    assert runs.run(folder, objective=objective, measurements=measured, host=host) == 0
    (entry,) = json.loads((folder / "results.json").read_text())["measurements"]
    return entry


def of_stability(entry):
    """What is said of stability: value and unit by name."""
    numbers = entry["results"].items()
    return {
        k: (x["value"], x["unit"]) for k, x in numbers if k.startswith(OF_STABILITY)
    }


@pytest.mark.parametrize("case", CASES)
def test_the_threshold_stands_beside_eigenvalues_in_its_unit(tmp_path, case):
    preconditioner, unit, numbers, note = CASES[case]
    entry = analyzed(tmp_path, preconditioner=preconditioner)
    assert entry["results"]["largest_1"]["unit"] == unit
    assert of_stability(entry) == numbers
    (told,) = entry["notes"]
    words = "Preconditioned by the checkpoint's optimizer, some optimizer"
    assert told.startswith(words)
    assert told.endswith(note)


def test_damped_eigenvalues_have_no_threshold(tmp_path):
    assert of_stability(analyzed(tmp_path, damping=0.5)) == {}


@pytest.mark.parametrize("factor", [None, 2.0, "AVERAGE_PER_SEQUENCE"])
def test_a_loss_that_grows_with_the_data_says_how_to_compare(tmp_path, factor):
    notes = analyzed(tmp_path, factor=factor)["notes"]
    told = [note for note in notes if note.startswith("The loss is a sum over")]
    assert len(told) == (factor != "AVERAGE_PER_SEQUENCE")


def test_parameters_that_are_not_trained_are_counted(tmp_path):
    diagonal = jax.tree.map(jnp.ones_like, toy.parameters())
    diagonal["dense"]["kernel"] *= 0
    notes = analyzed(tmp_path, diagonal)["notes"]
    assert "The optimizer trains 4 of 16 parameters; the others are left out." in notes
