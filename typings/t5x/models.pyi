from collections.abc import Callable, Mapping
from typing import Any

import seqio

class DecoderParams:
    return_all_decodes: bool
    num_decodes: int

class BaseModel:
    FEATURE_CONVERTER_CLS: Callable[..., seqio.FeatureConverter]
    optimizer_def: Any
    def get_initial_variables(
        self, rng: Any, input_shapes: Mapping[str, Any], input_types: Any = None
    ) -> Any: ...
    def predict_batch_with_aux(
        self, params: Any, batch: Any, rng: Any = None
    ) -> Any: ...
    def score_batch(
        self, params: Any, batch: Any, return_intermediates: bool = False
    ) -> Any: ...
    def loss_fn(self, params: Any, batch: Any, dropout_rng: Any) -> Any: ...

class BaseTransformerModel(BaseModel):
    module: Any
    input_vocabulary: seqio.Vocabulary
    output_vocabulary: seqio.Vocabulary
    _label_smoothing: float
    _z_loss: float
    _loss_normalizing_factor: Any
    def _compute_logits(
        self, params: Any, batch: Any, dropout_rng: Any = None
    ) -> Any: ...

class EncoderDecoderModel(BaseTransformerModel):
    def __init__(
        self,
        module: Any,
        input_vocabulary: seqio.Vocabulary,
        output_vocabulary: seqio.Vocabulary,
        optimizer_def: Any,
        decode_fn: Any = ...,
        feature_converter_cls: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: Any = None,
        default_decoder_params: DecoderParams | None = None,
    ) -> None: ...
    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Any,
        rng: Any = None,
        decoder_params: Any = None,
        return_all_decodes: Any = None,
        num_decodes: Any = None,
        prompt_with_targets: bool = False,
    ) -> Any: ...

class DecoderOnlyModel(BaseTransformerModel):
    def __init__(
        self,
        module: Any,
        vocabulary: seqio.Vocabulary,
        optimizer_def: Any,
        decode_fn: Any = ...,
        inputs_bidirectional_attention: bool = False,
        feature_converter_cls: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: Any = None,
    ) -> None: ...
    def predict_batch_with_aux(
        self,
        params: Any,
        batch: Any,
        rng: Any = None,
        *,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        decoder_params: Any = None,
    ) -> Any: ...

def __getattr__(name: str) -> Any: ...
