"""What works on T5X's own loss, and what fails: the claims of the README, live."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import jet

from t5x_models import subjects
from t5x_models.subjects import EPS

pytestmark = pytest.mark.t5x

LOGITS = jnp.sin(jnp.arange(15.0).reshape(3, 5))
TANGENT = jnp.cos(jnp.arange(15.0).reshape(3, 5))
LABELS = jnp.array([0, 4, 2])
SETTINGS = {"label_smoothing": 0.1, "z_loss": 1e-2}


def t5x_s(logits):
    from t5x import losses

    return losses.compute_weighted_cross_entropy(logits, LABELS, **SETTINGS)[0]


def ours(logits):
    from t5x_fwdloss import losses

    return losses.compute_weighted_cross_entropy(
        logits, LABELS, **SETTINGS, impl="custom_jvp"
    )[0]


def push(loss, x):
    return jax.jvp(loss, (x,), (TANGENT,))[1]


def gauss_newton(loss, x):
    """J^T H J v with the logits as the network's output, J = 1."""
    outputs, transpose = jax.vjp(lambda y: y, x)
    return transpose(jax.jvp(jax.grad(loss), (outputs,), (TANGENT,))[1])[0]


FAILS = {
    "jvp": push,
    "linearize": lambda loss, x: jax.linearize(loss, x)[1](TANGENT),
    "jacfwd": lambda loss, x: jax.jacfwd(loss)(x),
    "forward gradient": lambda loss, x: push(loss, x) * TANGENT,
    "grad(jvp)": lambda loss, x: jax.grad(functools.partial(push, loss))(x),
    "jet": lambda loss, x: jet.jet(loss, (x,), ((TANGENT, jnp.zeros_like(x)),)),
}
WORKS = {
    "grad": lambda loss, x: jax.grad(loss)(x),
    "jvp(grad)": lambda loss, x: push(jax.grad(loss), x),
    "hessian": lambda loss, x: jax.hessian(loss)(x),
    "grad(grad)": lambda loss, x: jax.grad(
        lambda y: jnp.vdot(jax.grad(loss)(y), TANGENT)
    )(x),
    "Gauss-Newton product": gauss_newton,
}


@pytest.mark.parametrize("mode", FAILS)
def test_forward_mode_fails_on_t5x_s_loss(mode):
    with pytest.raises(
        (TypeError, NotImplementedError),
        match="forward-mode|'custom_lin' not implemented|JetTracer",
    ):
        FAILS[mode](t5x_s, LOGITS)


@pytest.mark.parametrize("mode", [name for name in FAILS if name != "jet"])
def test_forward_mode_works_on_ours(mode):
    found = FAILS[mode](ours, LOGITS)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("mode", WORKS)
def test_these_work_on_t5x_s_loss_and_agree_with_ours(mode):
    wanted, got = WORKS[mode](t5x_s, LOGITS), WORKS[mode](ours, LOGITS)
    assert jnp.abs(got - wanted).max() <= 50 * EPS * jnp.abs(wanted).max()


@pytest.mark.parametrize("kind", subjects.KINDS)
def test_the_same_holds_for_whole_models(kind):
    features = subjects.batch(kind)
    stock = subjects.stock(kind)
    params = subjects.initial(stock, features)
    tangent = jax.tree.map(jnp.ones_like, params)

    def loss(model):
        return lambda p: model.loss_fn(p, features, None)[0]

    def product(model):
        gradient = jax.grad(loss(model))
        return jax.jit(lambda p: jax.jvp(gradient, (p,), (tangent,))[1])(params)

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss(stock), (params,), (tangent,))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda p: stock.score_batch(p, features), (params,), (tangent,))
    wanted, got = product(stock), product(subjects.ours(kind, "custom_jvp"))
    subjects.assert_close(got, wanted, 500 * EPS)
