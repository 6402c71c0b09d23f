"""The closed form equals the dense Hessian of the textbook, and is `jvp(grad)`."""

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest

from t5x_fwdloss.losses import logit_hessian_product, token_cross_entropy

pytestmark = pytest.mark.usefixtures("x64")
LABELS = jnp.array([3, 0, -1, 9])


def example():
    keys = jax.random.split(jax.random.key(0), 2)
    return [2 * jax.random.normal(key, (4, 5), jnp.float64) for key in keys]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_product_is_that_of_the_dense_hessian(label_smoothing, z_loss):
    logits, tangent = example()
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    product = logit_hessian_product(logits, LABELS, tangent, **options)
    expected = np.stack(
        [
            oracles.token_hessian(*row, label_smoothing, z_loss) @ u
            for *row, u in zip(np.asarray(logits), LABELS, tangent, strict=True)
        ]
    )
    laws.assert_close(product, expected, laws.scale_of(logits), jnp.float64)
    loss = lambda x: jnp.sum(token_cross_entropy(x, LABELS, **options)[0])
    through_rule = jax.jvp(jax.grad(loss), (logits,), (tangent,))[1]
    laws.assert_close(through_rule, expected, laws.scale_of(logits), jnp.float64)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradient_of_the_rule_is_the_closed_form(label_smoothing):
    logits, _ = example()
    loss = lambda x: jnp.sum(
        token_cross_entropy(x, LABELS, label_smoothing=label_smoothing, z_loss=0.3)[0]
    )
    expected = np.stack(
        [
            oracles.token_gradient(*row, label_smoothing, 0.3)
            for row in zip(np.asarray(logits), LABELS, strict=True)
        ]
    )
    laws.assert_close(jax.grad(loss)(logits), expected, 10.0, jnp.float64)


def test_masked_classes_have_no_curvature():
    logits, tangent = example()
    logits = logits.at[:, 3:].set(-jnp.inf)
    product = logit_hessian_product(logits, LABELS % 3, tangent, z_loss=0.3)
    np.testing.assert_array_equal(product[:, 3:], np.zeros((4, 2)))
    assert np.isfinite(product).all()


def test_bfloat16_logits_are_computed_with_in_float32():
    logits, tangent = (x.astype(jnp.bfloat16) for x in example())
    product = logit_hessian_product(logits, LABELS, tangent)
    wide = [x.astype(jnp.float32) for x in (logits, tangent)]
    assert product.dtype == jnp.float32
    expected = logit_hessian_product(wide[0], LABELS, wide[1])
    np.testing.assert_array_equal(product, expected)
