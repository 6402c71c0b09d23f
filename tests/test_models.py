"""Our models beside T5X's, live: loss, every metric, gradients, scores, microbatches."""

import enum
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from t5x_models import subjects
from t5x_models.subjects import EPS, KINDS, assert_close

pytestmark = pytest.mark.t5x

# One form of each kind; the other spellings are in OTHER_FORMS.
FACTORS = {
    "none": None,
    "number": 7.5,
    "real tokens": "NUM_REAL_TARGET_TOKENS",
    "all tokens": "NUM_TOTAL_TARGET_TOKENS",
    "per sequence": "AVERAGE_PER_SEQUENCE",
}
OTHER_FORMS = {
    "integer": 2048 * 114,
    "numpy": np.float32(16),
    "lower case": "num_real_target_tokens",
}
IMPLEMENTATIONS = ("custom_vjp", "autodiff", "custom_jvp")
TOLERANCE = 50 * EPS


def model_of(kind, impl, factor):
    """T5X's model for None, else ours."""
    if impl is None:
        return subjects.stock(kind, loss_normalizing_factor=factor)
    return subjects.ours(kind, impl, loss_normalizing_factor=factor)


@functools.cache
def results(kind, impl, packed):
    """For every factor: loss, metrics and gradients; one program for all of them."""
    features = subjects.batch(kind, packed)
    params = subjects.initial(subjects.stock(kind), features)

    @jax.jit
    def run(params):
        return {
            name: jax.value_and_grad(
                model_of(kind, impl, factor).loss_fn, has_aux=True
            )(params, features, None)
            for name, factor in FACTORS.items()
        }

    return run(params)


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_metrics_and_gradients_are_t5x_s_for_every_factor(kind, impl, packed):
    got, wanted = results(kind, impl, packed), results(kind, None, packed)
    for name in FACTORS:
        assert np.isfinite(wanted[name][0][0])
        assert_close(got[name], wanted[name], TOLERANCE)


@pytest.mark.parametrize("factor", [None, "NUM_REAL_TARGET_TOKENS"])
@pytest.mark.parametrize("kind", KINDS)
def test_custom_vjp_is_t5x_s_loss_to_the_last_bit(kind, factor):
    features = subjects.batch(kind)
    params = subjects.initial(subjects.stock(kind), features)

    def run(impl):
        loss_fn = model_of(kind, impl, factor).loss_fn
        return jax.jit(
            lambda p: jax.value_and_grad(loss_fn, has_aux=True)(p, features, None)
        )(params)

    assert_close(run("custom_vjp"), run(None), 0.0)


@pytest.mark.parametrize("form", [*OTHER_FORMS, "enum"])
def test_every_form_of_a_factor_gives_t5x_s_loss(form):
    from t5x import losses

    average = losses.SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE
    factor = OTHER_FORMS.get(form, average)
    features = subjects.batch("decoder_only", packed=True)
    params = subjects.initial(subjects.stock("decoder_only"), features)
    wanted, got = (
        jax.jit(model_of("decoder_only", impl, factor).loss_fn)(params, features, None)
        for impl in (None, "custom_jvp")
    )
    assert_close(got, wanted, TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_have_t5x_s_names_and_types(kind):
    (_, got), _ = results(kind, "custom_jvp", True)["none"]
    (_, wanted), _ = results(kind, None, True)["none"]
    assert {k: type(v) for k, v in got.items()} == {
        k: type(v) for k, v in wanted.items()
    }
    assert len(wanted) > 15


@pytest.mark.parametrize("weights", ["absent", "bool", "float", "zero"])
def test_every_kind_of_weights_gives_t5x_s_loss(weights):
    features = subjects.batch("encoder_decoder")
    real = features.pop("decoder_loss_weights")
    if weights != "absent":
        features["decoder_loss_weights"] = {
            "bool": real.astype(bool),
            "float": real * jnp.linspace(0.1, 2.0, subjects.LENGTH),
            "zero": real * 0.0,
        }[weights]
    stock = subjects.stock("encoder_decoder")
    params = subjects.initial(stock, features)
    ours = subjects.ours("encoder_decoder", "custom_jvp")
    wanted, got = (
        jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(params, features, None)
        for model in (stock, ours)
    )
    assert_close(got, wanted, TOLERANCE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_intermediates_are_t5x_s(kind, impl):
    features = subjects.batch(kind)
    stock, ours = subjects.stock(kind), subjects.ours(kind, impl)
    params = subjects.initial(stock, features)
    wanted, got = (
        jax.jit(functools.partial(model.score_batch, return_intermediates=True))(
            params, features
        )
        for model in (stock, ours)
    )
    assert_close(got, wanted, TOLERANCE)
    assert_close(ours.score_batch(params, features), wanted[0], TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_the_loss_without_dropout(kind):
    features = subjects.batch(kind)
    ours = subjects.ours(kind, "custom_jvp")
    params = subjects.initial(ours, features)
    assert_close(
        ours.eval_fn(params, features), ours.loss_fn(params, features, None), 0.0
    )


@pytest.mark.parametrize("impl", ["autodiff", "custom_jvp"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tangent_through_loss_and_scores_is_the_gradient_s_inner_product(kind, impl):
    features = subjects.batch(kind, packed=True)
    model = subjects.ours(kind, impl, loss_normalizing_factor="AVERAGE_PER_SEQUENCE")
    params = subjects.initial(model, features)
    tangent = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size).reshape(x.shape)), params
    )

    def both(function):
        _, derivative = jax.jvp(function, (params,), (tangent,))
        products = jax.tree.map(jnp.vdot, jax.grad(function)(params), tangent)
        return derivative, jnp.stack(jax.tree.leaves(products))

    for function in (
        lambda p: model.loss_fn(p, features, None)[0],
        lambda p: model.score_batch(p, features).sum(),
    ):
        derivative, terms = jax.jit(functools.partial(both, function))()
        assert abs(derivative - terms.sum()) <= 200 * EPS * jnp.abs(terms).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_one_two_and_four_microbatches_sum_to_t5x_s_gradient(kind):
    from t5x import train_state, trainer

    factors = (None, 100.0)  # the special factors depend on the microbatch, in T5X too
    features = subjects.batch(kind)
    params = subjects.initial(subjects.stock(kind), features)
    state = train_state.InferenceState.create({"params": params})

    def gradients(impl, factor, number):
        model = model_of(kind, impl, factor)
        return trainer.accumulate_grads_microbatched(
            model, state, features, jax.random.PRNGKey(0), number
        )[0]

    wanted = jax.jit(lambda: [gradients(None, f, 1) for f in factors])()
    got = jax.jit(
        lambda: [[gradients("custom_jvp", f, n) for n in (1, 2, 4)] for f in factors]
    )()
    for mine, theirs in zip(got, wanted, strict=True):
        for sums in mine:
            assert_close(sums, theirs, 200 * EPS)


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_trees_are_t5x_s(kind):
    features = subjects.batch(kind)
    wanted = subjects.initial(subjects.stock(kind), features)
    got = subjects.initial(subjects.ours(kind, "custom_jvp"), features)
    assert_close(got, wanted, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_constructor_arguments_are_t5x_s_and_the_two_of_the_loss(kind):
    stock, ours = type(subjects.stock(kind)), type(subjects.ours(kind, "autodiff"))
    wanted = inspect.signature(stock.__init__).parameters
    got = inspect.signature(ours.__init__).parameters
    assert list(got) == [*wanted, "loss_impl", "loss_chunk_length"]
    assert all(got[n].default == p.default for n, p in wanted.items())
    assert got["loss_impl"].default == "custom_vjp"
    for name in ("predict_batch_with_aux", "score_batch"):
        theirs = inspect.signature(getattr(stock, name)).parameters
        mine = inspect.signature(getattr(ours, name)).parameters
        assert [(n, p.kind, p.default) for n, p in mine.items()] == [
            (n, p.kind, p.default) for n, p in theirs.items()
        ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"impl": "custom_jpv"}, "must be one of .*custom_vjp.*: got 'custom_jpv'"),
        ({"impl": "autodiff", "chunk": 0}, "at least 1: got 0"),
        ({"impl": "autodiff", "label_smoothing": 1.0}, r"in \[0, 1\): got 1.0"),
        ({"impl": "autodiff", "z_loss": -1.0}, "not negative: got -1.0"),
    ],
)
def test_settings_that_no_loss_has_are_refused_by_the_constructor(
    kind, settings, message
):
    with pytest.raises(ValueError, match=message):
        subjects.ours(kind, **settings)


def test_t5x_s_enum_of_factors_is_the_one_we_know():
    from t5x import losses

    assert issubclass(losses.SpecialLossNormalizingFactor, enum.Enum)
    assert {x.name for x in losses.SpecialLossNormalizingFactor} == {
        factor for factor in FACTORS.values() if isinstance(factor, str)
    }
