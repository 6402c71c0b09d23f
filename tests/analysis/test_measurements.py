"""Each measurement finds the numbers of the Hessian written out."""

import copy
import math

import jax
import numpy as np
import pytest
from etils import epath
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    Eigenpairs,
    Trace,
    measurement_list,
)

from . import runs, toy


@pytest.fixture(scope="module", autouse=True)
def x64_everywhere():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def shared(x64_everywhere):
    """A context whose compiled products serve all tests here."""
    context = runs.context(
        "",
        objective=runs.objective(toy.batches(6, dtype=np.float64), z_loss=0.01),
        params=toy.parameters(dtype=np.float64),
        load_params=lambda path: toy.parameters(int(path), dtype=np.float64),
    )
    context.product("hessian")
    return context


@pytest.fixture
def context(shared, tmp_path):
    found = copy.copy(shared)
    found.state_path = lambda name: epath.Path(tmp_path) / name
    return found


@pytest.fixture
def dense(context):
    whole = toy.examples(dtype=np.float64)
    return toy.dense_hessian(context.params, whole, context.objective.W, z_loss=0.01)


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


def test_slope_and_curvature_are_those_of_the_dense_matrices(context, dense):
    found = DirectionalDerivatives(checkpoints=("4",), num_points=3).run(context)
    gradient = flat(context.objective.gradient(context.params))
    there = flat(toy.parameters(4, dtype=np.float64)) - flat(context.params)
    for label, direction in (("gradient", gradient), ("checkpoint_0", there)):
        v = direction / np.linalg.norm(direction)
        slope = found.numbers[f"{label}/slope"]
        assert slope.value == pytest.approx(gradient @ v, rel=1e-12)
        assert slope.error <= 1e-14
        curvature = found.numbers[f"{label}/curvature"].value
        assert curvature == pytest.approx(v @ dense @ v, rel=1e-12)
    assert found.numbers["checkpoint_0/distance"].value == pytest.approx(
        np.linalg.norm(there), rel=1e-12
    )
    assert {k for k in found.numbers if k.startswith("random")} >= {
        f"random_{i}/{what}" for i in range(3) for what in ("slope", "curvature")
    }


def test_the_losses_along_a_line_are_the_losses_there(context):
    found = DirectionalDerivatives(
        checkpoints=("4",), num_points=3, num_random=0, along_gradient=False
    ).run(context)
    other = context.objective.value(toy.parameters(4, dtype=np.float64))
    losses = found.arrays["checkpoint_0/losses"]
    assert losses[0] == found.numbers["loss"].value
    assert losses[-1] == pytest.approx(other, rel=1e-12)


def test_the_model_is_the_loss_up_to_third_order(context):
    def miss(radius):
        settings = {"num_random": 0, "num_points": 3, "relative_radius": radius}
        found = DirectionalDerivatives(**settings).run(context)
        return abs(found.arrays["gradient/losses"] - found.arrays["gradient/model"])[0]

    assert miss(2e-2) / miss(1e-2) == pytest.approx(8.0, rel=0.05)


def test_eigenpairs_are_those_of_the_dense_hessian(context, dense):
    found = Eigenpairs(tolerance=1e-8, num_largest=3).run(context)
    expected = np.linalg.eigvalsh(dense)
    for i in range(3):
        number = found.numbers[f"largest_{i + 1}"]
        assert number.converged
        assert abs(number.value - expected[-1 - i]) <= number.error + 1e-12
    smallest = found.numbers["smallest_1"]
    assert np.abs(expected - smallest.value).min() <= smallest.error + 1e-12
    assert found.converged
    assert not any("Not converged" in note for note in found.notes)


def test_pairs_that_do_not_converge_are_a_result_and_say_so(context, dense):
    found = Eigenpairs(max_steps=8, tolerance=1e-8).run(context)
    assert not found.converged
    assert (
        "Not converged after 8 steps to a relative residual of 1e-08"
        in (found.notes[0])
    )
    expected = np.linalg.eigvalsh(dense)
    for name, number in found.numbers.items():
        if name.startswith(("largest", "smallest")):
            # The residual is true even so: an eigenvalue lies within it.
            assert np.abs(expected - number.value).min() <= number.error + 1e-12


@pytest.mark.parametrize("block_size", [1, 3])
def test_the_trace_lies_within_its_error(context, dense, block_size):
    found = Trace(num_probes=40, block_size=block_size).run(context)
    number = found.numbers["trace"]
    assert number.count == 40
    # Four standard errors of a seeded draw; and an error that is the true one.
    assert abs(number.value - np.trace(dense)) <= 4 * number.error
    off = dense - np.diag(np.diag(dense))
    expected = math.sqrt(2 * (off**2).sum() / 40)
    assert number.error == pytest.approx(expected, rel=0.35)
    mean = found.numbers["mean_eigenvalue"]
    assert mean.value == pytest.approx(number.value / len(dense))


def test_block_size_does_not_change_the_samples(context):
    samples = [
        Trace(num_probes=5, block_size=size).run(context).arrays["samples"]
        for size in (1, 4)
    ]
    np.testing.assert_allclose(*samples, rtol=1e-12)


def test_a_name_of_its_own_gives_other_random_numbers(context):
    samples = [
        Trace(name=name, num_probes=2).run(context).arrays["samples"]
        for name in ("first", "second")
    ]
    assert not np.isclose(*samples).any()


BAD = {
    "nothing": (
        DirectionalDerivatives(along_gradient=False, num_random=0),
        "needs a direction: got along_gradient=False, num_random=0, no eigenvectors and no checkpoints",
    ),
    "no pairs": (
        Eigenpairs(num_largest=0, num_smallest=0),
        "needs num_largest or num_smallest: both are 0",
    ),
}


@pytest.mark.parametrize(("measurement", "message"), BAD.values(), ids=BAD.keys())
def test_bad_settings_get_a_sentence(measurement, message):
    with pytest.raises(ValueError, match=message):
        measurement_list.check("measurements", [measurement])


def test_a_checkpoint_that_does_not_fit_is_refused(context):
    context.load_params = lambda _: {"dense": {"bias": np.ones(4)}}
    with pytest.raises(ValueError, match=r"checkpoint /x must .* at dense/kernel"):
        DirectionalDerivatives(checkpoints=("/x",)).validate(context)
    context.load_params = None
    with pytest.raises(ValueError, match="needs a run that can load other checkpoints"):
        DirectionalDerivatives(checkpoints=("/x",)).validate(context)
