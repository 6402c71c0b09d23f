"""Landscapes as results.json, arrays and figures have them, against dense float64."""

import numpy as np
import pytest
import scipy.interpolate

from t5x_fwdloss.analysis import Landscape
from t5x_fwdloss.analysis.report.figures import SERIES

from . import cells, dense, reading
from .test_figures import line

ROUNDING = 2e-5
NUM = 5
# What `reading.run` draws the batches of the other split with.
TRAIN = len("train")
POINTS = [(0, 0), (1, 3), (2, 2), (4, 1), (4, 4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return reading.run(
        tmp_path_factory.mktemp("landscape") / "run",
        [
            Landscape(num_points=NUM, other_split="train"),
            Landscape(
                name="mixed",
                directions=["preconditioned_gradient", "checkpoint:/models/other"],
                num_points=NUM,
            ),
            Landscape(
                name="line",
                directions=["checkpoint:/models/other"],
                num_points=9,
                other_split="train",
            ),
        ],
    )


def filter_normalized(name, number):
    """A random direction of Li et al. 2018, written out leaf by leaf."""
    drawn = cells.draws(f"{name}/random", [number], "normal")[:, 0]
    found = []
    for path, leaf in dense.leaves(dense.parameters()).items():
        d = drawn[dense.group(path)].reshape(leaf.shape)
        if leaf.ndim < 2:
            d = np.zeros_like(d)
        else:
            # A token's embedding is a filter; else the weights of one output are.
            axis = 1 if path.endswith("/embedding") else 0
            size = np.linalg.norm(np.asarray(leaf, float), axis=axis, keepdims=True)
            d = d * size / np.linalg.norm(d, axis=axis, keepdims=True)
        found.append(d.ravel())
    return np.concatenate(found)


@pytest.fixture(scope="module")
def spanned(truth):
    """The two directions of each plane, and the place of the other checkpoint."""
    other = dense.flat(dense.parameters(3)) - truth.theta
    first = cells.preconditioner_root() ** 2 * truth.gradient
    first *= np.linalg.norm(truth.theta) / np.linalg.norm(first)
    part = first @ other / (first @ first)
    d, e = (filter_normalized("landscape", i) for i in (0, 1))
    rest = e - (d @ e) / (d @ d) * d
    rest *= np.linalg.norm(e) / np.linalg.norm(rest)
    angle = lambda u, v: np.degrees(
        np.arccos(u @ v / np.linalg.norm(u) / np.linalg.norm(v))
    )
    return {
        "landscape": (d, rest, angle(d, e), None),
        "mixed": (first, other - part * first, angle(first, other), part),
    }


LABELS = {
    "landscape": ("random_0", "random_1"),
    "mixed": ("preconditioned_gradient", "checkpoint_0"),
}


@pytest.mark.parametrize("name", LABELS)
def test_the_plane_of_a_t5(run, truth, spanned, name):
    entry = run[name]
    first, second, angle, _ = spanned[name]
    assert entry.value("loss") == pytest.approx(truth.shares.sum(), rel=ROUNDING)
    assert entry.value("angle") == pytest.approx(angle, rel=1e-4)
    places = [entry.arrays[f"coefficients_{i}"] for i in (1, 2)]
    losses = entry.arrays["losses"]
    for i, j in POINTS:
        theta = truth.theta + places[0][i] * first + places[1][j] * second
        assert losses[i, j] == pytest.approx(dense.loss(theta), rel=ROUNDING)
        if name == "landscape":
            found = entry.arrays["on_train/losses"][i, j]
            assert found == pytest.approx(dense.loss(theta, TRAIN), rel=ROUNDING)
    d = np.stack([first, second])
    slopes, matrix = d @ truth.gradient, d @ truth.matrices["hessian"] @ d.T
    lengths = np.linalg.norm(d, axis=1)
    scale = np.linalg.norm(truth.gradient), np.linalg.norm(truth.matrices["hessian"])
    results = entry.found["results"]
    for number, label in enumerate(LABELS[name]):
        assert results[f"{label}/length"]["value"] == pytest.approx(lengths[number])
        slope = slopes[number] / lengths[number]
        found = results[f"{label}/slope"]
        assert found["value"] == pytest.approx(slope, abs=ROUNDING * scale[0])
        assert found["unit"] == "nat/token per θ"
        curvature = matrix[number, number] / lengths[number] ** 2
        found = results[f"{label}/curvature"]
        assert found["value"] == pytest.approx(curvature, abs=ROUNDING * scale[1])
        assert found["unit"] == "nat/token per θ²"
    mixed = entry.value("mixed_curvature")
    expected = matrix[0, 1] / lengths.prod()
    assert mixed == pytest.approx(expected, abs=ROUNDING * scale[1])
    grid = np.stack(np.meshgrid(*places, indexing="ij"), -1)
    model = entry.value("loss") + grid @ slopes
    model = model + ((grid @ matrix) * grid).sum(-1) / 2
    tolerance = 10 * ROUNDING * np.abs(model).max()
    np.testing.assert_allclose(entry.arrays["model"], model, atol=tolerance)
    lowest = np.unravel_index(losses.argmin(), losses.shape)
    assert entry.value("smallest_loss") == losses.min()
    for axis in (0, 1):
        found = entry.value(f"smallest_loss_place_{axis + 1}")
        assert found == places[axis][lowest[axis]]


def test_the_place_of_a_checkpoint_on_a_plane(run, spanned):
    entry, part = run["mixed"], spanned["mixed"][3]
    np.testing.assert_allclose(entry.arrays["marks"], [[0, 0], [part, 1]], rtol=1e-4)
    loss = dense.loss(dense.flat(dense.parameters(3)))
    assert entry.value("checkpoint_0/loss") == pytest.approx(loss, rel=ROUNDING)


@pytest.mark.parametrize(("where", "seed"), [("", 0), ("on_train/", TRAIN)])
def test_the_line_to_a_checkpoint(run, truth, where, seed):
    entry, other = run["line"], dense.flat(dense.parameters(3))
    places, losses = entry.arrays["coefficients_1"], entry.arrays[f"{where}losses"]
    assert places.tolist() == np.linspace(-0.5, 1.5, 9).tolist()
    at = lambda a: dense.loss((1 - a) * truth.theta + a * other, seed)
    expected = [at(a) for a in places]
    np.testing.assert_allclose(losses, expected, rtol=ROUNDING)
    heights = [at(a) - (1 - a) * at(0) - a * at(1) for a in places if 0 <= a <= 1]
    number = entry.number(f"{where}barrier_height")
    assert number["value"] == pytest.approx(max(heights), abs=ROUNDING * at(0))
    assert number["unit"] == "nat/token"
    assert "parabolas" in number["error_kind"]
    top = [a for a in places if 0 <= a <= 1][int(np.argmax(heights))]
    assert entry.value(f"{where}barrier_place") == top
    assert entry.value(f"{where}loss") == pytest.approx(at(0), rel=ROUNDING)
    found = entry.value(f"{where}checkpoint_0/loss")
    assert found == pytest.approx(at(1), rel=ROUNDING)
    found = (
        entry.value(f"{where}smallest_loss"),
        entry.value(f"{where}smallest_loss_place_1"),
    )
    assert found == (losses.min(), places[losses.argmin()])
    length = np.linalg.norm(other - truth.theta)
    assert entry.value("checkpoint_0/length") == pytest.approx(length, rel=ROUNDING)


def test_a_plot_of_a_line_draws_losses_model_and_accuracy(run):
    entry, (left, right) = run["line"], run.axes("line", 0)
    x, y = line(left, "measured")
    np.testing.assert_array_equal(x, entry.arrays["coefficients_1"])
    np.testing.assert_array_equal(y, entry.arrays["losses"])
    x, y = line(left, "quadratic model")
    slope, curvature = entry.arrays["slopes"][0], entry.arrays["hessian"][0, 0]
    np.testing.assert_allclose(
        y, entry.value("loss") + slope * x + curvature * x**2 / 2
    )
    for where, words in (("", ""), ("on_train/", " on train")):
        x, y = line(left, f"chord{words}")
        ends = [entry.value(f"{where}{name}loss") for name in ("", "checkpoint_0/")]
        assert (list(x), list(y)) == ([0, 1], ends)
        for axis, array in ((left, "losses"), (right, "accuracies")):
            x, y = line(axis, f"measured{words}")
            np.testing.assert_array_equal(x, entry.arrays["coefficients_1"])
            np.testing.assert_array_equal(y, entry.arrays[f"{where}{array}"])
            legend = [text.get_text() for text in axis.get_legend().get_texts()]
            assert f"measured{words}" in legend
            low, high = axis.get_ylim()
            assert low < y.min() <= y.max() < high
    assert "nat/token" in left.get_ylabel()
    assert left.get_xlabel() == "multiple of checkpoint 0"


def contours(axis, places):
    """Level and corners of each contour."""
    (found,) = [x for x in axis.collections if hasattr(x, "allsegs")]
    for level, segments in zip(found.levels, found.allsegs, strict=True):
        for corners in segments:
            # Corners on the grid's lines; a label cuts a contour in between.
            on_line = [np.isin(x, p) for x, p in zip(corners.T, places, strict=True)]
            if np.any(on_line):
                yield level, corners[np.any(on_line, axis=0)]


@pytest.mark.parametrize("name", LABELS)
def test_contours_go_where_the_arrays_have_their_level(run, name):
    entry = run[name]
    places = [entry.arrays[f"coefficients_{i}"] for i in (1, 2)]
    panels = [*run.axes(name, 1), *run.axes(name, 3)]
    arrays = ["losses", "model", "accuracies"]
    if name == "landscape":
        arrays = [*arrays[:2], "on_train/losses", arrays[2], "on_train/accuracies"]
        assert [axis.get_title("left").partition(",")[0] for axis in panels[2:]] == [
            "loss on train",
            "share of tokens predicted",
            "share of tokens predicted on train",
        ]
    for axis, array in zip(panels, arrays, strict=True):
        values = entry.arrays[array]
        # On the grid's lines the interpolation is linear.
        between = scipy.interpolate.RegularGridInterpolator(places, values)
        drawn = list(contours(axis, places))
        assert drawn
        for level, corners in drawn:
            tolerance = 1e-6 * np.ptp(values)
            np.testing.assert_allclose(between(corners), level, atol=tolerance)
        labels = [f"multiple of {x.replace('_', ' ')}" for x in LABELS[name]]
        assert [axis.get_xlabel(), axis.get_ylabel()] == labels
        marks = {x.get_label(): np.ravel(x.get_data()) for x in axis.lines}
        np.testing.assert_array_equal(marks["this checkpoint"], [0, 0])
        split = array.rpartition("/")[0]
        where = f"{split}/" if split else ""
        lowest = [entry.value(f"{where}smallest_loss_place_{i}") for i in (1, 2)]
        np.testing.assert_array_equal(marks["smallest loss"], lowest)
        if name == "mixed":
            other = entry.arrays["marks"][1]
            np.testing.assert_array_equal(marks["another checkpoint"], other)


def test_a_surface_draws_the_losses_and_the_model(run):
    entry = run["landscape"]
    losses = entry.arrays["losses"]
    model = np.clip(entry.arrays["model"], losses.min(), losses.max())
    for axis, values, color in zip(
        run.axes("landscape", 2), (losses, model), SERIES, strict=False
    ):
        (wires,) = axis.collections
        heights = np.concatenate([np.asarray(x)[:, 2] for x in wires._segments3d])
        # Every point is on one wire of each direction.
        np.testing.assert_allclose(np.sort(heights)[::2], np.sort(values, axis=None))
        assert wires.get_edgecolor()[0][:3] == pytest.approx(
            tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        )
