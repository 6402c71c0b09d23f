"""A softmax regression behind `LossMixin`, its batches, and its Hessian written out.

Per token, with p the probabilities, x the features and s = 1 + 2 z log Z, the Hessian
with respect to W is x x^T (kron) [s (diag p - p p^T) + 2 z p p^T] (Böhning 1992, and
the z-loss term from differentiating z (log Z)^2 twice).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct
from t5x_fwdloss.loss_mixin import LossMixin

FEATURES, CLASSES, LENGTH = 3, 4, 5


class SoftmaxRegression(LossMixin):
    """Logits x W + b: linear in the parameters, so Gauss-Newton is the Hessian."""

    def __init__(self, *, impl="custom_jvp", smoothing=0.0, z_loss=0.0, factor=None):
        """The settings that `LossMixin` reads."""
        self._loss_impl = impl
        self._loss_chunk_length = None
        self._label_smoothing = smoothing
        self._z_loss = z_loss
        self._loss_normalizing_factor = factor

    def _compute_logits(self, params, batch, dropout_rng=None):
        x = batch["features"]
        if dropout_rng is not None:
            x = x * jax.random.bernoulli(dropout_rng, 0.5, x.shape)
        return x @ params["dense"]["kernel"] + params["dense"]["bias"]


def parameters(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(FEATURES, CLASSES)).astype(dtype)
    bias = rng.normal(size=CLASSES).astype(dtype)
    return {"dense": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}}


def examples(num=12, seed=1, dtype=np.float32):
    """One dictionary of `num` sequences of unequal length."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, size=num)
    weights = (np.arange(LENGTH) < lengths[:, None]).astype(dtype)
    return {
        "features": rng.normal(size=(num, LENGTH, FEATURES)).astype(dtype),
        "decoder_target_tokens": (
            rng.integers(1, CLASSES, size=(num, LENGTH)) * (weights > 0)
        ).astype(np.int32),
        "decoder_loss_weights": weights,
    }


def batches(size=4, **kwargs):
    """The same examples, in batches of `size`."""
    whole = examples(**kwargs)
    num = len(whole["features"])
    return [{k: x[i : i + size] for k, x in whole.items()} for i in range(0, num, size)]


def dense_hessian(params, whole, normalizer, z_loss=0.0):
    """The Hessian in the order of `ravel_pytree`: bias, then kernel. Float64."""
    kernel = np.asarray(params["dense"]["kernel"], np.float64)
    bias = np.asarray(params["dense"]["bias"], np.float64)
    x = np.asarray(whole["features"], np.float64).reshape(-1, FEATURES)
    weights = np.asarray(whole["decoder_loss_weights"], np.float64).reshape(-1)
    # A bias is a feature that is always one.
    x = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    total = np.zeros(((FEATURES + 1) * CLASSES,) * 2)
    for row, weight in zip(x, weights, strict=True):
        z = row @ np.concatenate([bias[None], kernel])
        log_z = np.log(np.exp(z).sum())
        p = np.exp(z - log_z)
        scale = 1 + 2 * z_loss * log_z
        block = scale * (np.diag(p) - np.outer(p, p)) + 2 * z_loss * np.outer(p, p)
        total += weight * np.kron(np.outer(row, row), block)
    return total / normalizer


class GivenProduct(MatrixProduct):
    """A map that a test gives in place of the products with a matrix of a loss."""

    def __init__(self, product):
        self._given = jax.jit(product)

    def __call__(self, v):
        return self._given(v)

    def temporary_bytes(self, v):
        return 0


def product_with(matrix):
    """The product with a dense matrix, in the order of `ravel_pytree`."""

    def product(vector):
        flat, unravel = ravel_pytree(vector)
        return unravel(jnp.matmul(jnp.asarray(matrix, flat.dtype), flat))

    return GivenProduct(product)
