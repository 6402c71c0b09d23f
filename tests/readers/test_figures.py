"""The figures of the report draw the numbers of results.json, and true densities."""

import re

import numpy as np
import pytest
import scipy.stats

from t5x_fwdloss.analysis.report.figures import SERIES

from . import cells

PAIR = r"(largest|smallest)_\d+"
COLORS = {"largest": SERIES[0], "smallest": SERIES[1]}


def band(axis):
    """The corners of the one filled band: x, low, high in order of x."""
    (collection,) = axis.collections
    (path,) = collection.get_paths()
    places = {}
    for x, y in path.vertices:
        places.setdefault(x, []).append(y)
    x = np.array(sorted(places))
    low = np.array([min(places[p]) for p in x])
    return x, low, np.array([max(places[p]) for p in x])


def line(axis, label):
    (found,) = [x for x in axis.lines if x.get_label() == label]
    return found.get_data()


@cells.table("trace")
def test_a_trace_plot_draws_the_reported_interval(run, name):
    entry, (axis,) = run[name], run.axes(name)
    number, samples = entry.number("trace"), entry.arrays["samples"]
    x, y = line(axis, "one probe")
    np.testing.assert_array_equal(x, np.arange(1, len(samples) + 1))
    np.testing.assert_array_equal(y, samples)
    np.testing.assert_array_equal(line(axis, "estimate")[1], [number["value"]] * 2)
    _, low, high = band(axis)
    np.testing.assert_allclose(np.unique(low), number["interval"][0], rtol=1e-12)
    np.testing.assert_allclose(np.unique(high), number["interval"][1], rtol=1e-12)
    # Nothing of it is cut off.
    assert axis.get_ylim()[0] <= low.min()
    assert axis.get_ylim()[1] >= high.max()
    level = entry.found["settings"]["confidence"]
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert f"{level:.0%} confidence interval" in labels
    hutchinson = entry.found["settings"]["estimator"] == "hutchinson"
    assert ("running mean" in labels) == hutchinson
    if hutchinson:
        means = [samples[:n].mean() for n in range(1, len(samples) + 1)]
        np.testing.assert_allclose(line(axis, "running mean")[1], means, rtol=1e-12)
    assert number["unit"] in axis.get_ylabel()
    assert all(x == int(x) for x in axis.get_xticks())


def test_a_trace_plots_caption_names_its_estimator(kept):
    page = (kept.path / "report.html").read_text()
    count = dict.fromkeys(("Hutchinson's estimator", "Hutch++", "XTrace"), 0)
    for name in (x for x in kept.names if x.startswith("trace-")):
        how = kept[name].found["settings"]["estimator"]
        word = {"hutchinson": "Hutchinson's estimator", "hutch++": "Hutch++"}
        count[word.get(how, "XTrace")] += 1
    for word, number in count.items():
        assert page.count(f"<figcaption>{word.replace(chr(39), '&#x27;')}:") == number


@cells.table("eigenpairs")
def test_an_eigenvalue_plot_draws_values_and_errors(run, name):
    entry, (axis,) = run[name], run.axes(name)
    wanted = {
        label.replace("_", " "): number
        for label, number in entry.found["results"].items()
        if label.startswith(("largest_", "smallest_"))
    }
    drawn = {}
    for container in axis.containers:
        points, _, (bars,) = container
        # What did not converge is hollow.
        hollow = points.get_markerfacecolor() == "none"
        assert hollow == (container.get_label() == "not converged")
        for x, y in zip(*points.get_data(), strict=True):
            (low, high) = next(
                (b[0][1], b[1][1]) for b in bars.get_segments() if b[0][0] == x
            )
            drawn[int(x)] = (y, low, high, container.get_label())
    ticks = [text.get_text() for text in axis.get_xticklabels()]
    assert len(ticks) == len(drawn) == len(wanted)
    values = [drawn[i][0] for i in range(len(drawn))]
    assert values == sorted(values, reverse=True)
    for place, label in enumerate(ticks):
        number = wanted[label]
        value, error = number["value"], number["error"]
        assert drawn[place][:3] == pytest.approx((value, value - error, value + error))
        state = "converged" if number["converged"] else "not converged"
        assert drawn[place][3] == state
    assert number["unit"] in axis.get_ylabel()


@cells.table("eigenpairs")
def test_a_convergence_plot_draws_the_history(run, name):
    entry = run[name]
    history = entry.arrays["history"]
    if len(history) < 2:
        return
    left, right = run.axes(name, 1)
    pairs = (history.shape[1] - 1) // 2
    ends = [x.split("_")[0] for x in entry.found["results"] if re.fullmatch(PAIR, x)]
    (allowed,) = [line for line in right.lines if line.get_linestyle() == "--"]
    assert list(allowed.get_ydata()) == [1, 1]
    for i in range(pairs):
        for axis in (left, right):
            assert axis.lines[i].get_color() == COLORS[ends[i]]
        named = left.lines[i].get_label()
        assert named == ends[i] or (named.startswith("_") and ends[i] in ends[:i])
        for axis, column in ((left, 1 + 2 * i), (right, 2 + 2 * i)):
            x, y = axis.lines[i].get_data()
            np.testing.assert_array_equal(x, history[:, 0])
            expected = history[:, column]
            if axis is right:
                expected = expected / entry.arrays["allowed"][i]
                expected = np.where(expected > 0, expected, np.nan)
            np.testing.assert_array_equal(y, expected)
    # What a pair's residual may be: the tolerance of its own size, or rounding.
    wanted = cells.TOLERANCE * np.abs(entry.arrays["eigenvalues"])
    largest = np.abs(entry.arrays["eigenvalues"]).max()
    assert (entry.arrays["allowed"] >= 0.99 * wanted).all()
    assert (entry.arrays["allowed"] <= 1.01 * wanted + 1e-4 * largest).all()
    # The last Ritz values are the eigenvalues reported.
    last = sorted(history[-1, 1::2])
    found = np.sort(entry.arrays["eigenvalues"])
    np.testing.assert_allclose(last, found, rtol=1e-3, atol=1e-3 * np.abs(found).max())


@cells.table("density")
def test_a_density_plot_draws_the_smoothed_nodes(run, name):
    entry, panels = run[name], run.axes(name)
    nodes, weights = entry.arrays["nodes"], entry.arrays["weights"]
    count = len(nodes)
    quantile = scipy.stats.t.ppf(0.975, count - 1)
    for axis, places in zip(
        panels, (nodes, np.log10(np.abs(nodes) + 1e-8)), strict=True
    ):
        width = 0.01 * (places.max() - places.min())
        x, y = line(axis, "mean over probes")
        # Nothing of it is cut off, down to a millionth of the peak.
        bottom, top = axis.get_ylim()
        assert bottom == pytest.approx(max(y.max() * 1e-6, y[y > 0].min()))
        assert top >= band(axis)[2].max()
        assert (x[0], x[-1]) == pytest.approx(
            (places.min() - 5 * width, places.max() + 5 * width)
        )
        bells = scipy.stats.norm.pdf(x[:, None, None], places, width)
        curves = (weights * bells).sum(axis=2)
        mean = curves.mean(axis=1)
        top = mean.max()
        np.testing.assert_allclose(y, mean, rtol=1e-9, atol=1e-9 * top)
        half = quantile * curves.std(axis=1, ddof=1) / np.sqrt(count)
        at, low, high = band(axis)
        np.testing.assert_array_equal(at, x)
        np.testing.assert_allclose(high, mean + half, rtol=1e-9, atol=1e-9 * top)
        expected = np.maximum(mean - half, 0)
        np.testing.assert_allclose(low, expected, rtol=1e-9, atol=1e-9 * top)
    assert entry.number("trace")["unit"] in panels[0].get_xlabel()
    assert "95% band" in [t.get_text() for t in panels[0].get_legend().get_texts()]


@cells.table("group_traces")
def test_a_plot_of_groups_draws_values_and_intervals(run, name):
    entry, (axis,) = run[name], run.axes(name)
    labels = [text.get_text() for text in axis.get_yticklabels()]
    middle = lambda bar: round(bar.get_y() + bar.get_height() / 2, 6)
    bars = {middle(bar): bar.get_width() for bar in axis.patches}
    intervals = {
        y[0]: tuple(x)
        for x, y in (drawn.get_data() for drawn in axis.lines)
        if y[0] == y[1]
    }
    wanted = [n for n in entry.found["results"] if n.endswith("/trace")]
    assert [f"{label}/trace" for label in labels] == wanted
    for place, label in zip(axis.get_yticks(), labels, strict=True):
        number = entry.number(f"{label}/trace")
        assert bars[place] == pytest.approx(number["value"])
        assert intervals[place] == pytest.approx(number["interval"])
    assert number["unit"] in axis.get_xlabel()
    (zero,) = [x for x in axis.lines if list(x.get_ydata()) == [0, 1]]
    assert list(zero.get_xdata()) == [0, 0]


def test_a_plot_of_directions_draws_losses_and_model(kept):
    entry = kept["directional_derivatives"]
    panels = kept.axes("directional_derivatives")
    labels = [k.removesuffix("/steps") for k in entry.arrays if k.endswith("/steps")]
    assert [axis.get_title("left") for axis in panels] == [
        label.replace("_", " ") for label in labels
    ]
    for axis, label in zip(panels, labels, strict=True):
        steps, losses = (
            entry.arrays[f"{label}/{what}"] for what in ("steps", "losses")
        )
        x, y = line(axis, "measured")
        np.testing.assert_array_equal(x, steps)
        np.testing.assert_allclose(y, losses - entry.value("loss"), rtol=1e-12)
        t, model = line(axis, "second-order model")
        slope, curvature = (entry.value(f"{label}/{k}") for k in ("slope", "curvature"))
        expected = slope * t + curvature * t**2 / 2
        np.testing.assert_allclose(model, expected, rtol=1e-9, atol=1e-12)
        assert (t[0], t[-1]) == (steps[0], steps[-1])
    assert "nat/token" in panels[0].get_ylabel()
