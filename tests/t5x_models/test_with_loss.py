"""`with_loss`: the model it gives back, and the models it refuses."""

import copy
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from t5x_models import subjects
from t5x_models.subjects import KINDS, assert_close

pytestmark = pytest.mark.t5x


def with_loss(*args, **kwargs):
    from t5x_fwdloss import models

    return models.with_loss(*args, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_but_the_loss_is_kept_and_the_argument_left_alone(kind):
    model = subjects.stock(kind, loss_normalizing_factor="AVERAGE_PER_SEQUENCE")
    before = copy.copy(model.__dict__)
    got = with_loss(model, "custom_jvp", 8)
    assert model.__dict__ == before
    assert isinstance(got, type(model))
    kept = {name: got.__dict__[name] for name in before}
    assert kept == before
    extra = {name: x for name, x in got.__dict__.items() if name not in before}
    assert extra == {"_loss_impl": "custom_jvp", "_loss_chunk_length": 8}
    assert type(model).loss_fn is not type(got).loss_fn


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_our_class(kind):
    features = subjects.batch(kind)
    model = with_loss(subjects.stock(kind), "custom_jvp")
    params = subjects.initial(model, features)
    wanted = jax.jit(subjects.ours(kind, "custom_jvp").loss_fn)(params, features, None)
    assert_close(jax.jit(model.loss_fn)(params, features, None), wanted, 0.0)


def test_a_wrapped_model_gets_the_new_choice_and_no_second_layer():
    once = with_loss(subjects.stock("encoder_decoder"), "custom_jvp", 4)
    twice = with_loss(once, "autodiff")
    assert type(twice) is type(once)
    assert (twice._loss_impl, twice._loss_chunk_length) == ("autodiff", None)
    assert (once._loss_impl, once._loss_chunk_length) == ("custom_jvp", 4)
    ours = with_loss(subjects.ours("decoder_only", "custom_vjp"), "autodiff")
    assert type(ours) is type(subjects.ours("decoder_only", "custom_vjp"))
    assert ours._loss_impl == "autodiff"


def test_a_feature_converter_of_the_instance_is_kept():
    import seqio

    model = subjects.stock(
        "encoder_decoder", feature_converter_cls=seqio.PrePackedEncDecFeatureConverter
    )
    kept = with_loss(model, "autodiff").FEATURE_CONVERTER_CLS
    assert kept is seqio.PrePackedEncDecFeatureConverter


def test_a_subclass_keeps_its_logits_and_its_metrics():
    from t5x import models

    class Mine(models.EncoderDecoderModel):
        def _compute_logits(self, *args, **kwargs):
            return 2 * super()._compute_logits(*args, **kwargs)

        def _compute_metrics(self, **kwargs):
            return {"mine": kwargs["loss"]}

    model = Mine(**subjects.arguments("encoder_decoder"), z_loss=1e-2)
    features = subjects.batch("encoder_decoder")
    params = subjects.initial(model, features)
    wanted = jax.jit(model.loss_fn)(params, features, None)
    got = jax.jit(with_loss(model, "custom_vjp").loss_fn)(params, features, None)
    assert set(got[1]) == {"mine"}
    assert_close(got, wanted, 0.0)


def test_a_subclass_that_changes_its_logits_cannot_be_chunked():
    from t5x import models

    class Mine(models.EncoderDecoderModel):
        def _compute_logits(self, *args, **kwargs):
            return jnp.square(super()._compute_logits(*args, **kwargs))

    features = subjects.batch("encoder_decoder")
    model = Mine(**subjects.arguments("encoder_decoder"))
    params = subjects.initial(model, features)
    with pytest.raises(ValueError, match=r"after the head .*LOSS_CHUNK_LENGTH = None"):
        with_loss(model, "custom_jvp", 4).loss_fn(params, features, None)


@pytest.mark.parametrize("name", ["MoeEncoderDecoderModel", "MoeDecoderOnlyModel"])
def test_mixtures_of_experts_are_refused(name):
    from t5x.contrib.moe import models

    model = object.__new__(getattr(models, name))
    model._label_smoothing, model._z_loss = 0.0, 0.0
    message = f"{name} has its own loss_fn .t5x.contrib.moe.models.{name}.loss_fn"
    with pytest.raises(TypeError, match=message):
        with_loss(model, "custom_jvp")


def test_calm_is_refused():
    from t5x.contrib.calm import models

    model = object.__new__(models.EncoderDecoderModel)
    model._label_smoothing, model._z_loss = 0.0, 0.0
    with pytest.raises(TypeError, match="own loss_fn .t5x.contrib.calm.models"):
        with_loss(model, "custom_jvp")


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("method", ["loss_fn", "score_batch"])
def test_own_losses_and_scores_are_refused_wherever_they_were_defined(method, between):
    from t5x import models

    cls = type("Own", (models.DecoderOnlyModel,), {method: lambda _: None})
    if between:
        cls = type("Below", (cls,), {})
    model = cls(**subjects.arguments("decoder_only"))
    remedy = (
        rf"derive {cls.__name__} from \S+FwdLossDecoderOnlyModel.*super\(\).{method}"
    )
    with pytest.raises(
        TypeError, match=f"{cls.__name__} has its own {method}.*{remedy}"
    ):
        with_loss(model, "custom_jvp")


@pytest.mark.parametrize("method", ["loss_fn", "score_batch"])
@pytest.mark.parametrize("which", ["stock", "ours"])
def test_a_loss_of_the_instance_is_refused_because_it_would_stay_in_place(
    which, method
):
    model = (
        subjects.stock("encoder_decoder")
        if which == "stock"
        else subjects.ours("encoder_decoder", "custom_jvp")
    )
    setattr(model, method, lambda *_: None)
    message = (
        f"has its own {method} .the attribute .*from \\S+FwdLossEncoderDecoderModel"
    )
    with pytest.raises(TypeError, match=message):
        with_loss(model, "custom_jvp")


@pytest.mark.parametrize("kind", subjects.KINDS)
def test_an_analysis_takes_wrapped_models_and_ours_and_no_extended_loss(kind):
    from t5x_fwdloss.loss_mixin import check_no_other_loss

    check_no_other_loss(with_loss(subjects.stock(kind), "custom_jvp"))
    ours = subjects.ours(kind, "custom_jvp")
    check_no_other_loss(ours)
    extended = type("Extended", (type(ours),), {"loss_fn": lambda *_: None})
    with pytest.raises(ValueError, match="Extended has its own loss_fn"):
        check_no_other_loss(object.__new__(extended))


def test_what_is_no_t5x_model_is_refused():
    from t5x_fwdloss import models

    unchecked = inspect.unwrap(models.with_loss)  # the tests' type checks come first
    with pytest.raises(TypeError, match="takes a T5X model .*: got <class"):
        unchecked(nn.Dense, "custom_jvp")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("custom_jpv",), "must be one of .*: got 'custom_jpv'"),
        (("custom_jvp", 0), "at least 1: got 0"),
        (("custom_jvp", 2.5), "whole number .*: got 2.5"),
    ],
)
def test_settings_that_no_loss_has_are_refused(settings, message):
    from jaxtyping import TypeCheckError

    with pytest.raises((ValueError, TypeCheckError)) as raised:
        with_loss(subjects.stock("decoder_only"), *settings)
    if isinstance(raised.value, ValueError):
        raised.match(message)
