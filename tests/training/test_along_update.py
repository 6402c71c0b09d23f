"""The numbers of a probe: closed forms of a quadratic, and dense float64 on a tiny model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from analysis import toy
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.training import along_update

# A quadratic L = x H x / 2 + b x at x = 0, and a step of gradient descent, D = -eta b.
HESSIAN = np.array([[3.0, 1.0], [1.0, -1.0]])
GRADIENT = np.array([2.0, 1.0])
RATE = 0.1


def quadratic(x):
    return x @ jnp.asarray(HESSIAN) @ x / 2 + jnp.asarray(GRADIENT) @ x


def numbers_of_quadratic(learning_rate=RATE, *, step=RATE):
    old = jnp.zeros(2)
    new = jnp.asarray(-step * GRADIENT)
    found = jax.jit(along_update.along_update(quadratic))(old, new)
    return along_update.scalars(found, learning_rate)


@pytest.mark.usefixtures("x64")
def test_every_number_of_a_quadratic_has_its_closed_form():
    squared = GRADIENT @ GRADIENT  # 5
    along = GRADIENT @ HESSIAN @ GRADIENT  # 15
    expected = {
        "loss": 0.0,
        "slope": -RATE * squared,
        "curvature": RATE**2 * along,
        "predicted_change": -RATE * squared + RATE**2 * along / 2,
        # The loss is its quadratic model.
        "actual_change": -RATE * squared + RATE**2 * along / 2,
        "multiple_of_least_loss": squared / (RATE * along),
        "multiple_of_return": 2 * squared / (RATE * along),
        # Rayleigh's quotient of the gradient, and 2 over the rate that brings it back.
        "directional_sharpness": along / squared,
    }
    found = numbers_of_quadratic()
    # The loss is its quadratic model, so the critical numbers are the model's, to 10 %.
    assert found.pop("critical_multiple") == pytest.approx(20 / 3, rel=0.1)
    assert found.pop("critical_sharpness") == pytest.approx(3.0, rel=0.1)
    assert found.pop("forward_passes") == 4
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
    assert quadratic(found["multiple_of_return"] * -RATE * GRADIENT) == pytest.approx(
        0.0, abs=1e-12
    )


@pytest.mark.usefixtures("x64")
def test_the_sharpness_depends_on_the_rate_that_the_host_tells():
    assert numbers_of_quadratic(2 * RATE)["directional_sharpness"] == pytest.approx(1.5)
    for unknown in (None, 0.0):
        assert not [x for x in numbers_of_quadratic(unknown) if "sharpness" in x]


@pytest.mark.usefixtures("x64")
def test_numbers_that_are_not_defined_are_left_out():
    uphill = numbers_of_quadratic(step=-RATE)
    assert uphill["slope"] > 0
    assert not [name for name in uphill if "multiple" in name or "critical" in name]
    still = numbers_of_quadratic(step=0.0)
    assert set(still) == set(uphill) - {"directional_sharpness"}
    concave = along_update.along_update(lambda x: -quadratic(-x))
    found = along_update.scalars(concave(jnp.zeros(2), jnp.asarray(-GRADIENT)), RATE)
    assert found["slope"] < 0 > found["curvature"]
    assert not [name for name in found if "multiple" in name or "critical" in name]
    assert found["directional_sharpness"] < 0


@pytest.mark.usefixtures("x64")
def test_slope_and_curvature_are_those_of_the_dense_hessian():
    model = toy.SoftmaxRegression(smoothing=0.1, z_loss=0.01)
    old, batch = toy.parameters(dtype=np.float64), toy.examples(dtype=np.float64)
    new = jax.tree.map(lambda x: x * 1.1 - 0.2, old)
    key = jax.random.key(3)
    loss = lambda params, batch: model.loss_sum(params, batch, key)[0]
    found = jax.jit(along_update.along_update(loss))(old, new, batch)
    flat, unravel = ravel_pytree(old)
    dense = lambda x: loss(unravel(x), batch)
    update = ravel_pytree(new)[0] - flat
    close = lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-11)
    close(found.loss, dense(flat))
    close(found.slope, jax.grad(dense)(flat) @ update)
    close(found.curvature, update @ jax.hessian(dense)(flat) @ update)
    close(found.loss_after, dense(flat + update))
