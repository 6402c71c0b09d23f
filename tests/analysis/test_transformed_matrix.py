"""Blocks of groups, damping, preconditioning, and what measurements leave for others."""

import copy

import jax
import numpy as np
import pytest
from etils import epath
from jax.flatten_util import ravel_pytree
from stops import Killed

from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    Eigenpairs,
    SpectralDensity,
    Trace,
    measurement_list,
)
from t5x_fwdloss.analysis import settings as settings_lib
from t5x_fwdloss.analysis.measurements import Context
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.analysis.store import saved_state

from . import runs, toy

SIZE = (toy.FEATURES + 1) * toy.CLASSES
KERNEL = slice(toy.CLASSES, SIZE)  # behind the bias, in the order of `ravel_pytree`


@pytest.fixture(scope="module", autouse=True)
def x64_everywhere():
    with jax.enable_x64(True):
        yield


def diagonal():
    return jax.tree.map(lambda x: x**2 + 0.5, toy.parameters(7, dtype=np.float64))


def preconditioner():
    return Preconditioner(diagonal(), "an optimizer")


@pytest.fixture(scope="module")
def shared(x64_everywhere):
    """A context whose compiled products serve all tests here."""
    context = runs.context(
        "",
        objective=runs.objective(toy.batches(6, dtype=np.float64), z_loss=0.01),
        params=toy.parameters(dtype=np.float64),
        load_preconditioner=preconditioner,
    )
    context.product("hessian")
    return context


@pytest.fixture
def context(shared, tmp_path):
    found = copy.copy(shared)
    found.state_path = lambda name: epath.Path(tmp_path) / name
    found.vectors_path = lambda name: epath.Path(tmp_path) / f"{name}_vectors"
    return found


@pytest.fixture
def dense(context):
    whole = toy.examples(dtype=np.float64)
    return toy.dense_hessian(context.params, whole, context.objective.W, z_loss=0.01)


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0], np.float64)


def preconditioned(dense):
    root = np.sqrt(flat(diagonal()))
    return root[:, None] * dense * root, root


CASES = {
    "whole": ({}, lambda dense: dense),
    "group": ({"group": "dense/kernel"}, lambda dense: dense[KERNEL, KERNEL]),
    "damped": ({"damping": 0.3}, lambda dense: dense + 0.3 * np.eye(len(dense))),
    "preconditioned": (
        {"preconditioned": True},
        lambda dense: preconditioned(dense)[0],
    ),
    "all at once": (
        {"group": "dense/kernel", "damping": -0.2, "preconditioned": True},
        lambda dense: (preconditioned(dense)[0] - 0.2 * np.eye(SIZE))[KERNEL, KERNEL],
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request, dense):
    settings, matrix = request.param
    return settings, matrix(dense)


def test_eigenpairs_are_those_of_the_matrix_that_was_asked_for(context, case):
    settings, matrix = case
    found = Eigenpairs(tolerance=1e-8, num_largest=3, **settings).run(context)
    expected = np.linalg.eigvalsh(matrix)
    for i in range(3):
        number = found.numbers[f"largest_{i + 1}"]
        assert abs(number.value - expected[-1 - i]) <= number.error + 1e-9
    assert found.numbers["smallest_1"].value == pytest.approx(expected[0], abs=1e-7)


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++", "xtrace"])
def test_the_trace_is_that_of_the_matrix_that_was_asked_for(context, case, estimator):
    settings, matrix = case
    measurement = Trace(
        estimator=estimator, num_probes=12, sketch_size=4, block_size=3, **settings
    )
    measurement.validate(context)
    number = measurement.run(context).numbers["trace"]
    assert abs(number.value - np.trace(matrix)) <= 4 * number.error
    mean = measurement.run(context).numbers["mean_eigenvalue"]
    assert mean.value == pytest.approx(number.value / len(matrix))


def test_a_whole_subspace_gives_the_trace_exactly_and_says_so(context, dense):
    for estimator in ("hutch++", "xtrace"):
        found = Trace(
            name=estimator, estimator=estimator, num_probes=SIZE + 1, sketch_size=SIZE
        ).run(context)
        value = found.numbers["trace"].value
        assert value == pytest.approx(np.trace(dense), rel=1e-9)
    assert "exact up to rounding" in found.notes[0]


def test_the_density_is_that_of_the_matrix_that_was_asked_for(context, case):
    settings, matrix = case
    found = SpectralDensity(num_probes=2, num_steps=SIZE, **settings).run(context)
    expected = np.linalg.eigvalsh(matrix)
    assert found.arrays["dimension"] == len(matrix)
    for end, value in (("largest", expected[-1]), ("smallest", expected[0])):
        node = found.numbers[f"{end}_node"].value
        assert node == pytest.approx(value, abs=1e-7)


def test_several_starts_see_an_eigenvalue_as_often_as_it_occurs(context):
    # The identity: one start exhausts its space at once, three see it three times.
    settings = {"num_largest": 3, "num_smallest": 0, "tolerance": 1e-7}
    identity = copy.copy(context)
    identity.product = lambda *_: lambda v: v
    one = Eigenpairs(**settings).run(identity)
    three = Eigenpairs(num_starts=3, name="three", **settings).run(identity)
    for found in (one, three):
        values = [found.numbers[f"largest_{i}"].value for i in (1, 2, 3)]
        np.testing.assert_allclose(values, 1.0, rtol=1e-12)
    assert three.numbers["num_products"].value == 6  # three steps, three residuals
    with pytest.raises(ValueError, match="num_starts must be .* of at least 1: got 0"):
        settings_lib.check_fields(Eigenpairs(num_starts=0))


@pytest.mark.parametrize("estimator", ["hutch++", "xtrace"])
def test_a_killed_estimate_goes_on_to_the_same_bits(context, monkeypatch, estimator):
    measurement = Trace(estimator=estimator, num_probes=6, sketch_size=5, block_size=2)
    expected = measurement.run(context)  # nothing is saved in so short a time
    context.save_seconds = 0
    save, calls = saved_state.SavedState.save, []
    bars = []

    def progress(*args):
        bars.append(Context.progress(context, *args))
        return bars[-1]

    context.progress = progress

    def save_and_die(*args):
        save(*args)
        calls.append("saved")
        if len(calls) in (1, 2, 4):
            raise Killed

    monkeypatch.setattr(saved_state.SavedState, "save", save_and_die)
    for _ in range(4):
        try:
            found = measurement.run(context)
            break
        except Killed:
            continue
    assert len(calls) > 2
    # What a run counted before it was killed, the next one starts from.
    assert [bar._done for bar in bars] == [bar._first for bar in bars[1:]] + [
        {"hutch++": 16, "xtrace": 12}[estimator]
    ]
    assert found.numbers == expected.numbers
    np.testing.assert_array_equal(found.arrays["samples"], expected.arrays["samples"])


@pytest.mark.parametrize("settings", [{}, {"preconditioned": True}], ids=["", "P"])
def test_saved_eigenvectors_are_directions_for_a_later_measurement(
    context, dense, settings
):
    pairs = Eigenpairs(
        num_largest=2,
        num_smallest=1,
        tolerance=1e-9,
        save_eigenvectors=True,
        **settings,
    )
    found = pairs.run(context)
    context.vectors = {pairs.name: pairs.num_vectors}
    lines = DirectionalDerivatives(
        along_gradient=False, num_random=0, num_points=0, eigenvectors_of=pairs.name
    )
    lines.validate(context)
    measured = lines.run(context).numbers
    matrix, root = preconditioned(dense) if settings else (dense, np.ones(SIZE))
    values, vectors = np.linalg.eigh(matrix)
    for i, position in enumerate((-1, -2, 0)):
        v = root * vectors[:, position]
        curvature = v @ dense @ v / (v @ v)
        assert values[position] == pytest.approx(curvature * (v @ v))
        number = measured[f"eigenvector_{i}/curvature"]
        assert number.value == pytest.approx(curvature, rel=1e-6)
    assert found.numbers["largest_1"].value == pytest.approx(values[-1], rel=1e-7)
    again = pairs.run(context)  # the vectors are there already
    assert again.numbers == found.numbers


@pytest.mark.parametrize("normalization", ["leaf", "filter"])
def test_normalized_random_directions_have_the_parameters_norms(
    context, dense, normalization
):
    lines = DirectionalDerivatives(
        along_gradient=False,
        num_random=1,
        num_points=0,
        random_normalization=normalization,
    )
    lines.validate(context)
    from t5x_fwdloss.curvature.vectors import probes

    key = context.key("directional_derivatives/random")
    drawn = probes.random_like(probes.probe_key(key, 0), context.params, "normal")
    axes = {
        "leaf": {"kernel": None, "bias": None},
        "filter": {"kernel": 0, "bias": None},
    }
    parts = {
        name: np.asarray(drawn["dense"][name])
        * np.linalg.norm(context.params["dense"][name], axis=axis)
        / np.linalg.norm(drawn["dense"][name], axis=axis)
        for name, axis in axes[normalization].items()
    }
    v = np.concatenate([parts["bias"], parts["kernel"].ravel()])
    v /= np.linalg.norm(v)
    number = lines.run(context).numbers["random_0/curvature"]
    assert number.value == pytest.approx(v @ dense @ v, rel=1e-9)


def test_the_preconditioned_gradient_is_a_direction(context, dense):
    lines = DirectionalDerivatives(
        along_gradient=False,
        along_preconditioned_gradient=True,
        num_random=0,
        num_points=0,
    )
    lines.validate(context)
    numbers = lines.run(context).numbers
    gradient = flat(context.objective.gradient(context.params))
    v = gradient * flat(diagonal())
    v /= np.linalg.norm(v)
    slope = numbers["preconditioned_gradient/slope"].value
    assert slope == pytest.approx(gradient @ v, rel=1e-9)
    curvature = numbers["preconditioned_gradient/curvature"].value
    assert curvature == pytest.approx(v @ dense @ v, rel=1e-9)


def test_the_gradients_overlap_is_in_the_matrixs_own_coordinates(context, dense):
    settings = {"group": "dense/kernel", "preconditioned": True}
    found = Eigenpairs(tolerance=1e-9, num_largest=2, **settings).run(context)
    matrix, root = preconditioned(dense)
    gradient = (root * flat(context.objective.gradient(context.params)))[KERNEL]
    _, vectors = np.linalg.eigh(matrix[KERNEL, KERNEL])
    cosines = vectors[:, -2:].T @ gradient / np.linalg.norm(gradient)
    overlap = found.numbers["gradient_in_largest"].value
    assert overlap == pytest.approx(np.sum(cosines**2), rel=1e-5)


def without_optimizer(context):
    found = copy.copy(context)
    found.load_preconditioner = None
    return found


REFUSED = {
    "group": (Trace(group="encoder/.*"), r"'encoder/.\*' matches none"),
    "damping": (
        Trace(damping=float("nan")),
        "Trace.damping must be .*: got nan",
    ),
    "estimator": (
        Trace(estimator="exact"),
        r"estimator must be one of .*'hutch\+\+', 'xtrace': got 'exact'",
    ),
    "sketch": (Trace(sketch_size=0), "sketch_size must be .* of at least 1"),
    "normalization": (
        DirectionalDerivatives(random_normalization="layer"),
        "must be one of 'vector', 'leaf', 'filter': got 'layer'",
    ),
    "eigenvectors": (
        DirectionalDerivatives(eigenvectors_of="hessian_eigenpairs"),
        "before it with save_eigenvectors=True: got 'hessian_eigenpairs'",
    ),
    "optimizer": (
        Trace(preconditioned=True),
        "Trace.preconditioned needs a run that can read the state",
    ),
}


@pytest.mark.parametrize(
    ("measurement", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_settings_that_cannot_work_are_refused(context, measurement, message):
    def check():
        measurement_list.check("measurements", [measurement])
        measurement.validate(without_optimizer(context))

    with pytest.raises(ValueError, match=message):
        check()


def test_a_run_hands_eigenvectors_on_in_its_order_only(tmp_path):
    pairs = Eigenpairs(
        num_largest=2, num_smallest=0, max_steps=9, save_eigenvectors=True
    )
    lines = DirectionalDerivatives(
        num_random=0, num_points=0, eigenvectors_of="hessian_eigenpairs"
    )
    with pytest.raises(ValueError, match="must name a measurement before it"):
        runs.run(tmp_path / "wrong", measurements=[lines, pairs])
    assert runs.run(tmp_path / "right", measurements=[pairs, lines]) == 0
    assert (tmp_path / "right" / "hessian_eigenpairs_vectors" / "vector_1").exists()
