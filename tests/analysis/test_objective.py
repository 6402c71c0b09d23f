"""The objective is one function, whatever the batching, and its derivatives are true."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.analysis import Objective
from t5x_fwdloss.analysis.objective import batches
from t5x_fwdloss.analysis.objective.finite import NonFiniteLossError
from t5x_fwdloss.analysis.objective.normalization import Normalizer

from . import toy

FACTORS = {
    "none": None,
    "constant": 7.0,
    "real": "NUM_REAL_TARGET_TOKENS",
    "all": "NUM_TOTAL_TARGET_TOKENS",
    "sequence": "AVERAGE_PER_SEQUENCE",
}
EPS = float(jnp.finfo(jnp.float32).eps)


def objective(size=4, *, num_microbatches=1, **settings):
    model = toy.SoftmaxRegression(**settings)
    return Objective.from_model(
        model, toy.batches(size), num_microbatches=num_microbatches
    )


def normal_like(params, seed):
    flat, unravel = ravel_pytree(params)
    noise = np.random.default_rng(seed).normal(size=flat.shape).astype(flat.dtype)
    return unravel(jnp.asarray(noise))


def everything(found, params):
    """Value, gradient and Hessian product as one flat vector."""
    trees = [
        found.gradient(params),
        found.product("hessian", params)(normal_like(params, 3)),
    ]
    values = [found.value(params)]
    return np.concatenate([values, *[ravel_pytree(t)[0] for t in trees]])


def test_any_split_into_batches_and_microbatches_gives_the_same_numbers():
    settings = {"factor": "AVERAGE_PER_SEQUENCE", "smoothing": 0.1, "z_loss": 0.01}
    params = toy.parameters()
    whole = everything(objective(12, **settings), params)
    for size, num_microbatches in ((6, 1), (4, 2), (1, 1)):
        split = objective(size, num_microbatches=num_microbatches, **settings)
        found = everything(split, params)
        np.testing.assert_allclose(found, whole, atol=1e-6 * np.abs(whole).max())


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS.keys())
def test_the_value_is_the_same_for_any_split_under_every_normalizer(factor):
    params = toy.parameters()
    whole = objective(12, factor=factor).value(params)
    for size in (6, 3):
        assert objective(size, factor=factor).value(params) == pytest.approx(
            whole, rel=1e-6
        )


@pytest.mark.parametrize(
    ("factor", "kind", "total"),
    [
        (None, "sum", 1.0),
        (7, "constant", 7.0),
        ("NUM_REAL_TARGET_TOKENS", "real_tokens", "tokens"),
        ("num_total_target_tokens", "all_tokens", 12.0 * toy.LENGTH),
        ("AVERAGE_PER_SEQUENCE", "per_sequence", 12.0),
    ],
)
def test_the_normalizer_is_the_total_over_all_batches(factor, kind, total):
    found = objective(4, factor=factor)
    tokens = toy.examples()["decoder_loss_weights"].sum()
    assert found.normalizer.kind == kind
    expected_total = tokens if total == "tokens" else total
    assert pytest.approx(expected_total) == found.W
    assert found.num_tokens == tokens
    units = {"sum": "nat", "constant": "nat/constant", "all_tokens": "nat/position"}
    assert found.normalizer.unit == units.get(kind, "nat/token")
    if kind != "sum":
        assert f"W = {expected_total:g}" in found.normalizer.words
    unnormalized = objective(12, factor=None)
    if kind != "per_sequence":
        expected = unnormalized.value(toy.parameters()) / found.W
        assert found.value(toy.parameters()) == pytest.approx(expected, rel=8 * EPS)


@pytest.mark.usefixtures("x64")
def test_products_are_those_of_the_closed_form_hessian():
    z_loss = 0.02
    params = toy.parameters(dtype=np.float64)
    whole = toy.examples(dtype=np.float64)
    model = toy.SoftmaxRegression(factor="NUM_REAL_TARGET_TOKENS", z_loss=z_loss)
    found = Objective.from_model(model, toy.batches(4, dtype=np.float64))
    expected = toy.dense_hessian(params, whole, found.W, z_loss)
    v = normal_like(params, 5)
    columns = expected @ np.asarray(ravel_pytree(v)[0])
    tolerance = 64 * jnp.finfo(jnp.float64).eps * np.abs(expected).max()
    for matrix in ("hessian", "gauss_newton"):
        flat = ravel_pytree(found.product(matrix, params)(v))[0]
        np.testing.assert_allclose(flat, columns, atol=tolerance)


@pytest.mark.usefixtures("x64")
def test_the_gradient_is_the_finite_difference_of_the_value():
    params = toy.parameters(dtype=np.float64)
    model = toy.SoftmaxRegression(smoothing=0.1, z_loss=0.01)
    found = Objective.from_model(model, toy.batches(6, dtype=np.float64))
    flat, unravel = ravel_pytree(params)
    gradient = np.asarray(ravel_pytree(found.gradient(params))[0])
    step = float(jnp.finfo(jnp.float64).eps) ** (1 / 3)
    for index in (0, 5, 15):
        moved = [found.value(unravel(flat.at[index].add(s))) for s in (step, -step)]
        slope = (moved[0] - moved[1]) / (2 * step)
        assert gradient[index] == pytest.approx(slope, abs=1e3 * step**2)


def test_the_jvp_is_the_inner_product_with_the_gradient():
    found, params = objective(4, smoothing=0.1), toy.parameters()
    v = normal_like(params, 7)
    value, derivative = found.jvp(params, v)
    flat_v, flat_g = ravel_pytree(v)[0], ravel_pytree(found.gradient(params))[0]
    assert value == pytest.approx(found.value(params), rel=8 * EPS)
    scale = float(jnp.linalg.norm(flat_v) * jnp.linalg.norm(flat_g))
    assert derivative == pytest.approx(float(flat_v @ flat_g), abs=8 * EPS * scale)


def test_several_products_equal_one_by_one():
    found, params = objective(4), toy.parameters()
    vs = [normal_like(params, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *vs)
    product = found.product("hessian", params)
    together = product.stacked(stacked)
    for i, v in enumerate(vs):
        np.testing.assert_allclose(
            ravel_pytree(jax.tree.map(lambda x, i=i: x[i], together))[0],
            ravel_pytree(product(v))[0],
            atol=64 * EPS,
        )


def test_every_derivative_is_traced_once():
    found, params = objective(3), toy.parameters()
    for seed in range(3):
        v = normal_like(params, seed)
        found.value(params)
        found.gradient(params)
        found.jvp(params, v)
    assert len(found.num_traces) == 3
    assert set(found.num_traces.values()) == {1}


def test_integer_leaves_stay_and_narrow_leaves_are_widened():
    params = toy.parameters()
    extended = {**params, "step": jnp.asarray(3)}
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    found = objective(4)
    gradient = found.gradient(extended)
    assert gradient["step"] is None
    flat = lambda tree: np.asarray(ravel_pytree(tree["dense"])[0])
    np.testing.assert_array_equal(flat(gradient), flat(found.gradient(params)))
    assert {x.dtype for x in jax.tree.leaves(found.gradient(narrow))} == {
        jnp.dtype("float32")
    }


def test_dropout_is_off_or_one_fixed_key_per_batch():
    params, model = toy.parameters(), toy.SoftmaxRegression()
    off = Objective.from_model(model, toy.batches(4))
    on = [
        Objective.from_model(model, toy.batches(4), dropout_seed=seed)
        for seed in (1, 1, 2)
    ]
    values = [found.value(params) for found in on]
    assert values[0] == values[1] == on[0].value(params)
    assert len({off.value(params), values[0], values[2]}) == 3


def test_dropout_is_refused_with_microbatches_which_would_change_its_masks():
    given = {"dropout_seed": 3, "num_microbatches": 2}
    with pytest.raises(
        ValueError, match=r"num_microbatches must be 1 .* dropout_seed=3"
    ):
        Objective.from_model(toy.SoftmaxRegression(), toy.batches(4), **given)


def test_the_hash_depends_on_every_byte_and_not_on_microbatches():
    base = objective(6)
    assert base.batches_hash == objective(6, num_microbatches=3).batches_hash
    changed = toy.batches(6)
    changed[1]["features"][5, 4, 2] += 1e-6
    model = toy.SoftmaxRegression()
    assert Objective.from_model(model, changed).batches_hash != base.batches_hash


def test_the_hash_depends_on_names_shapes_and_types():
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    others = [{"a": x}, {"b": x}, {"a": x.reshape(4, 2)}, {"a": x.view(np.int32)}]
    assert len({batches.digest([batch]) for batch in others}) == len(others)


def test_a_nan_is_blamed_on_its_batch_and_block():
    bad = toy.batches(4)
    bad[1]["features"][0, 0, 0] = np.inf
    bad[1]["decoder_loss_weights"][0, 0] = 1.0
    found = Objective.from_model(toy.SoftmaxRegression(), bad)
    params = toy.parameters()
    with pytest.raises(
        NonFiniteLossError, match="the loss must be finite: batch 1 gives nan"
    ):
        found.value(params)
    with pytest.raises(
        NonFiniteLossError, match=r"the gradient .* batch 1 gives nan in dense/bias"
    ):
        found.gradient(params)


def test_matmul_precision_is_part_of_the_program():
    seen = []

    def numerator(params, batch, key):
        seen.append(jax.config.jax_default_matmul_precision)
        return jnp.sum((batch["x"] @ params["w"]) ** 2)

    for precision in ("highest", "default"):
        Objective(
            numerator,
            [{"x": np.ones((2, 2), np.float32)}],
            normalizer=Normalizer("sum", 1.0),
            precision=precision,
        ).value({"w": jnp.ones((2,))})
    assert seen == ["highest", "default"]


BAD = {
    "no batch": (lambda: Objective.from_model(toy.SoftmaxRegression(), []), "at least"),
    "shapes": (
        lambda: Objective.from_model(
            toy.SoftmaxRegression(), [*toy.batches(4), toy.batches(3)[0]]
        ),
        "same features, shapes and dtypes: batch 0 has .* batch 3 has",
    ),
    "microbatches": (
        lambda: objective(4, num_microbatches=3),
        "divide the batch size: got num_microbatches=3, batch size=4",
    ),
    "precision": (
        lambda: Objective.from_model(
            toy.SoftmaxRegression(), toy.batches(4), precision="best"
        ),
        "one of 'default', 'high', 'highest': got 'best'",
    ),
    "constant": (lambda: objective(factor=-1.0), "the constant over all batches is -1"),
    "direction": (
        lambda: objective().jvp(toy.parameters(), {"dense": {"bias": jnp.ones(4)}}),
        "must have the float leaves of the parameters: at dense/kernel",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_all_weights_zero_is_refused():
    empty = toy.batches(4)
    for batch in empty:
        batch["decoder_loss_weights"] *= 0
    model = toy.SoftmaxRegression(factor="NUM_REAL_TARGET_TOKENS")
    with pytest.raises(
        ValueError,
        match="at least one token that counts: every one of the loss weights",
    ):
        Objective.from_model(model, empty)
