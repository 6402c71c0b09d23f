"""The Fisher matrices are those written out token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from t5x_fwdloss import losses
from t5x_fwdloss.analysis import NonFiniteLossError, Objective
from t5x_fwdloss.analysis.objective import matrices
from t5x_fwdloss.analysis.objective.of_outputs.token_loss import TokenLoss

from . import toy

pytestmark = pytest.mark.usefixtures("x64")
ROUNDING = 64 * float(np.finfo(np.float64).eps)


@pytest.fixture
def params():
    return toy.parameters(dtype=np.float64)


@pytest.fixture
def whole():
    found = toy.examples(dtype=np.float64)
    # Weights that are neither zero nor one show where their square would.
    found["decoder_loss_weights"] *= np.linspace(0.5, 2.0, toy.LENGTH)
    return found


def objective(whole, **settings):
    settings = {"factor": "NUM_REAL_TARGET_TOKENS"} | settings
    halves = [{k: x[i : i + 6] for k, x in whole.items()} for i in (0, 6)]
    return Objective.from_model(toy.SoftmaxRegression(**settings), halves)


def dense(product, params):
    flat, unravel = ravel_pytree(params)
    columns = [ravel_pytree(product(unravel(e)))[0] for e in jnp.eye(flat.size)]
    return np.stack(columns, axis=1)


def test_fisher_is_gauss_newton_without_smoothing_and_z_loss(params, whole):
    plain = toy.dense_hessian(params, whole, whole["decoder_loss_weights"].sum())
    found = objective(whole, smoothing=0.1, z_loss=0.05)
    fisher = dense(found.product("fisher", params), params)
    np.testing.assert_allclose(fisher, plain, atol=ROUNDING * np.abs(plain).max())
    other = dense(found.product("gauss_newton", params), params)
    assert np.abs(other - plain).max() > 1e-3 * np.abs(plain).max()


def gradients(params, whole, labels):
    """Each token's gradient (p - e_y) times its features, bias first; and its weight."""
    x = whole["features"].reshape(-1, toy.FEATURES)
    x = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    kernel, bias = params["dense"]["kernel"], params["dense"]["bias"]
    p = np.asarray(jax.nn.softmax(x @ jnp.concatenate([bias[None], kernel])))
    errors = p - np.eye(toy.CLASSES)[labels.reshape(-1)]
    rows = (x[:, :, None] * errors[:, None, :]).reshape(len(x), -1)
    return rows, whole["decoder_loss_weights"].reshape(-1)


def test_empirical_fisher_is_the_second_moment_of_the_tokens_gradients(params, whole):
    rows, weights = gradients(params, whole, whole["decoder_target_tokens"])
    expected = (rows * weights[:, None]).T @ rows / weights.sum()
    found = objective(whole)
    matrix = dense(found.product("empirical_fisher", params), params)
    np.testing.assert_allclose(matrix, expected, atol=ROUNDING * np.abs(expected).max())


def test_sampled_fisher_is_one_fixed_matrix_and_right_on_average(params, whole):
    found = objective(whole)
    flat, unravel = ravel_pytree(params)
    direction = np.random.default_rng(0).normal(size=flat.size)
    v = unravel(jnp.asarray(direction))
    first, again = (
        ravel_pytree(found.product("sampled_fisher", params)(v))[0] for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    outputs = lambda p, batch, *_: toy.SoftmaxRegression()._compute_logits(p, batch)
    total = float(whole["decoder_loss_weights"].sum())
    maps = matrices.linear_maps(
        lambda *_: 0.0, outputs, TokenLoss(losses.LossSettings()), total
    )

    @jax.jit
    def quadratic(index):
        product = maps["sampled_fisher"].direct(params, v, whole, None, index)
        return ravel_pytree(product)[0] @ direction

    draws = np.asarray([quadratic(index) for index in range(200)])
    plain = toy.dense_hessian(params, whole, total)
    expected = direction @ plain @ direction
    error = draws.std(ddof=1) / np.sqrt(len(draws))
    assert 0 < error < 0.05 * expected
    assert abs(draws.mean() - expected) <= 4 * error


def test_an_unknown_matrix_and_one_without_logits_are_refused(params, whole):
    found = objective(whole)
    with pytest.raises(ValueError, match=r"one of hessian, .*: got 'fischer'"):
        found.product("fischer", params)
    bare = Objective(
        lambda p, *_: jnp.sum(p["dense"]["bias"] ** 2),
        found.batches,
        normalizer=found.normalizer,
    )
    with pytest.raises(ValueError, match="the Fisher matrix needs the model's logits"):
        bare.check_matrix("fisher")


@pytest.mark.parametrize("matrix", ["hessian", "gauss_newton", "sampled_fisher"])
def test_linearized_products_are_the_products(params, whole, matrix):
    found = objective(whole, smoothing=0.1, z_loss=0.05)
    flat, unravel = ravel_pytree(params)
    v = unravel(jnp.asarray(np.random.default_rng(1).normal(size=flat.size)))
    expected = ravel_pytree(found.product(matrix, params, memory_budget=0)(v))[0]
    linear = found.product(matrix, params)
    assert linear.how.startswith("2 of 2 batches linearized")
    tolerance = ROUNDING * np.abs(expected).max()
    np.testing.assert_allclose(ravel_pytree(linear(v))[0], expected, atol=tolerance)


def test_without_memory_nothing_is_linearized_and_stacked_products_agree(params, whole):
    found = objective(whole)
    linear = found.product("hessian", params, 0)
    assert linear.how == "0 of 2 batches linearized, 0.0 MiB per device"
    v = jax.tree.map(jnp.ones_like, params)
    together = linear.stacked(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), v))
    expected = ravel_pytree(linear(v))[0]
    second = ravel_pytree(jax.tree.map(lambda x: x[1], together))[0]
    np.testing.assert_allclose(
        second, 2 * expected, atol=ROUNDING * np.abs(expected).max()
    )


def test_a_linearized_product_that_is_not_finite_names_batch_and_block(params, whole):
    whole["features"][8, 0, 0] = np.inf
    linear = objective(whole).product("hessian", params)
    v = jax.tree.map(jnp.ones_like, params)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), v)
    message = "the product with the Hessian must be finite: batch 1 gives nan in dense"
    anew = objective(whole).product("hessian", params, memory_budget=0)
    for product, argument in (
        (linear, v),
        (linear.stacked, stacked),
        (linear.at(params), v),
        (anew, v),
    ):
        with pytest.raises(NonFiniteLossError, match=message):
            product(argument)


@pytest.mark.parametrize("matrix", matrices.WORDS)
def test_any_split_of_the_examples_gives_the_same_matrix(params, whole, matrix):
    v = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    model = toy.SoftmaxRegression(factor="AVERAGE_PER_SEQUENCE", z_loss=0.05)

    def product(size, num_microbatches):
        batches = [
            {k: x[i : i + size] for k, x in whole.items()} for i in range(0, 12, size)
        ]
        found = Objective.from_model(model, batches, num_microbatches=num_microbatches)
        return ravel_pytree(found.product(matrix, params)(v))[0]

    expected = product(12, 1)
    for size, num_microbatches in ((12, 4), (6, 1), (6, 2), (1, 1)):
        np.testing.assert_allclose(
            product(size, num_microbatches),
            expected,
            atol=ROUNDING * np.abs(expected).max(),
        )
