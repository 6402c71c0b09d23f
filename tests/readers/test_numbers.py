"""Every number of results.json, and every array beside it, is that of a dense matrix.

Randomized estimates are compared with the same estimate of the same probes on the dense
matrix: what is left is rounding.
"""

import functools

import numpy as np
import pytest
import scipy.stats
from etils import epath

from t5x_fwdloss.analysis.store import vector_store
from t5x_fwdloss.curvature.estimators import damped_sums
from t5x_fwdloss.curvature.vectors import probes

from . import cells, dense, estimators
from .cells import parts

EPS = float(np.finfo(np.float32).eps)
# Of products in float32 through the network, in units of the matrix's norm.
ROUNDING = 128 * EPS


def rounding(matrix) -> float:
    """What float32 leaves of z^T A z, z of n signs, in the worst of many."""
    return ROUNDING * np.sqrt(len(matrix)) * np.linalg.norm(matrix)


def check(number, value, error, interval, unit, count, tolerance):
    """One number of results.json, with all that stands beside it."""
    assert number["value"] == pytest.approx(value, abs=tolerance)
    assert number["error"] == pytest.approx(error, abs=tolerance)
    assert number["unit"] == unit
    assert number["count"] == count
    if interval is None:
        assert number["interval"] is None
    else:
        assert number["interval"] == pytest.approx(interval, abs=3 * tolerance)


def unit_of(variant):
    preconditioned = "preconditioned" in cells.VARIANTS[variant]
    return "1/η" if preconditioned else "nat/token per θ²"


def estimate_of(name, matrix) -> estimators.Estimate:
    """What the trace estimator of a cell finds, by definition."""
    _, _, (_, _, *how) = parts(name)
    numbers = range(cells.NUM_PROBES["trace"])
    purpose, default = f"{name}/probes", 0.95
    if how == ["hutchpp"]:
        sketch = cells.draws(purpose, range(cells.SKETCH_SIZE), "normal", base=0)
        rest = cells.draws(purpose, numbers, base=1)
        return estimators.hutchpp(matrix, sketch, rest, default)
    if how == ["xtrace"]:
        drawn = cells.draws(purpose, numbers, "normal")
        return estimators.xtrace(matrix, drawn, default)
    z = cells.draws(purpose, numbers)
    return estimators.hutchinson(np.einsum("ij,ij->j", z, matrix @ z), cells.CONFIDENCE)


@functools.cache
def expected_trace(truth, name):
    """The estimate, and what rounding may do to it."""
    _, matrix, (variant, *_) = parts(name)
    whole = cells.true_matrix(truth.matrices[matrix], variant)
    return estimate_of(name, whole), rounding(whole)


@cells.table("trace")
def test_traces(run, truth, name):
    entry, variant = run[name], parts(name)[2][0]
    expected, tolerance = expected_trace(truth, name)
    size, count = cells.in_group(variant).sum(), len(expected.samples)
    np.testing.assert_allclose(
        entry.arrays["samples"], expected.samples, atol=tolerance
    )
    for number, scale in (("trace", 1), ("mean_eigenvalue", size)):
        check(
            entry.number(number),
            expected.value / scale,
            expected.error / scale,
            tuple(x / scale for x in expected.interval),
            unit_of(variant),
            count,
            tolerance / scale,
        )


@functools.cache
def spectrum(truth, matrix, variant):
    """The eigenvalues, and the cosine of each eigenvector with the gradient."""
    inside, gradient = cells.in_group(variant), truth.gradient
    whole = cells.true_matrix(truth.matrices[matrix], variant)
    values, vectors = np.linalg.eigh(whole[np.ix_(inside, inside)])
    if "preconditioned" in cells.VARIANTS[variant]:
        gradient = cells.preconditioner_root() * gradient
    chosen = gradient[inside]
    return values, vectors.T @ chosen / np.linalg.norm(chosen)


@cells.table("eigenpairs")
def test_eigenpairs(run, truth, name):
    _, matrix, (variant,) = parts(name)
    values, cosines = spectrum(truth, matrix, variant)
    entry, tolerance = run[name], ROUNDING * np.abs(values).max()
    ends = {"largest": (values[::-1], cosines[::-1]), "smallest": (values, cosines)}
    wanted = {"largest": 2, "smallest": int(matrix == "hessian")}
    places = [-1, -2, 0][: sum(wanted.values())]
    gap = min(np.abs(np.delete(values, i) - values[i]).min() for i in places)
    # How far an eigenvector may turn at its residual (Davis, Kahan 1970).
    turn = 2 * entry.arrays["residuals"].max() / gap + 1e-4
    at, steps = 0, entry.arrays["history"][-1, 0]
    assert entry.value("num_products") == steps + sum(wanted.values())
    for end, count in wanted.items():
        for i in range(count):
            number = entry.number(f"{end}_{i + 1}")
            expected = ends[end][0][i]
            assert number["count"] == steps
            assert abs(number["value"] - expected) <= number["error"] + tolerance
            assert number["error"] <= cells.TOLERANCE * abs(expected) + tolerance
            assert number["unit"] == unit_of(variant)
            assert number["converged"]
            assert number["value"] == entry.arrays["eigenvalues"][at]
            assert number["error"] == entry.arrays["residuals"][at]
            at += 1
        if count:
            overlap = np.square(ends[end][1][:count]).sum()
            assert entry.value(f"gradient_in_{end}") == pytest.approx(
                overlap, abs=2 * turn
            )
    settings = cells.VARIANTS[variant]
    known = "preconditioned" in settings and "damping" not in settings
    assert ("stability_threshold" in entry.found["results"]) == known
    if known:
        threshold = entry.number("stability_threshold")
        expected = cells.THRESHOLD / cells.LEARNING_RATE
        assert (threshold["value"], threshold["unit"]) == (expected, "1/η")
        assert entry.value("learning_rate") == cells.LEARNING_RATE
    found = entry.arrays["gradient_cosines"]
    expected = [c for end, n in wanted.items() for c in ends[end][1][:n]]
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=turn)


def saved_vectors(run, name, count):
    like = probes.random_like(0, dense.parameters())
    path = epath.Path(run.path) / f"{name}_vectors"
    found = [vector_store.restore(path / f"vector_{i}", like) for i in range(count)]
    return np.stack([dense.flat(vector) for vector in found], axis=1)


@cells.table("eigenpairs", "whole")
def test_residuals_are_those_of_the_vectors_that_were_saved(run, truth, name):
    entry, dense_matrix = run[name], truth.matrices[parts(name)[1]]
    values = entry.arrays["eigenvalues"]
    vectors = saved_vectors(run, name, len(values))
    residuals = np.linalg.norm(dense_matrix @ vectors - vectors * values, axis=0)
    tolerance = ROUNDING * np.abs(values).max()
    np.testing.assert_allclose(entry.arrays["residuals"], residuals, atol=tolerance)
    gram = vectors.T @ vectors - np.eye(len(values))
    worst = np.abs(gram).max()
    assert entry.value("orthogonality") == pytest.approx(worst, abs=8 * EPS)


@functools.cache
def density_draws(name, variant):
    z = cells.draws(f"{name}/probes", range(cells.NUM_PROBES["density"]))
    return z * cells.in_group(variant)[:, None]


@functools.cache
def density_quadratures(truth, name):
    _, matrix, (variant,) = parts(name)
    dense_matrix = cells.true_matrix(truth.matrices[matrix], variant)
    starts = density_draws(name, variant).T
    return [estimators.quadrature(dense_matrix, z, cells.NUM_STEPS) for z in starts]


@cells.table("density")
def test_densities(run, truth, name):
    _, matrix, (variant,) = parts(name)
    dense_matrix = cells.true_matrix(truth.matrices[matrix], variant)
    entry, z = run[name], density_draws(name, variant)
    size, count = cells.in_group(variant).sum(), z.shape[1]
    assert entry.arrays["dimension"] == size
    nodes, weights = entry.arrays["nodes"], entry.arrays["weights"]
    norm = np.linalg.norm(dense_matrix)
    power = z
    moments = {}
    for degree in range(4):
        # A Gauss quadrature is exact for polynomials.
        moments[degree] = np.einsum("ij,ij->j", z, power) / size
        found = (weights * nodes**degree).sum(axis=1)
        tolerance = ROUNDING * (degree + 1) * norm**degree
        np.testing.assert_allclose(found, moments[degree], atol=tolerance)
        power = dense_matrix @ power
    error = lambda x: x.std(ddof=1) / np.sqrt(count)
    unit, tolerance = unit_of(variant), rounding(dense_matrix)
    check(
        entry.number("trace"),
        size * moments[1].mean(),
        size * error(moments[1]),
        None,
        unit,
        count,
        tolerance,
    )
    frobenius = np.sqrt(size * moments[2].mean())
    check(
        entry.number("frobenius_norm"),
        frobenius,
        size * error(moments[2]) / (2 * frobenius),
        None,
        unit,
        count,
        ROUNDING * 2 * norm,
    )
    quadratures = density_quadratures(truth, name)
    check_signs(entry, quadratures)
    extremes = np.concatenate([nodes for nodes, _ in quadratures])
    for end, expected in (("largest", extremes.max()), ("smallest", extremes.min())):
        number = entry.number(f"{end}_node")
        assert number["value"] == pytest.approx(expected, abs=1e-3 * norm)
        assert number["error"] is None
        assert number["unit"] == unit


def check_signs(entry, quadratures):
    """The parts of the spectrum below zero, and at zero up to rounding."""
    scale = max(np.abs(nodes).max() for nodes, _ in quadratures)
    level = 10 * EPS * np.sqrt(cells.NUM_STEPS) * scale
    assert entry.value("zero_level") == pytest.approx(level, rel=1e-3)
    ranges = {"negative_fraction": (-np.inf, -level), "zero_fraction": (-level, level)}
    for name, (low, high) in ranges.items():
        parts = np.array([w[(x >= low) & (x <= high)].sum() for x, w in quadratures])
        # Of nodes as small as rounding in float32 the sign is not known.
        near = lambda x: (np.abs(x) > level / 10) & (np.abs(x) < 10 * level)
        unsure = max(w[near(x)].sum() for x, w in quadratures) + 1e-3
        number = entry.number(name)
        assert number["value"] == pytest.approx(parts.mean(), abs=unsure)
        error = parts.std(ddof=1) / np.sqrt(len(parts))
        assert number["error"] == pytest.approx(error, abs=unsure)
        assert number["unit"] == "1"


WITHOUT_NEGATIVE = [name for name in cells.NAMES_OF_DENSITIES if "hessian" not in name]
FUNCTIONS = {
    "effective_dimension": lambda x, a: x / (x + a),
    "log_determinant": lambda x, a: np.log(x + a),
}


@pytest.mark.parametrize("damping", cells.DAMPINGS)
@pytest.mark.parametrize("quantity", FUNCTIONS)
@pytest.mark.parametrize("name", WITHOUT_NEGATIVE)
def test_effective_dimensions_and_determinants(kept, truth, name, quantity, damping):
    _, matrix, (variant,) = parts(name)
    entry, inside = kept[name], cells.in_group(variant)
    label, low = f"{quantity}_at_{damping:g}", cells.VARIANTS[variant].get("damping", 0)
    if damping < -low:
        assert label not in entry.found["results"]
        assert any(x.startswith(f"{label} is left out") for x in entry.found["notes"])
        return
    function = lambda x: FUNCTIONS[quantity](x, damping)
    true = cells.true_matrix(truth.matrices[matrix], variant)[np.ix_(inside, inside)]
    values, vectors = np.linalg.eigh(true)
    values = np.maximum(values, low)
    z = density_draws(name, variant)[inside]
    exact = ((vectors.T @ z) ** 2 * function(values)[:, None]).sum(axis=0).mean()
    level, sums = entry.value("zero_level"), []
    for nodes, weights in zip(
        entry.arrays["nodes"], entry.arrays["weights"], strict=True
    ):
        fixed, shares = damped_sums.radau(nodes, weights, min(low - level, nodes[0]))
        sums.append((weights @ function(nodes), shares @ function(fixed)))
    above, below = inside.sum() * np.array(sums).T
    middle, gap = (above + below) / 2, (above - below).mean() / 2
    number = entry.number(label)
    error = middle.std(ddof=1) / np.sqrt(len(middle))
    assert number["value"] == pytest.approx(middle.mean(), rel=1e-9)
    assert number["error"] == pytest.approx(error + gap, rel=1e-9)
    # What float32 leaves of the eigenvalues.
    tolerance = level * inside.sum() / (damping + low)
    assert number["value"] == pytest.approx(exact, abs=gap + tolerance)
    assert number["unit"] == "1"
    assert number["count"] == len(middle)
    assert number["converged"] == (gap <= max(error, 0.01 * abs(middle.mean())))


def group_names(variant):
    inside = cells.in_group(variant)
    paths = [
        path
        for path in dense.leaves(dense.parameters())
        if inside[dense.group(path)].all()
    ]
    return list(dict.fromkeys("/".join(path.split("/")[:2]) for path in paths))


@cells.table("group_traces")
def test_traces_by_group(run, truth, name):
    entry, count = run[name], cells.NUM_PROBES["group_traces"]
    _, matrix, (variant, *labels) = parts(name)
    matrix, given = (
        cells.true_matrix(truth.matrices[matrix], variant),
        "given" in labels,
    )
    confidence = cells.CONFIDENCE if given else 0.95
    z = cells.draws(f"{name}/probes", range(count))
    products, tolerance, unit = matrix @ z, rounding(matrix), unit_of(variant)

    def check_estimate(number, samples, size=1):
        expected = estimators.hutchinson(samples, confidence)
        check(
            number,
            expected.value / size,
            expected.error / size,
            tuple(x / size for x in expected.interval),
            unit,
            count,
            tolerance / size,
        )

    check_estimate(entry.number("trace"), (z * products).sum(axis=0))
    squares = np.square(products).sum(axis=0)
    norm = np.sqrt(squares.mean())
    error = squares.std(ddof=1) / np.sqrt(count) / (2 * norm)
    tolerance_of_norm = ROUNDING * 2 * np.linalg.norm(matrix)
    number = entry.number("frobenius_norm")
    check(number, norm, error, None, unit, None, tolerance_of_norm)
    wanted = [cells.GROUP] if given else group_names(variant)
    listed = [x for x in entry.found["results"] if x.endswith("/parameters")]
    assert len(listed) == len(wanted)
    left_out = [x for x in entry.found["notes"] if "do not add up to the whole" in x]
    assert len(left_out) == given
    for group in wanted:
        chosen, label = dense.group(group), group.replace("/", ".")
        samples = (z * products)[chosen].sum(axis=0)
        size = chosen.sum()
        check_estimate(entry.number(f"{label}/trace"), samples)
        check_estimate(entry.number(f"{label}/mean_eigenvalue"), samples, size)
        assert entry.value(f"{label}/parameters") == size
        found = entry.arrays[f"{label}/samples"]
        np.testing.assert_allclose(found, samples, atol=tolerance)


@cells.table("diagonal")
def test_diagonals(run, truth, name):
    entry, count = run[name], cells.NUM_PROBES["diagonal"]
    _, matrix, (variant, _) = parts(name)
    matrix = cells.true_matrix(truth.matrices[matrix], variant)
    z = cells.draws(f"{name}/probes", range(count))
    samples = z * (matrix @ z)
    mean = samples.mean(axis=1)
    error = samples.std(axis=1, ddof=1) / np.sqrt(count)
    tolerance, unit = ROUNDING * np.linalg.norm(matrix), unit_of(variant)
    total = estimators.hutchinson(samples.sum(axis=0))
    check(
        entry.number("trace"),
        total.value,
        total.error,
        total.interval,
        unit,
        count,
        rounding(matrix),
    )
    for path, leaf in dense.leaves(dense.parameters()).items():
        chosen = dense.group(path)
        if not cells.in_group(variant)[chosen].all():
            assert f"{path}/mean" not in entry.arrays
            continue
        for end, expected in (("mean", mean), ("error", error)):
            found = entry.arrays[f"{path}/{end}"]
            assert found.shape == leaf.shape
            np.testing.assert_allclose(found.ravel(), expected[chosen], atol=tolerance)
    layers = [k for k in entry.found["results"] if k.endswith("/largest")]
    assert len(layers) == len(group_names(variant))
    for group in group_names(variant):
        chosen, label = dense.group(group), group.replace("/", ".")
        for end, at in (("largest", np.argmax), ("smallest", np.argmin)):
            place = at(mean[chosen])
            number = entry.number(f"{label}/{end}")
            assert number["value"] == pytest.approx(mean[chosen][place], abs=tolerance)
            assert number["error"] == pytest.approx(error[chosen][place], abs=tolerance)
            assert number["unit"] == unit
        check_diagonal_signs(entry, label, mean, error, chosen, tolerance)


def check_diagonal_signs(entry, label, mean, error, chosen, tolerance):
    """The parts of a layer's entries that are negative, zero, and neither for sure."""
    count = cells.NUM_PROBES["diagonal"]
    reach = scipy.stats.t.isf(1e-3, count - 1) * error[chosen]
    x, level = mean[chosen], 10 * EPS * np.abs(mean).max()
    negative, positive = x + reach < -level, x - reach > level
    zero = np.abs(x) + reach <= level
    unsure = np.mean(
        (np.abs(np.abs(x) - reach) < 10 * tolerance)
        | (np.abs(x) + reach < 10 * tolerance)
    )
    for sign, flags in (
        ("negative", negative),
        ("zero", zero),
        ("undecided", ~(negative | positive | zero)),
    ):
        found = entry.value(f"{label}/{sign}_fraction")
        assert found == pytest.approx(flags.mean(), abs=unsure + 1e-6)


def test_products_are_kept_where_memory_allows(kept, fresh):
    for matrix in dense.MATRICES:
        assert kept.document["products"][matrix].startswith("2 of 2 batches linearized")
        assert fresh.document["products"][matrix].startswith("0 of 2 batches")
