"""Densities by group in results.json and in the figures, against dense blocks."""

import functools

import jax
import numpy as np
import pytest
import scipy.spatial.distance
import scipy.stats

from t5x_fwdloss.curvature.vectors import probes

from . import cells, dense, estimators
from .test_numbers import ROUNDING, group_names

NAMES = ("group_densities-hessian", "group_densities-gauss_newton")
PROBES = 3


def blocks(name):
    """Which entries each group has, by label, in order."""
    paths = dense.leaves(dense.parameters())
    if name == NAMES[0]:
        chosen = {
            label.replace("/", "."): [p for p in paths if p.startswith(f"{label}/")]
            or [label]
            for label in group_names("whole")
        }
    else:
        inside = [p for p in paths if p.startswith("decoder/")]
        chosen = {
            "norms": [p for p in inside if p.endswith("norm/scale")],
            "attention": [p for p in inside if "attention/" in p],
        }
    entries = lambda found: np.any([dense.group(p) for p in found], axis=0)
    return {label: entries(found) for label, found in chosen.items()}


def matrix_of(truth, name):
    if name == NAMES[0]:
        return truth.matrices["hessian"]
    root = cells.preconditioner_root()
    return root[:, None] * truth.matrices["gauss_newton"] * root


@functools.cache
def draws(name, number):
    """The probes of one group, whole."""
    key = jax.random.fold_in(cells.key(f"{name}/probes"), number)
    params = dense.parameters()
    drawn = [
        probes.random_like(probes.probe_key(key, i), params, "rademacher")
        for i in range(PROBES)
    ]
    return np.stack([dense.flat(x) for x in drawn])


def quadrature(block, z):
    """That of Lanczos; of a space that ends early, the eigenvalues it has parts of."""
    values, vectors = np.linalg.eigh(block)
    parts = (vectors.T @ z) ** 2 / (z @ z)
    # Equal ones are one.
    places = np.round(values / np.abs(values).max(), 9)
    atoms = [(values[places == x][0], parts[places == x].sum()) for x in set(places)]
    found = sorted(atom for atom in atoms if atom[1] > 1e-12)
    if len(found) > cells.NUM_STEPS:
        return estimators.quadrature(block, z, cells.NUM_STEPS)
    return tuple(map(np.array, zip(*found, strict=True)))


@pytest.mark.parametrize("name", NAMES)
def test_each_group_has_the_quadratures_of_its_block(kept, truth, name):
    entry, whole = kept[name], matrix_of(truth, name)
    labels = blocks(name)
    assert list(labels) == [
        x.removesuffix("/trace") for x in entry.found["results"] if x.endswith("/trace")
    ]
    unit = "nat/token per θ²" if name == NAMES[0] else "1/η"
    for number, (label, inside) in enumerate(labels.items()):
        block, size = whole[np.ix_(inside, inside)], inside.sum()
        norm, z = np.linalg.norm(block), draws(name, number)[:, inside]
        moments = np.einsum("ij,jk,ik->i", z, block, z)
        trace = entry.number(f"{label}/trace")
        tolerance = ROUNDING * np.sqrt(size) * norm
        assert trace["value"] == pytest.approx(moments.mean(), abs=tolerance)
        error = moments.std(ddof=1) / np.sqrt(PROBES)
        assert trace["error"] == pytest.approx(error, abs=tolerance)
        assert (trace["unit"], trace["count"]) == (unit, PROBES)
        assert entry.value(f"{label}/parameters") == size
        quadratures = [quadrature(block, v) for v in z]
        extremes = np.concatenate([nodes for nodes, _ in quadratures])
        ends = (
            entry.value(f"{label}/smallest_node"),
            entry.value(f"{label}/largest_node"),
        )
        assert ends == pytest.approx((extremes.min(), extremes.max()), abs=1e-3 * norm)
        assert entry.number(f"{label}/largest_node")["unit"] == unit
        level = 1e-4 * norm  # between rounding and what counts
        low, high = (
            np.mean([w[x < end].sum() for x, w in quadratures]) for end in (-level, 0)
        )
        share = entry.value(f"{label}/negative_fraction")
        assert low - 1e-3 <= share <= high + 1e-3
        nodes, weights = (entry.arrays[f"{label}/{x}"] for x in ("nodes", "weights"))
        assert entry.arrays[f"{label}/dimension"] == size
        square = np.nansum(weights * nodes**2, axis=1)
        expected = np.linalg.norm(z @ block, axis=1) ** 2 / size
        np.testing.assert_allclose(square, expected, atol=3 * ROUNDING * norm**2)


@pytest.mark.parametrize("name", NAMES)
def test_distances_are_those_of_the_smoothed_nodes(kept, name):
    entry, labels = kept[name], list(blocks(name))
    level, grid = entry.arrays["zero_level"], entry.arrays["grid"]
    width = 0.2 if name == NAMES[0] else 0.5
    nodes = [entry.arrays[f"{label}/nodes"] for label in labels]
    weights = [np.nan_to_num(entry.arrays[f"{label}/weights"]) for label in labels]
    longest = max(np.isfinite(x).sum(axis=1).max() for x in nodes)
    largest = max(np.nanmax(np.abs(x)) for x in nodes)
    # Of the group whose level is the highest.
    eps = float(np.finfo(np.float32).eps)
    assert 0 < level <= 10 * eps * np.sqrt(longest) * largest * 1.01
    assert level >= 10 * eps * largest * 0.99

    def distances(chosen):
        rows = []
        for x, w in zip(nodes, weights, strict=True):
            places = np.arcsinh(np.nan_to_num(x[chosen]) / (2 * level)) / np.log(10)
            bells = scipy.stats.norm.pdf(grid[:, None, None], places, width)
            rows.append((w[chosen] * bells).sum(axis=2).mean(axis=1))
        js = scipy.spatial.distance.jensenshannon
        return np.array([[js(p, q, base=2) for q in rows] for p in rows]), rows

    expected, rows = distances(np.arange(PROBES))
    np.testing.assert_allclose(entry.arrays["densities"], rows, rtol=1e-6, atol=1e-9)
    found = entry.arrays["js_distances"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    others = len(labels) - 1
    of_each = expected.sum(axis=1) / others
    without = [
        distances(np.delete(np.arange(PROBES), i))[0].sum(axis=1) / others
        for i in range(PROBES)
    ]
    errors = np.sqrt((PROBES - 1) * np.var(without, axis=0))
    for label, value, error in zip(labels, of_each, errors, strict=True):
        number = entry.number(f"{label}/js_distance")
        assert number["value"] == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert number["error"] == pytest.approx(error, rel=1e-3, abs=1e-6)
        assert number["unit"] == "1"
    mean = entry.number("mean_js_distance")
    assert mean["value"] == pytest.approx(of_each.mean(), rel=1e-5)
    error = np.sqrt((PROBES - 1) * np.var(np.mean(without, axis=1)))
    assert mean["error"] == pytest.approx(error, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_draw_densities_and_distances(kept, name):
    entry, (rows,), (squares,) = kept[name], kept.axes(name), kept.axes(name, 1)
    labels = list(blocks(name))
    assert [text.get_text() for text in rows.get_yticklabels()] == labels
    for number, line in enumerate(rows.lines):
        x, y = line.get_data()
        density = entry.arrays["densities"][number]
        np.testing.assert_array_equal(x, entry.arrays["grid"])
        place = len(labels) - 1 - number
        np.testing.assert_allclose(y, place + 0.9 * density / density.max())
    assert f"{entry.arrays['zero_level']:.2g}" in rows.get_xlabel()
    assert entry.number(f"{labels[0]}/trace")["unit"] in rows.get_xlabel()
    distances = entry.arrays["js_distances"]
    assert [p.get_alpha() for p in squares.patches] == distances.ravel().tolist()
    texts = [text.get_text() for text in squares.texts]
    assert texts == [f"{x:.2f}" for x in distances.ravel()]
    assert [text.get_text() for text in squares.get_yticklabels()] == labels
