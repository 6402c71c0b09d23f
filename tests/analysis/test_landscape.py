"""A landscape of a softmax regression: its points, its directions, what is refused."""

import json

import jax
import numpy as np
import pytest
from etils import epath
from jax.flatten_util import ravel_pytree
from stops import Killed

from t5x_fwdloss.analysis import Eigenpairs, Landscape, Objective, measurement_list
from t5x_fwdloss.analysis.measurements.along import barriers, named
from t5x_fwdloss.analysis.measurements.along import plane as plane_lib
from t5x_fwdloss.analysis.numbers import result_to_json
from t5x_fwdloss.curvature.vectors import probes

from . import runs, toy

# Split to the seed of its examples.
OTHER = {"train[:1%]": 8}


@pytest.fixture(scope="module", autouse=True)
def x64_everywhere():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def objective(x64_everywhere):
    model = toy.SoftmaxRegression(z_loss=0.01, factor="NUM_REAL_TARGET_TOKENS")
    draw = lambda seed: toy.batches(6, seed=seed, dtype=np.float64)
    return Objective.from_model(model, draw(1), load_batches=lambda x: draw(OTHER[x]))


@pytest.fixture
def context(objective, tmp_path):
    return runs.context(
        epath.Path(tmp_path),
        objective=objective,
        params=toy.parameters(dtype=np.float64),
        load_params=lambda path: toy.parameters(int(path), dtype=np.float64),
    )


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


def loss_and_accuracy(theta, seed=1):
    """By NumPy, at flat parameters: bias, then kernel."""
    whole = toy.examples(seed=seed, dtype=np.float64)
    bias, kernel = theta[: toy.CLASSES], theta[toy.CLASSES :].reshape(-1, toy.CLASSES)
    z = whole["features"] @ kernel + bias
    log_z = np.log(np.exp(z).sum(axis=-1))
    labels, weights = whole["decoder_target_tokens"], whole["decoder_loss_weights"]
    at_label = np.take_along_axis(z, labels[..., None], -1)[..., 0]
    losses = log_z - at_label + 0.01 * log_z**2
    correct = (z.argmax(axis=-1) == labels) & (weights > 0)
    return (weights * losses).sum() / weights.sum(), correct.sum() / (weights > 0).sum()


def drawn(context, number, name="landscape"):
    """A random direction by Li et al.'s definition, written out."""
    key = probes.probe_key(context.key(f"{name}/random"), number)
    d = probes.random_like(key, context.params, "normal")["dense"]["kernel"]
    kernel = np.asarray(context.params["dense"]["kernel"])
    d = np.array(d)
    for column in range(toy.CLASSES):
        length = np.linalg.norm(kernel[:, column])
        d[:, column] *= length / np.linalg.norm(d[:, column])
    # A bias has no filters.
    return np.concatenate([np.zeros(toy.CLASSES), d.ravel()])


def test_every_point_of_a_plane_is_the_loss_there(context):
    found = Landscape(num_points=5, ranges=[(-1.0, 0.5), (-0.5, 3.0)]).run(context)
    theta, first, second = flat(context.params), drawn(context, 0), drawn(context, 1)
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    angle = np.degrees(np.arccos(cosine))
    assert found.numbers["angle"].value == pytest.approx(angle, rel=1e-9)
    length = np.linalg.norm(second)
    second = second - (first @ second) / (first @ first) * first
    second *= length / np.linalg.norm(second)
    arrays = found.arrays
    assert arrays["coefficients_1"].tolist() == np.linspace(-1, 0.5, 5).tolist()
    assert arrays["coefficients_2"].tolist() == np.linspace(-0.5, 3, 5).tolist()
    for i, a in enumerate(arrays["coefficients_1"]):
        for j, b in enumerate(arrays["coefficients_2"]):
            loss, accuracy = loss_and_accuracy(theta + a * first + b * second)
            assert arrays["losses"][i, j] == pytest.approx(loss, rel=1e-12)
            assert arrays["accuracies"][i, j] == pytest.approx(accuracy, rel=1e-12)
    place = np.unravel_index(arrays["losses"].argmin(), (5, 5))
    assert place[0] != place[1]  # or their order would not show
    numbers = found.numbers
    assert numbers["smallest_loss"].value == arrays["losses"].min()
    for axis in (1, 2):
        expected = arrays[f"coefficients_{axis}"][place[axis - 1]]
        assert numbers[f"smallest_loss_place_{axis}"].value == expected
    loss, accuracy = loss_and_accuracy(theta)
    assert numbers["loss"].value == pytest.approx(loss, rel=1e-12)
    assert numbers["accuracy"].value == pytest.approx(accuracy, rel=1e-12)


def test_every_point_is_measured_on_another_split_too(context):
    given = {"num_points": 3, "ranges": [(-1.0, 0.5), (-0.5, 3.0)]}
    plain = Landscape(**given).run(context)
    found = Landscape(**given, other_split="train[:1%]").run(context)
    for name, array in plain.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
    assert plain.numbers.items() <= found.numbers.items()
    theta, first = flat(context.params), drawn(context, 0)
    second = drawn(context, 1)
    length = np.linalg.norm(second)
    second = second - (first @ second) / (first @ first) * first
    second *= length / np.linalg.norm(second)
    losses = found.arrays["on_train_1_/losses"]
    for i, a in enumerate(found.arrays["coefficients_1"]):
        for j, b in enumerate(found.arrays["coefficients_2"]):
            loss, accuracy = loss_and_accuracy(theta + a * first + b * second, 8)
            assert losses[i, j] == pytest.approx(loss, rel=1e-12)
            there = found.arrays["on_train_1_/accuracies"][i, j]
            assert there == pytest.approx(accuracy, rel=1e-12)
    value = lambda name: found.numbers[f"on_train_1_/{name}"].value
    loss, accuracy = loss_and_accuracy(theta, 8)
    assert value("loss") == pytest.approx(loss, rel=1e-12)
    assert value("accuracy") == pytest.approx(accuracy, rel=1e-12)
    place = np.unravel_index(losses.argmin(), losses.shape)
    assert value("smallest_loss") == losses.min()
    for i in (1, 2):
        expected = found.arrays[f"coefficients_{i}"][place[i - 1]]
        assert value(f"smallest_loss_place_{i}") == expected


def test_the_batches_of_another_split_are_part_of_the_run_s_identity(tmp_path):
    def run(seed, folder="out", **settings):
        objective = Objective.from_model(
            toy.SoftmaxRegression(factor="NUM_REAL_TARGET_TOKENS"),
            toy.batches(6),
            load_batches=seed and (lambda _: toy.batches(6, seed=seed)),
        )
        line = Landscape(directions=["gradient"], num_points=3, **settings)
        given = {"objective": objective, "measurements": [line]}
        return runs.run(tmp_path / folder, **given)

    assert run(8, other_split="train") == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    of_train = runs.objective(toy.batches(6, seed=8)).batches_hash
    assert found["fingerprint"]["other_batches"] == {"train": of_train}
    assert run(8, other_split="train") == 0  # finished
    with pytest.raises(ValueError, match="different run's results.*other_batches"):
        run(9, other_split="train")
    with pytest.raises(ValueError, match=r"can read other splits.*got 'train'"):
        run(None, "new", other_split="train")
    assert not (tmp_path / "new").exists()


def test_the_quadratic_model_is_that_of_the_dense_hessian(context):
    found = Landscape(num_points=3, orthogonalize=False).run(context)
    whole = toy.examples(dtype=np.float64)
    dense = toy.dense_hessian(context.params, whole, context.objective.W, z_loss=0.01)
    d = np.stack([drawn(context, 0), drawn(context, 1)])
    slopes = d @ flat(context.objective.gradient(context.params))
    matrix = d @ dense @ d.T
    np.testing.assert_allclose(found.arrays["slopes"], slopes, rtol=1e-10)
    np.testing.assert_allclose(found.arrays["hessian"], matrix, rtol=1e-10)
    loss = found.numbers["loss"].value
    for i, a in enumerate((-1.0, 0.0, 1.0)):
        for j, b in enumerate((-1.0, 0.0, 1.0)):
            c = np.array([a, b])
            expected = loss + slopes @ c + c @ matrix @ c / 2
            assert found.arrays["model"][i, j] == pytest.approx(expected, rel=1e-10)
    lengths = np.linalg.norm(d, axis=1)
    for i in range(2):
        value = lambda name, i=i: found.numbers[f"random_{i}/{name}"].value
        assert value("length") == pytest.approx(lengths[i], rel=1e-12)
        assert value("slope") == pytest.approx(slopes[i] / lengths[i], rel=1e-10)
        curvature = matrix[i, i] / lengths[i] ** 2
        assert value("curvature") == pytest.approx(curvature, rel=1e-10)
    mixed = found.numbers["mixed_curvature"].value
    assert mixed == pytest.approx(matrix[0, 1] / lengths.prod(), rel=1e-10)


def test_a_line_of_norm_scales_and_a_filter_of_zeros_do_not_move(context):
    kernel = context.params["dense"]["kernel"].at[:, 1].set(0.0)
    context.params = {
        "dense": {"kernel": kernel, "bias": context.params["dense"]["bias"]},
        # Stacked layers: the scales of a norm have two axes.
        "norm": {"scale": np.ones((3, 2))},
    }
    random = named.Direction("random")
    vector = lambda **settings: named.vector(random, context, "x", "filter", **settings)
    found = vector(ignore_vectors=True)
    assert not np.any(found["dense"]["kernel"][:, 1])
    assert np.all(found["dense"]["kernel"][:, [0, 2, 3]])
    assert not np.any(found["dense"]["bias"])
    assert not np.any(found["norm"]["scale"])
    moving = vector()
    for end in ("bias", "kernel"):
        length = np.linalg.norm(context.params["dense"][end])
        assert np.linalg.norm(moving["dense"][end]) == pytest.approx(length)


def test_three_checkpoints_lie_on_their_plane(context):
    found = Landscape(directions=["checkpoint:4", "checkpoint:5"], num_points=3)
    found = found.run(context)
    for number, path in enumerate((4, 5)):
        loss, accuracy = loss_and_accuracy(flat(toy.parameters(path, dtype=np.float64)))
        value = lambda name, i=number: found.numbers[f"checkpoint_{i}/{name}"].value
        assert value("loss") == pytest.approx(loss, rel=1e-12)
        assert value("accuracy") == pytest.approx(accuracy, rel=1e-12)
        assert found.arrays["marks"][number + 1][number] == 1.0
        assert found.arrays["losses_at_marks"][number + 1] == value("loss")
    assert "barrier_height" not in found.numbers
    mixed = found.arrays["hessian"][0, 1] / np.prod(found.arrays["lengths"])
    assert found.numbers["mixed_curvature"].value == pytest.approx(mixed, rel=1e-12)


def test_the_curvature_along_a_saved_eigenvector_is_its_eigenvalue(context, tmp_path):
    context.vectors_path = lambda name: epath.Path(tmp_path) / f"{name}_vectors"
    pairs = Eigenpairs(
        num_largest=2, num_smallest=0, tolerance=1e-9, save_eigenvectors=True
    )
    pairs.run(context)
    whole = toy.examples(dtype=np.float64)
    dense = toy.dense_hessian(context.params, whole, context.objective.W, z_loss=0.01)
    plane = Landscape(
        directions=["eigenvector:hessian_eigenpairs:1", "gradient"], num_points=3
    )
    found = plane.run(context)
    number = found.numbers["hessian_eigenpairs_eigenvector_1/curvature"]
    assert number.value == pytest.approx(np.linalg.eigvalsh(dense)[-2], rel=1e-6)
    # Both are as long as the parameters.
    length = np.linalg.norm(flat(context.params))
    np.testing.assert_allclose(found.arrays["lengths"], length, rtol=1e-9)
    ends = [found.arrays[f"coefficients_{i}"][[0, -1]].tolist() for i in (1, 2)]
    assert ends == [[-0.02, 0.02]] * 2


def waves(path, level):
    """A loss of one parameter with a hill of height 2 between 0 and 1, higher ones beside."""

    def numerator(params, batch, key):
        x = params["x"][0]
        height = jax.numpy.where((x > 0) & (x < 1), 2.0, 3.0)
        wave = jax.numpy.sin(np.pi * x) ** 2 * height
        return wave + level * x + 0 * batch["a"].sum()

    normalizer = runs.objective().normalizer.__class__("constant", 1.0)
    objective = Objective(numerator, [{"a": np.ones(1)}], normalizer=normalizer)
    return runs.context(
        path,
        objective=objective,
        params={"x": jax.numpy.zeros(1)},
        load_params=lambda _: {"x": jax.numpy.ones(1)},
    )


@pytest.mark.parametrize("num_points", [25, 24])
def test_the_barrier_between_two_checkpoints(num_points, tmp_path):
    line = Landscape(directions=["checkpoint:/x"], num_points=num_points)
    found = line.run(waves(epath.Path(tmp_path), 0.3))
    number = found.numbers["barrier_height"]
    places = np.linspace(-0.5, 1.5, num_points)
    top = (2 * np.sin(np.pi * places) ** 2)[(places > 0) & (places < 1)].max()
    assert number.value == pytest.approx(top, rel=1e-12)
    # On 24 points none is at the top; the error covers what they miss, and little more.
    assert abs(number.value - 2) <= 1.1 * number.error
    assert number.error <= 0.1
    assert found.numbers["barrier_place"].value == pytest.approx(0.5, abs=0.05)
    assert found.numbers["checkpoint_0/loss"].value == pytest.approx(0.3)
    assert "accuracy" not in found.numbers


def test_a_line_that_bends_up_has_no_barrier():
    places = np.array([0.0, 0.2, 0.5, 1.0])
    found = barriers.barrier(places, places**2 + 1)
    assert (found.height, found.error) == (0.0, 0.0)


def test_the_error_of_a_barrier_is_the_rise_of_a_parabola():
    places = np.array([0.0, 0.4, 0.6, 1.0])
    found = barriers.barrier(places, places * (1 - places))
    # Its top, 1/4, lies between the two points at 0.24.
    assert found.height == pytest.approx(0.24)
    assert found.height + found.error == pytest.approx(0.25)


def test_directions_that_are_zero_or_parallel_are_left_out(context):
    line = Landscape(directions=["gradient", "checkpoint:0"], num_points=3)
    found = line.run(context)
    assert "checkpoint:0 is zero" in found.notes[0]
    assert found.arrays["losses"].shape == (3,)
    again = {"checkpoint:4": "checkpoint:04"}
    other = Landscape(name="twice", directions=[*again, *again.values()], num_points=3)
    found = other.run(context)
    assert "checkpoint:04 is parallel to the first" in found.notes[0]
    assert found.arrays["losses"].shape == (3,)


@pytest.mark.parametrize(("angle", "is_kept"), [(5e-3, True), (5e-4, False)])
def test_a_direction_is_parallel_below_a_thousandth_of_its_length(angle, is_kept):
    first, second = (
        plane_lib.Axis(
            "",
            {"x": 3.0 * jax.numpy.array([c, s])},
            3.0,
            np.zeros(3),
            is_checkpoint=False,
        )
        for c, s in ((1.0, 0.0), (np.cos(angle), np.sin(angle)))
    )
    found = plane_lib.spanned(first, second, orthogonalize=True)
    assert (found is not None) == is_kept
    if found is not None:
        assert found.angle == pytest.approx(np.degrees(angle))
        np.testing.assert_allclose(found.vector["x"], [0.0, 3.0], atol=1e-9)


@pytest.mark.parametrize(("kill_at", "num_splits"), [(1, 1), (9, 1), (5, 2)])
def test_a_run_killed_between_points_ends_with_the_same_bits(
    context, kill_at, num_splits, monkeypatch
):
    plain = Landscape(
        num_points=3,
        name="random",
        other_split="train[:1%]" if num_splits == 2 else None,
    )
    context.save_seconds = 0
    whole = plain.run(context)
    context.state_path = lambda name, path=context.state_path: path("again" + name)
    value, count = Objective.value_and_accuracy, 0

    def counted(self, params):
        nonlocal count
        count += 1
        if count == kill_at + 1:
            raise Killed
        return value(self, params)

    monkeypatch.setattr(Objective, "value_and_accuracy", counted)
    with pytest.raises(Killed):
        plain.run(context)
    found = plain.run(context)
    # Every point once, and what was lost of the point of the kill.
    lost = kill_at % num_splits + 1
    assert count == 10 * num_splits + lost
    assert json.dumps(result_to_json(found)) == json.dumps(result_to_json(whole))


REFUSED = {
    "none": ({"directions": ()}, "must be one direction or two: got 0"),
    "three": (
        {"directions": ("gradient", "random", "random:1")},
        "must be one direction or two: got 3",
    ),
    "unknown": ({"directions": ("up",)}, "must be 'gradient', .*: got 'up'"),
    "same": ({"directions": ("random", "random:0")}, "must differ: got 'random' and"),
    "no measurement": (
        {"directions": ("eigenvector:x:0",)},
        "must name a measurement before it with save_eigenvectors=True: got 'x'",
    ),
    "no eigenvector": (
        {"directions": ("eigenvector:hessian_eigenpairs:3",)},
        "must name an eigenvector of hessian_eigenpairs, from 0 to 2: got 3",
    ),
    "points": ({"num_points": 2}, "num_points must be .* at least 3: got 2"),
    "ranges": ({"ranges": [(0.0, 1.0)]}, "ranges must be empty, or for each .* 2 dir"),
    "range": ({"ranges": [(0.0, 1.0), (1.0, 1.0)]}, "two increasing numbers: got"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_settings_get_a_sentence(given, message):
    pairs = Eigenpairs(num_largest=3, num_smallest=0, save_eigenvectors=True)
    with pytest.raises(ValueError, match=message):
        measurement_list.check("measurements", [pairs, Landscape(**given)])


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_compiled(context):
    context.objective = runs.objective(toy.batches(6, dtype=np.float64))

    def missing(path):
        raise ValueError(f"there is no checkpoint {path}.")

    line = Landscape(directions=["checkpoint:/x"])
    for load, message in (
        (missing, "no checkpoint /x"),
        (None, "needs a run that can"),
    ):
        context.load_params = load
        with pytest.raises(ValueError, match=message):
            line.validate(context)
    with pytest.raises(ValueError, match="'preconditioned_gradient' in Landscape.dir"):
        Landscape(directions=["preconditioned_gradient"]).validate(context)
    assert not context.objective.num_traces
