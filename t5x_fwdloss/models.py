"""T5X's models with the loss exchanged: two classes, and `with_loss` for any other.

The classes take T5X's constructor arguments plus `loss_impl` and `loss_chunk_length`.
`with_loss` takes a model that a user's own gin files built and returns it with its loss
exchanged and everything else kept. Parameter trees are T5X's, so checkpoints serve both.
"""

import functools
import inspect
from collections.abc import Mapping, MutableMapping
from typing import Any

import flax.linen as nn
import jax
import seqio

from t5x_fwdloss.loss_mixin import LossMixin

TESTED = (
    "T5X cc342d4, AirIO 69897df, JEstimator 326824a, on jax 0.10.2, flax 0.12.8, "
    "orbax-checkpoint 0.12.8, seqio 0.0.20"
)

try:
    from t5x import decoding
    from t5x import models as t5x_models
except ImportError as error:
    raise ImportError(
        f"t5x_fwdloss.models and t5x_fwdloss.analyze need T5X, which is on no package "
        f"index and cannot be imported here ({error}); tested: {TESTED}; how: see "
        f"'Installing T5X beside it' in the README."
    ) from error

# A number, None, one of T5X's three names, or T5X's enum (which gin cannot name).
NormalizingFactor = Any


class FwdLossEncoderDecoderModel(LossMixin, t5x_models.EncoderDecoderModel):
    """T5X's encoder-decoder model whose loss is one of `losses.IMPLEMENTATIONS`."""

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: seqio.Vocabulary,
        output_vocabulary: seqio.Vocabulary,
        optimizer_def: Any,
        decode_fn: Any = decoding.beam_search,
        feature_converter_cls: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: NormalizingFactor = None,
        default_decoder_params: t5x_models.DecoderParams | None = None,
        loss_impl: str = "custom_vjp",
        loss_chunk_length: int | None = None,
    ):
        """T5X's settings, and the choice of loss.

        Args:
            module: T5X's network, a Flax module with `encode` and `decode`.
            input_vocabulary: SeqIO vocabulary of the inputs.
            output_vocabulary: SeqIO vocabulary of the targets.
            optimizer_def: T5X's optimizer definition.
            decode_fn: T5X's decode function, for predictions.
            feature_converter_cls: replaces SeqIO's `EncDecFeatureConverter`.
            label_smoothing: share of the target spread over the other classes, [0, 1).
            z_loss: coefficient of the squared log partition function.
            loss_normalizing_factor: divisor of the summed loss.
            default_decoder_params: T5X's defaults of `predict_batch_with_aux`.
            loss_impl: a name in `losses.IMPLEMENTATIONS`.
            loss_chunk_length: target positions per chunk of the head and the loss;
                None computes all logits at once.
        """
        super().__init__(
            module=module,
            input_vocabulary=input_vocabulary,
            output_vocabulary=output_vocabulary,
            optimizer_def=optimizer_def,
            decode_fn=decode_fn,
            feature_converter_cls=feature_converter_cls,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            loss_normalizing_factor=loss_normalizing_factor,
            default_decoder_params=default_decoder_params,
        )
        self._set_loss(loss_impl, loss_chunk_length)

    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Mapping[str, Any],
        rng: jax.Array | None = None,
        decoder_params: MutableMapping[str, Any] | None = None,
        return_all_decodes: Any = None,  # a bool; None: from the default parameters
        num_decodes: Any = None,
        prompt_with_targets: bool = False,
    ):
        """T5X's predictions; defined here so that gin can bind its arguments."""
        return super().predict_batch_with_aux(
            params,
            batch,
            rng,
            decoder_params=decoder_params,
            return_all_decodes=return_all_decodes,
            num_decodes=num_decodes,
            prompt_with_targets=prompt_with_targets,
        )

    def score_batch(
        self,
        params: Any,
        batch: Mapping[str, Any],
        return_intermediates: bool = False,
    ) -> Any:
        """`LossMixin.score_batch`; defined here so that gin can bind its arguments."""
        return super().score_batch(params, batch, return_intermediates)


class FwdLossDecoderOnlyModel(LossMixin, t5x_models.DecoderOnlyModel):
    """T5X's decoder-only model whose loss is one of `losses.IMPLEMENTATIONS`."""

    def __init__(
        self,
        module: nn.Module,
        vocabulary: seqio.Vocabulary,
        optimizer_def: Any,
        decode_fn: Any = decoding.temperature_sample,
        inputs_bidirectional_attention: bool = False,
        feature_converter_cls: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: NormalizingFactor = None,
        loss_impl: str = "custom_vjp",
        loss_chunk_length: int | None = None,
    ):
        """T5X's settings, and the choice of loss.

        Args:
            module: T5X's decoder-only network.
            vocabulary: SeqIO vocabulary of inputs and targets.
            optimizer_def: T5X's optimizer definition.
            decode_fn: T5X's decode function, for predictions.
            inputs_bidirectional_attention: True for a prefix language model.
            feature_converter_cls: replaces SeqIO's `DecoderFeatureConverter`.
            label_smoothing: share of the target spread over the other classes, [0, 1).
            z_loss: coefficient of the squared log partition function.
            loss_normalizing_factor: divisor of the summed loss.
            loss_impl: a name in `losses.IMPLEMENTATIONS`.
            loss_chunk_length: target positions per chunk of the head and the loss;
                None computes all logits at once.
        """
        super().__init__(
            module=module,
            vocabulary=vocabulary,
            optimizer_def=optimizer_def,
            decode_fn=decode_fn,
            inputs_bidirectional_attention=inputs_bidirectional_attention,
            feature_converter_cls=feature_converter_cls,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            loss_normalizing_factor=loss_normalizing_factor,
        )
        self._set_loss(loss_impl, loss_chunk_length)

    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Mapping[str, Any],
        rng: jax.Array | None = None,
        *,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        decoder_params: MutableMapping[str, Any] | None = None,
    ):
        """T5X's predictions; defined here so that gin can bind its arguments."""
        return super().predict_batch_with_aux(
            params,
            batch,
            rng,
            return_all_decodes=return_all_decodes,
            num_decodes=num_decodes,
            decoder_params=decoder_params,
        )

    def score_batch(
        self,
        params: Any,
        batch: Mapping[str, Any],
        return_intermediates: bool = False,
    ) -> Any:
        """`LossMixin.score_batch`; defined here so that gin can bind its arguments."""
        return super().score_batch(params, batch, return_intermediates)


def with_loss(
    model: t5x_models.BaseTransformerModel,
    loss_impl: str = "custom_vjp",
    loss_chunk_length: int | None = None,
) -> t5x_models.BaseTransformerModel:
    """The model with its loss exchanged, and every other setting and binding kept.

    The argument is not changed. Its z-loss, label smoothing, normalizing factor, decode
    function, vocabularies, optimizer and method bindings are kept in the result. A
    model that already has its loss from this package gets the new choice.

    Args:
        model: a T5X encoder-decoder or decoder-only model, or one of a subclass that
            inherits T5X's `loss_fn` and `score_batch`.
        loss_impl: a name in `losses.IMPLEMENTATIONS`.
        loss_chunk_length: target positions per chunk of the head and the loss; None
            computes all logits at once.

    Raises:
        TypeError: if the argument is not a T5X transformer model, or has a loss or
            scores of its own, which exchanging T5X's would drop.
    """
    if not isinstance(model, t5x_models.BaseTransformerModel):
        raise TypeError(
            f"with_loss takes a T5X model (a BaseTransformerModel): got {model!r}."
        )
    for name in _EXCHANGED:
        if name in vars(model):
            where = f"the attribute {name} of the instance"
            raise TypeError(_dropping(type(model), name, where))
    cls = _class_with_loss(type(model))
    # A new object of a new class: assigning __class__ fails, because gin's subclasses
    # have another layout; calling the constructor would need the user's bindings.
    exchanged = object.__new__(cls)
    exchanged.__dict__.update(model.__dict__)
    exchanged._set_loss(loss_impl, loss_chunk_length)
    return exchanged


# The methods of T5X's models that `LossMixin` overrides.
_EXCHANGED = ("loss_fn", "score_batch")


@functools.cache
def _class_with_loss(cls: type) -> type:
    if issubclass(cls, LossMixin):
        return cls
    stock = (t5x_models.EncoderDecoderModel, t5x_models.DecoderOnlyModel)
    for name in _EXCHANGED:
        method = getattr(cls, name)
        originals = [getattr(base, name) for base in stock]
        if inspect.unwrap(method) not in originals:
            raise TypeError(_dropping(cls, name, _where(method)))
        if method not in originals:  # gin wraps a method whose arguments are bound
            raise TypeError(
                f"with_loss would lose the gin bindings of {cls.__name__}.{name}: use "
                f"FwdLossEncoderDecoderModel or FwdLossDecoderOnlyModel as MODEL and "
                f"bind {name} there."
            )
    return type(f"{cls.__name__}WithLoss", (LossMixin, cls), {"__doc__": cls.__doc__})


def _dropping(cls: type, name: str, where: str) -> str:
    is_decoder_only = issubclass(cls, t5x_models.DecoderOnlyModel)
    base = FwdLossDecoderOnlyModel if is_decoder_only else FwdLossEncoderDecoderModel
    return (
        f"with_loss exchanges T5X's own loss, and must not drop another: "
        f"{cls.__name__} has its own {name} ({where}). To train with it, derive "
        f"{cls.__name__} from t5x_fwdloss.models.{base.__name__}, let its {name} start "
        f"from super().{name}, and bind loss_impl there."
    )


def _where(method) -> str:
    function = inspect.unwrap(method)
    return f"{function.__module__}.{function.__qualname__}"
