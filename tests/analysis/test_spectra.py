"""Densities, traces by group, diagonals and the comparison of losses."""

import copy

import jax
import numpy as np
import pytest
from etils import epath
from jax.flatten_util import ravel_pytree
from stops import Killed

from t5x_fwdloss.analysis import (
    Diagonal,
    Eigenpairs,
    GroupTraces,
    LossComparison,
    Objective,
    SpectralDensity,
    settings,
)
from t5x_fwdloss.analysis.measurements.of_matrix.density import spectral_samples
from t5x_fwdloss.analysis.store import saved_state

from . import runs, tiny_t5, toy

SIZE = (toy.FEATURES + 1) * toy.CLASSES


@pytest.fixture(scope="module")
def shared():
    """A context whose compiled products serve all tests here."""
    context = runs.context("", objective=runs.objective(z_loss=0.01))
    context.product("hessian")
    return context


@pytest.fixture
def context(shared, tmp_path):
    found = copy.copy(shared)
    found.state_path = lambda name: epath.Path(tmp_path) / name
    return found


@pytest.fixture
def dense(context):
    return toy.dense_hessian(
        context.params, toy.examples(), context.objective.W, z_loss=0.01
    )


def test_a_full_krylov_space_gives_the_moments_of_each_probe(context, dense):
    found = SpectralDensity(num_probes=3, num_steps=SIZE).run(context)
    samples = spectral_samples(found)
    key = context.key("hessian_spectral_density/probes")
    from t5x_fwdloss.curvature.vectors import probes

    for i in range(3):
        probe = probes.random_like(probes.probe_key(key, i), context.params)
        v = np.asarray(ravel_pytree(probe)[0], np.float64)
        assert samples.weights[i].sum() == pytest.approx(1.0, rel=1e-6)
        for degree in (1, 2, 3):
            moment = samples.weights[i] @ samples.nodes[i] ** degree
            expected = v @ np.linalg.matrix_power(dense, degree) @ v / SIZE
            assert moment == pytest.approx(expected, rel=1e-4)


def test_the_density_knows_trace_and_norm(context, dense):
    found = SpectralDensity(num_probes=12, num_steps=SIZE).run(context)
    values = np.linalg.eigvalsh(dense)
    expected = {
        "trace": values.sum(),
        "frobenius_norm": np.sqrt(np.square(values).sum()),
    }
    for name, value in expected.items():
        number = found.numbers[name]
        assert abs(number.value - value) <= 4 * number.error
    assert found.numbers["largest_node"].value == pytest.approx(values[-1], rel=1e-5)


def test_an_effective_dimension_of_too_few_steps_is_not_converged(context):
    few, many = (
        SpectralDensity(
            matrix="gauss_newton", num_steps=steps, effective_dimension_at=(1e-3,)
        )
        .run(context)
        .numbers["effective_dimension_at_0.001"]
        for steps in (2, SIZE)
    )
    assert not few.converged
    assert many.converged
    assert abs(few.value - many.value) <= few.error


def test_gauss_newton_of_a_linear_model_has_the_hessians_density(context):
    settings = {"name": "same", "num_probes": 2, "num_steps": 6}
    one = SpectralDensity(**settings).run(context)
    other = SpectralDensity(matrix="gauss_newton", **settings).run(context)
    for name in ("nodes", "weights"):
        np.testing.assert_allclose(one.arrays[name], other.arrays[name], atol=1e-5)


def test_traces_by_group_add_up_and_are_those_of_the_blocks(context, dense):
    found = GroupTraces(num_probes=32).run(context)
    names = {n.rpartition("/")[0] for n in found.numbers if "/" in n}
    assert names == {"dense.bias", "dense.kernel"}
    blocks = {"dense.bias": slice(0, 4), "dense.kernel": slice(4, 16)}
    total = 0.0
    for name, block in blocks.items():
        number = found.numbers[f"{name}/trace"]
        assert abs(number.value - np.trace(dense[block, block])) <= 4 * number.error
        assert found.numbers[f"{name}/parameters"].value == block.stop - block.start
        total += number.value
    assert found.numbers["trace"].value == pytest.approx(total, rel=1e-5)
    norm = found.numbers["frobenius_norm"]
    assert abs(norm.value - np.linalg.norm(dense)) <= 4 * norm.error
    assert found.notes == ()


def test_groups_that_leave_parameters_out_say_so(context):
    measurement = GroupTraces(groups={"head": "dense/bias"}, num_probes=4)
    found = measurement.run(context)
    assert "1 leaves are in none or in several, such as dense/kernel" in found.notes[0]
    twice = GroupTraces(
        name="twice", groups={"all": ".*", "head": "dense/bias"}, num_probes=4
    )
    assert (
        "1 leaves are in none or in several, such as dense/bias"
        in (twice.run(context).notes[0])
    )
    with pytest.raises(ValueError, match=r"'none/.*' matches none"):
        GroupTraces(groups={"x": "none/.*"}).validate(context)
    outside = GroupTraces(groups={"head": "dense/bias"}, group="dense/kernel")
    with pytest.raises(ValueError, match="must hold .* group='dense/kernel' .* head"):
        outside.validate(context)


def test_the_diagonal_is_within_its_error(context, dense):
    found = Diagonal(num_probes=64).run(context)
    diagonal = np.diag(dense)
    parts = {"dense/bias": diagonal[:4], "dense/kernel": diagonal[4:].reshape(3, 4)}
    for name, expected in parts.items():
        mean, error = (found.arrays[f"{name}/{end}"] for end in ("mean", "error"))
        assert (np.abs(mean - expected) <= 4.5 * error + 1e-6).all()
        largest = found.numbers[f"{name.replace('/', '.')}/largest"]
        assert largest.value == mean.max()
        assert largest.error == error.reshape(-1)[mean.argmax()]


def test_a_large_diagonal_is_summed_up_and_not_saved(context):
    assert Diagonal(num_probes=4, max_saved=SIZE - 1).run(context).arrays == {}
    saved = Diagonal(num_probes=4, max_saved=SIZE).run(context).arrays
    assert sum(x.size for name, x in saved.items() if name.endswith("/mean")) == SIZE


@pytest.mark.parametrize(
    ("measurement", "where"),
    [
        (
            SpectralDensity(num_probes=2, num_steps=6),
            (saved_state.SavedState, "save"),
        ),
        (
            Diagonal(num_probes=6, block_size=2),
            (saved_state.SavedState, "save"),
        ),
    ],
    ids=["density", "diagonal"],
)
def test_a_killed_measurement_goes_on_to_the_same_numbers(
    context, monkeypatch, measurement, where
):
    context.save_seconds = 0
    expected = measurement.run(context)
    context.state_path(measurement.name).rmtree()
    save, calls = getattr(*where), []

    def save_and_die(*args):
        if len(calls) % 3 == 2:  # at every third save, before anything of it is written
            calls.append("died")
            raise Killed
        calls.append("saved")
        return save(*args)

    monkeypatch.setattr(*where, save_and_die)
    for _ in range(12):  # more than the density's saves
        try:
            found = measurement.run(context)
            break
        except Killed:
            continue
    assert "died" in calls
    assert found.numbers == expected.numbers
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)


def test_the_gradient_lies_wholly_in_a_complete_eigenbasis(context):
    found = Eigenpairs(num_largest=SIZE, num_smallest=0).run(context)
    assert found.numbers["gradient_in_largest"].value == pytest.approx(1.0, abs=1e-4)
    cosines = found.arrays["gradient_cosines"]
    assert (cosines**2).sum() == found.numbers["gradient_in_largest"].value


def test_the_losses_agree_and_only_t5xs_own_has_no_forward_mode(context):
    found = LossComparison(num_rounds=2).run(context)
    eps = float(np.finfo(np.float32).eps)
    for name in ("autodiff", "custom_jvp"):
        for what in ("value", "gradient", "jvp"):
            assert found.numbers[f"{name}/{what}_difference"].value <= 32 * eps
        assert found.numbers[f"{name}/jvp_time"].value > 0
        assert found.numbers[f"{name}/memory"].unit == "MiB"
    assert found.numbers["custom_vjp/value_difference"].value == 0.0
    assert "custom_vjp/jvp_difference" not in found.numbers
    assert "custom_vjp: has no forward mode." in found.notes


def test_chunked_candidates_are_compared_too(tmp_path):
    objective = Objective.from_model(tiny_t5.model(), tiny_t5.batches())
    params = tiny_t5.parameters()
    context = runs.context(tmp_path, objective=objective, params=params)
    comparison = LossComparison(chunk_lengths=(2,), num_rounds=1)
    comparison.validate(context)
    found = comparison.run(context)
    names = {name.rpartition("/")[0] for name in found.numbers}
    assert "custom_jvp, chunks of 2" in names
    for name in names - {"custom_vjp"}:
        for what in ("value", "gradient", "jvp"):
            number = found.numbers.get(f"{name}/{what}_difference")
            assert number is None or number.value <= 1e-5, (name, what)
    # The chunks' memory is another: the other loss was really used.
    whole, chunked = (
        found.numbers[f"custom_jvp{end}/memory"].value for end in ("", ", chunks of 2")
    )
    assert whole != chunked
    with pytest.raises(ValueError, match="chunk_lengths.* must be .* of at least 1"):
        settings.check_fields(LossComparison(chunk_lengths=(0,)))


def test_a_wrong_gradient_is_found_and_its_largest_block_named(context, monkeypatch):
    exchanged = Objective.with_loss

    def broken(objective, name, length):
        found = exchanged(objective, name, length)
        if name != "autodiff":
            return found
        gradient = found.gradient

        def wrong(params):
            right = gradient(params)["dense"]
            return {"dense": right | {"bias": 1.1 * right["bias"]}}

        monkeypatch.setattr(found, "gradient", wrong)
        return found

    monkeypatch.setattr(Objective, "with_loss", broken)
    found = LossComparison(num_rounds=0).run(context)
    assert found.numbers["autodiff/gradient_difference"].value > 1e-3
    assert "autodiff: the gradient differs most in dense/bias." in found.notes
    assert found.numbers["custom_jvp/gradient_difference"].value < 1e-5


def test_differences_are_relative_to_the_reference(context, monkeypatch):
    exchanged = Objective.with_loss
    reference = context.objective

    def scaled(objective, name, length):
        found = exchanged(objective, name, length)
        if name != "autodiff":
            return found
        times = lambda factor, tree: jax.tree.map(lambda x: factor * x, tree)
        value, gradient = reference.value, reference.gradient
        monkeypatch.setattr(found, "value", lambda params: 1.25 * value(params))
        monkeypatch.setattr(found, "gradient", lambda p: times(1.5, gradient(p)))
        slope = lambda p, v: (value(p), 1.75 * reference.jvp(p, v)[1])
        monkeypatch.setattr(found, "jvp", slope)
        return found

    monkeypatch.setattr(Objective, "with_loss", scaled)
    found = LossComparison(num_rounds=0).run(context).numbers
    for what, expected in (("value", 0.25), ("gradient", 0.5), ("jvp", 0.75)):
        number = found[f"autodiff/{what}_difference"]
        assert number.value == pytest.approx(expected, rel=1e-5)
        assert number.unit == "1"
        assert found[f"custom_jvp/{what}_difference"].value < 1e-5


def test_times_and_memory_are_those_of_the_programs(context, monkeypatch):
    """Each program takes the seconds that a clock of the test says."""
    from t5x_fwdloss.analysis.measurements import comparison

    labels = ["reference", "custom_vjp", "autodiff", "autodiff/jvp"]
    seconds = {
        "reference": [2.0, 2.0, 2.0],
        "custom_vjp": [3.0, 1.0, 5.0],
        "autodiff": [4.0, 8.0, 6.0],
        "autodiff/jvp": [1.0, 1.0, 1.0],
    }
    clock, readings = 0.0, []
    for number in range(4):
        for label in labels:
            # The first round warms up, and takes long.
            clock += 1.0
            readings.append(clock)
            clock += seconds[label][number - 1] if number else 1000.0
            if number:
                readings.append(clock)
    ticks = iter(readings)
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: next(ticks))
    names = ("custom_vjp", "autodiff")
    found = LossComparison(implementations=names, num_rounds=3).run(context).numbers
    monkeypatch.undo()
    expected = {
        "custom_vjp/time": (1.5, 0.5),
        "autodiff/time": (3.0, 0.5),
        "autodiff/jvp_time": (0.5, 0.0),
    }
    for name, (value, error) in expected.items():
        number = found[name]
        assert (number.value, number.error, number.count) == (value, error, 3)
        assert number.unit == "of the reference"
    value_and_gradient = comparison._value_and_gradient(
        context.objective.with_loss("autodiff", None), context.params
    )
    size = value_and_gradient.memory_analysis().temp_size_in_bytes
    assert found["autodiff/memory"].value == size / 1024**2
    jvp = comparison._jvp(context.objective.with_loss("autodiff", None), context.params)
    size_of_jvp = jvp.memory_analysis().temp_size_in_bytes
    assert size_of_jvp != size
    assert found["autodiff/jvp_memory"].value == size_of_jvp / 1024**2


def test_a_comparison_needs_known_names_and_a_model(context):
    with pytest.raises(ValueError, match="fast"):
        settings.check_fields(LossComparison(implementations=("fast",)))
    context.objective = copy.copy(context.objective)
    context.objective.model = None
    with pytest.raises(ValueError, match="was not made by Objective.from_model"):
        LossComparison().validate(context)
