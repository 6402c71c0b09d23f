"""Hutch++ and XTrace: exact cases, known spectra, errors and their coverage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
SHAPES = {"encoder": {"kernel": (8, 5)}, "decoder": {"kernel": (4, 5)}}
DECAY = 10 * 0.7 ** np.arange(60.0)
FLAT = np.r_[np.linspace(-1, 3, 60)]
ESTIMATORS = {
    "hutchinson": lambda matvec, params, key, **options: curvature.hutchinson_trace(
        matvec, params, key, num_probes=30, **options
    ),
    "hutchpp": lambda matvec, params, key, **options: curvature.hutchpp_trace(
        matvec, params, key, sketch_size=10, num_probes=10, **options
    ),
    "xtrace": lambda matvec, params, key, **options: curvature.xtrace(
        matvec, params, key, num_probes=10, **options
    ),
}
SKETCHED = {name: ESTIMATORS[name] for name in ("hutchpp", "xtrace")}


def params(shapes=SHAPES):
    size = sum(int(np.prod(s)) for s in jax.tree.leaves(shapes, is_leaf=is_shape))
    return problems.unflatten(np.zeros(size), shapes=shapes)


def is_shape(node):
    return isinstance(node, tuple)


@pytest.mark.parametrize("estimator", SKETCHED.values(), ids=SKETCHED.keys())
@pytest.mark.parametrize("rank", [0, 1, 2, 5])
def test_low_rank_is_exact_and_says_so(estimator, rank):
    eigenvalues = np.r_[[3.0, -2.0, 7.0, 1.0, 0.5][:rank], np.zeros(60 - rank)]
    matrix, _ = problems.symmetric(eigenvalues)
    found = estimator(problems.matvec_of(matrix), params(), 0)
    assert found.rank == rank
    assert found.mean == pytest.approx(eigenvalues.sum(), abs=300 * EPS * 7)
    assert abs(found.standard_error) < 300 * EPS * 7
    assert found.num_products <= 30


@pytest.mark.parametrize("estimator", SKETCHED.values(), ids=SKETCHED.keys())
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_few_parameters_are_exact(estimator, size):
    eigenvalues = np.arange(1.0, size + 1) - 2.5
    matrix, _ = problems.symmetric(eigenvalues)
    tree = {"w": jnp.zeros(size)}
    found = estimator(problems.matvec_of(matrix), tree, 0)
    assert found.mean == pytest.approx(eigenvalues.sum(), abs=500 * EPS * size)
    assert np.isfinite(found.samples).all()


@pytest.mark.usefixtures("x64")
def test_xtrace_is_the_mean_of_leave_one_out_estimates():
    matrix, _ = problems.symmetric(FLAT)
    n, k = 60, 6
    found = curvature.xtrace(problems.matvec_of(matrix), params(), 5, num_probes=k)
    omega = np.stack(
        [
            problems.flatten(
                curvature.random_like(curvature.probe_key(5, i), params(), "normal")
            )
            for i in range(k)
        ],
        axis=1,
    )
    expected = []
    for i in range(k):
        q, _ = np.linalg.qr(matrix @ np.delete(omega, i, axis=1))
        rest = omega[:, i] - q @ (q.T @ omega[:, i])
        rest *= np.sqrt((n - k + 1) / (rest @ rest))
        expected.append(np.trace(q.T @ matrix @ q) + rest @ matrix @ rest)
    np.testing.assert_allclose(found.samples, expected, rtol=1e-9)
    assert found.mean == pytest.approx(np.mean(expected))
    assert found.num_products == 2 * k
    assert found.rank is None


@pytest.mark.usefixtures("x64")
def test_hutchpp_is_exact_part_plus_sampled_part():
    matrix, _ = problems.symmetric(FLAT)
    key = 5
    found = curvature.hutchpp_trace(
        problems.matvec_of(matrix), params(), key, sketch_size=4, num_probes=3
    )
    draw = lambda purpose, kind, i: problems.flatten(
        curvature.random_like(
            curvature.probe_key(curvature.probe_key(key, purpose), i), params(), kind
        )
    )
    sketch = np.stack([draw(0, "normal", i) for i in range(4)], axis=1)
    q, _ = np.linalg.qr(matrix @ sketch)
    expected = []
    for i in range(3):
        z = draw(1, "rademacher", i)
        z = z - q @ (q.T @ z)
        expected.append(np.trace(q.T @ matrix @ q) + z @ matrix @ z)
    np.testing.assert_allclose(found.samples, expected, rtol=1e-9)
    assert found.num_products == 2 * 4 + 3


@pytest.mark.parametrize(
    ("name", "eigenvalues"),
    [("hutchinson", DECAY), ("hutchpp", DECAY), ("xtrace", DECAY), ("xtrace", FLAT)],
    ids=["hutchinson-decay", "hutchpp-decay", "xtrace-decay", "xtrace-flat"],
)
def test_intervals_cover_the_truth_as_often_as_they_say(name, eigenvalues):
    estimator = ESTIMATORS[name]
    matrix, _ = problems.symmetric(eigenvalues)
    product = jax.jit(jax.vmap(problems.matvec_of(matrix)))
    tree, truth = params(), eigenvalues.sum()
    options = {"confidence": 0.9, "block_size": 10}
    found = [estimator(product, tree, seed, **options) for seed in range(200)]
    inside = sum(low <= truth <= high for low, high in (f.interval for f in found))
    # 180 of 200 expected at least, standard deviation 4.2: three of them down.
    assert inside >= 167
    # Unbiased, by the spread of the 200 estimates themselves.
    means = np.array([f.mean for f in found])
    assert abs(means.mean() - truth) < 4 * means.std(ddof=1) / np.sqrt(200)
    # The error reported is the spread there is, or, as the jackknife's may, more.
    reported = np.sqrt(np.mean([f.standard_error**2 for f in found]))
    most = 5.0 if name == "xtrace" else 1.5
    assert 0.8 < reported / means.std(ddof=1) < most


def test_a_subspace_pays_on_decaying_spectra():
    matrix, _ = problems.symmetric(DECAY)
    product = problems.matvec_of(matrix)
    errors = {
        name: np.sqrt(
            np.mean(
                [
                    (estimator(product, params(), seed).mean - DECAY.sum()) ** 2
                    for seed in range(10)
                ]
            )
        )
        for name, estimator in ESTIMATORS.items()
    }
    # At 30 products, and only 20 for XTrace.
    assert max(errors["xtrace"], errors["hutchpp"]) < 0.2 * errors["hutchinson"]


@pytest.mark.parametrize("estimator", SKETCHED.values(), ids=SKETCHED.keys())
def test_blocks_of_probes_give_the_same_estimate(estimator):
    matrix, _ = problems.symmetric(FLAT)
    product = problems.matvec_of(matrix)
    one = estimator(product, params(), 1)
    block = estimator(jax.jit(jax.vmap(product)), params(), 1, block_size=4)
    np.testing.assert_allclose(one.samples, block.samples, atol=2000 * EPS)
    assert one.num_products == block.num_products


@pytest.mark.parametrize("estimator", SKETCHED.values(), ids=SKETCHED.keys())
def test_vectors_on_the_host_give_the_same_bits(estimator):
    matrix, _ = problems.symmetric(FLAT)
    product = problems.matvec_of(matrix)
    one = estimator(product, params(), 1)
    other = estimator(product, params(), 1, basis_on_host=True)
    np.testing.assert_array_equal(one.samples, other.samples)


@pytest.mark.parametrize("estimator", [curvature.hutchpp_trace, curvature.xtrace])
def test_it_stops_at_the_relative_error_asked_for(estimator):
    matrix, _ = problems.symmetric(FLAT)
    product = problems.matvec_of(matrix)
    loose, tight = (
        estimator(product, params(), 3, num_probes=50, relative_error=error)
        for error in (0.4, 0.08)
    )
    assert loose.converged
    assert tight.converged
    assert loose.num_products < tight.num_products
    low, high = tight.interval
    assert (high - low) / 2 <= 0.08 * tight.mean
    capped = estimator(product, params(), 3, num_probes=8, relative_error=1e-6)
    assert capped.converged is False


@pytest.mark.parametrize("estimator", SKETCHED.values(), ids=SKETCHED.keys())
def test_nan_names_the_step_and_the_block(estimator):
    def broken(v):
        nan = jnp.nan * v["decoder"]["kernel"]
        return {**v, "decoder": {"kernel": nan}}

    with pytest.raises(curvature.NonFiniteError, match=r"0 must .* 'decoder/kernel'"):
        estimator(broken, params(), 0)


STATES = {"hutchpp": curvature.HutchppState, "xtrace": curvature.XtraceState}


# Hutch++ in its sketch, its subspace, its probes.
@pytest.mark.parametrize(
    ("name", "stop"),
    [("hutchpp", 2), ("hutchpp", 6), ("hutchpp", 10), ("xtrace", 1), ("xtrace", 3)],
)
def test_a_killed_run_ends_with_the_same_bits(name, stop):
    matrix, _ = problems.symmetric(FLAT)
    product = problems.matvec_of(matrix)
    saved, steps, calls = {}, [], []

    def many(vs):
        calls.append(1)
        return jax.vmap(product)(vs)

    def save(state):
        steps.append(state.num_products)
        if len(steps) == stop:
            saved["calls"] = len(calls)
            saved["state"] = problems.packed(state)

    options = {"block_size": 3}
    whole = SKETCHED[name](many, params(), 1, on_step=save, **options)
    left = len(calls) - saved.pop("calls")
    calls.clear()
    state = problems.unpacked(STATES[name], saved["state"], params())
    again = SKETCHED[name](many, params(), 1, state=state, **options)
    np.testing.assert_array_equal(whole.samples, again.samples)
    assert whole.interval == again.interval
    assert len(calls) == left
    assert whole.num_products == again.num_products


def test_bad_counts_are_refused():
    product = problems.matvec_of(np.eye(60))
    with pytest.raises(ValueError, match="must be at least 2 for XTrace: got 1"):
        curvature.xtrace(product, params(), 0, num_probes=1)
    with pytest.raises(ValueError, match="sketch_size must be at least 1: got 0"):
        curvature.hutchpp_trace(product, params(), 0, sketch_size=0)
