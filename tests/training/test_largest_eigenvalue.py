"""The largest eigenvalue while training, against a dense Hessian in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from analysis import toy
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.training import largest_eigenvalue
from t5x_fwdloss.training.quantity import ProbedStep

pytestmark = pytest.mark.usefixtures("x64")
MODEL = toy.SoftmaxRegression(smoothing=0.1, z_loss=0.01)
BOTH = (largest_eigenvalue.HESSIAN, largest_eigenvalue.PRECONDITIONED)


def loss(params, batch, key):
    return MODEL.loss_sum(params, batch, key)[0]


def compiled(function, *_, result="scalars"):
    assert result == "vector"
    return jax.jit(function)


@pytest.fixture
def params():
    return toy.parameters(dtype=np.float64)


@pytest.fixture
def diagonal(params):
    draw = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(draw.uniform(0.5, 2, x.shape)), params)


@pytest.fixture
def step(params, diagonal):
    """A step whose new parameters are not its old ones, with Adam's threshold at 0.1."""
    found = Preconditioner(diagonal, "Adam", 0.1, threshold=38.0)
    return ProbedStep(
        jax.tree.map(jnp.zeros_like, params),
        params,
        toy.examples(dtype=np.float64),
        None,
        0.1,
        lambda: found,
    )


@pytest.fixture
def dense(step):
    flat, unravel = ravel_pytree(step.new)
    return jax.hessian(lambda x: loss(unravel(x), step.batch, None))(flat)


def probe(matrices, products):
    found = largest_eigenvalue.LargestEigenvalues(loss, matrices, products)
    found.prepare(compiled)
    return found


def test_both_eigenvalues_are_those_of_the_dense_matrices(step, dense, diagonal):
    root = np.sqrt(ravel_pytree(diagonal)[0])
    expected = {
        "largest_eigenvalue_of_hessian": np.linalg.eigvalsh(dense)[-1],
        "largest_eigenvalue_of_preconditioned_hessian": np.linalg.eigvalsh(
            root[:, None] * dense * root
        )[-1],
        "threshold_of_preconditioned_hessian": 380.0,
    }
    found = probe(BOTH, 30).measure(step)
    residuals = [found.pop(f"residual_of_{matrix}") for matrix in BOTH]
    assert found == pytest.approx(expected, rel=1e-10)
    assert max(residuals) < 1e-4 * expected["largest_eigenvalue_of_hessian"]


def test_a_few_products_suffice_from_the_last_eigenvector_on(step, dense):
    values = np.linalg.eigvalsh(dense)
    quantity = probe(BOTH[:1], 3)
    found = [quantity.measure(step) for _ in range(8)]
    got = [numbers["largest_eigenvalue_of_hessian"] for numbers in found]
    residuals = [numbers["residual_of_hessian"] for numbers in found]
    assert got[0] < 0.99 * values[-1]
    assert got[-1] == pytest.approx(values[-1], rel=1e-3)
    assert np.all(np.diff(got) >= -1e-12 * values[-1])
    for value, residual in zip(got, residuals, strict=True):
        assert np.abs(values - value).min() <= residual * (1 + 1e-9)
    assert residuals[-1] < 0.2 * residuals[0]


def test_each_matrix_begins_at_its_own_eigenvector(step, diagonal):
    # Eigenvectors far from each other, so that the other one's is a bad start.
    found = Preconditioner(jax.tree.map(lambda x: x**8, diagonal), "Adam", 0.1)
    step = dataclasses.replace(step, preconditioner=lambda: found)
    together, alone = probe(BOTH, 3), [probe([matrix], 3) for matrix in BOTH]
    for _ in range(4):
        got, apart = together.measure(step), {}
        for quantity in alone:
            apart |= quantity.measure(step)
        assert got == pytest.approx(apart, rel=1e-9)


def test_the_residual_is_that_of_the_vector_that_is_kept(step, dense):
    product = jax.jit(lambda v: dense @ v)
    start = jnp.asarray(np.random.default_rng(1).normal(size=len(dense)))
    value, residual, vector = largest_eigenvalue.largest(product, start, 4)
    assert float(jnp.linalg.norm(vector)) == pytest.approx(1.0)
    assert float(vector @ dense @ vector) == pytest.approx(value, rel=1e-10)
    apart = float(jnp.linalg.norm(dense @ vector - value * vector))
    assert residual == pytest.approx(apart, rel=1e-8)


def test_after_a_nan_the_next_probe_begins_anew(step, dense):
    quantity = probe(BOTH[:1], 30)
    spoiled = jax.tree.map(lambda x: x * np.nan, step.new)
    broken = ProbedStep(step.old, spoiled, step.batch, None, 0.1, step.preconditioner)
    assert all(np.isnan(x) for x in quantity.measure(broken).values())
    found = quantity.measure(step)["largest_eigenvalue_of_hessian"]
    assert found == pytest.approx(np.linalg.eigvalsh(dense)[-1], rel=1e-10)


def test_a_preconditioner_that_is_not_defined_stops_nothing(step, caplog):
    def none():
        raise ValueError("the learning rate is zero")

    without = dataclasses.replace(step, preconditioner=none)
    found = probe(BOTH, 3).measure(without)
    assert set(found) == {"largest_eigenvalue_of_hessian", "residual_of_hessian"}
    assert "not probed: the learning rate is zero" in caplog.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"threshold_of_preconditioned_hessian": 20.0}),
        ({"threshold": None}, {}),
        ({"learning_rate": None}, {}),
        (
            {"learning_rate": None, "includes_learning_rate": True},
            {"threshold_of_preconditioned_hessian": 2.0},
        ),
    ],
)
def test_the_threshold_is_told_where_it_is_known(changes, expected):
    known = {"learning_rate": 0.1, "threshold": 2.0}
    found = Preconditioner((), "SGD", **{**known, **changes})
    assert largest_eigenvalue.threshold(found) == expected
