"""The one override of `loss_fn` and `score_batch`, for T5X's models and our own.

`LossMixin` needs from the other base class: `_compute_logits`, `_compute_metrics`, and
T5X's settings `_label_smoothing`, `_z_loss`, `_loss_normalizing_factor`. Its own state
is the choice of loss, `_loss_impl` and `_loss_chunk_length`.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_fwdloss import losses
from t5x_fwdloss.argmax_logits import PredictedClasses, refusing_arrays
from t5x_fwdloss.head_capture import capture_head

Batch = Mapping[str, Any]


class LossMixin:
    """T5X's training loss, evaluation loss and scores, with the loss exchanged.

    The value is T5X's: the weighted cross entropy with label smoothing and z-loss,
    divided by the loss normalizing factor; `loss_impl` chooses which derivatives it
    has (see `t5x_fwdloss.losses.IMPLEMENTATIONS`). With a `loss_chunk_length` the head
    and the loss are computed together, that many target positions at a time, and the
    logits of a whole batch are never in memory.
    """

    # Defaults of the class: a replaced constructor, as in mocks, sets no loss.
    _loss_impl: str = "custom_vjp"
    _loss_chunk_length: int | None = None
    _label_smoothing: float
    _z_loss: float
    _loss_normalizing_factor: Any
    _compute_logits: Callable[..., Any]
    _compute_metrics: Callable[..., Any]

    @property
    def loss_settings(self) -> losses.LossSettings:
        """All settings of the loss, T5X's and the choice of implementation.

        Raises:
            ValueError: the model lacks one of T5X's settings, which is never taken as
                zero, or one has an invalid value.
        """
        names = ("_label_smoothing", "_z_loss", "_loss_normalizing_factor")
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            raise ValueError(
                f"The model must have the settings of its loss, {', '.join(names)}: "
                f"{type(self).__name__} lacks {', '.join(missing)}."
            )
        return losses.LossSettings(
            self._loss_impl,
            self._loss_chunk_length,
            self._label_smoothing,
            self._z_loss,
            self._loss_normalizing_factor,
        )

    def with_loss(self, loss_impl: str, loss_chunk_length: int | None = None) -> Any:
        """A copy of the model with another choice of loss.

        Args:
            loss_impl: a name in `losses.IMPLEMENTATIONS`.
            loss_chunk_length: target positions per chunk of the head and the loss; None
                computes all logits at once.

        Settings that `LossSettings` rejects raise ValueError.
        """
        other = copy.copy(self)
        other._set_loss(loss_impl, loss_chunk_length)
        return other

    def _set_loss(self, loss_impl, loss_chunk_length):
        self._loss_impl = loss_impl
        self._loss_chunk_length = loss_chunk_length
        _ = self.loss_settings  # which checks them all

    def loss_fn(self, params, batch: Batch, dropout_rng: jax.Array | None):
        """The loss and T5X's metrics of one batch.

        Args:
            params: parameter tree of the network.
            batch: model features, `[batch, length]` each.
            dropout_rng: key of the dropout masks; None turns dropout off.

        Returns:
            `(loss, metrics)`, as `t5x.models.BaseTransformerModel.loss_fn`.
        """
        factor, weights = losses.get_loss_normalizing_factor_and_weights(
            self._loss_normalizing_factor, batch
        )
        loss, z_loss, logits = self._weighted_loss(
            params, batch, dropout_rng, weights, factor
        )
        with refusing_arrays():
            metrics = self._compute_metrics(
                logits=logits,
                targets=batch["decoder_target_tokens"],
                mask=weights,
                loss=loss,
                z_loss=z_loss,
                segment_ids=segment_ids_for_metrics(batch),
            )
        return loss, metrics

    def loss_sum(self, params, batch: Batch, dropout_rng: jax.Array | None = None):
        r"""The loss of one batch before normalization, and its normalizer.

        The loss of many batches is $\sum_b n_b / W$ with $n_b$ the numerator returned
        here: $W = \sum_b m_b$ for the special factors (real tokens, all tokens, per
        sequence), $W = m_b$ for a constant factor, and $W = 1$ for none.

        Returns:
            `(numerator, normalizer)`: the weighted sum of token losses, smoothing and
            z-loss included; and the batch's factor, 1 where none is set.
        """
        factor, weights = losses.get_loss_normalizing_factor_and_weights(
            self._loss_normalizing_factor, batch
        )
        numerator, _, _ = self._weighted_loss(params, batch, dropout_rng, weights, None)
        return numerator, jnp.asarray(1.0 if factor is None else factor, jnp.float32)

    def loss_and_predictions(
        self, params, batch: Batch, dropout_rng: jax.Array | None = None
    ):
        """The numerator of `loss_sum`, and the class of each token's largest logit.

        Returns:
            `(numerator, classes)`, a scalar and `[batch, length]`; a chunked loss keeps
            the classes alone, never the logits.
        """
        _, weights = losses.get_loss_normalizing_factor_and_weights(
            self._loss_normalizing_factor, batch
        )
        numerator, _, logits = self._weighted_loss(
            params, batch, dropout_rng, weights, None
        )
        return numerator, logits.argmax(axis=-1)

    def score_batch(self, params, batch: Batch, return_intermediates: bool = False):
        """Log likelihood of each target sequence, without z-loss or smoothing.

        Returns:
            `[batch]` scores, the weighted sum of the tokens' log probabilities; with
            `return_intermediates` also the network's sown values, as T5X returns them.
        """
        if not return_intermediates:
            return -self._token_cross_entropy(params, batch).sum(-1)
        # A caller that asks for the network's intermediate values gets its logits too.
        logits, variables = self._compute_logits(
            params=params, batch=batch, mutable=["intermediates"]
        )
        targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
        token_scores = -losses.weighted_token_cross_entropy(
            logits, targets, weights, impl=self._loss_impl
        )
        intermediates = _unfreeze(variables.get("intermediates", {}))
        # Singleton tuples, because sown values are tuples of all their occurrences.
        intermediates.setdefault("decoder", {}).update(
            target_tokens=(targets,),
            loss_weights=(weights,),
            token_scores=(token_scores,),
        )
        return token_scores.sum(-1), intermediates

    def _weighted_loss(self, params, batch, dropout_rng, weights, factor):
        """Loss, z-loss, and the logits or their substitute for the metrics."""
        targets, chosen = batch["decoder_target_tokens"], self.loss_settings
        settings = {
            "weights": weights,
            "label_smoothing": chosen.label_smoothing,
            "z_loss": chosen.z_loss,
            "loss_normalizing_factor": factor,
            "impl": chosen.impl,
        }
        if chosen.chunk_length is None:
            logits = self._compute_logits(params, batch, dropout_rng)
            loss, z_loss, _ = losses.compute_weighted_cross_entropy(
                logits, targets, **settings
            )
            return loss, z_loss, logits
        head = capture_head(lambda: self._compute_logits(params, batch, dropout_rng))
        chunked = losses.chunked_weighted_cross_entropy(
            head.hidden,
            head.kernel,
            targets,
            **settings,
            chunk_length=chosen.chunk_length,
            tied=head.tied,
            scale=head.scale,
        )
        classes = PredictedClasses(chunked.predictions, head.vocab_size)
        return chunked.loss, chunked.z_loss, classes

    def _token_cross_entropy(self, params, batch):
        """Weighted cross entropy of each token, without z-loss or smoothing."""
        targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
        if self._loss_chunk_length is None:
            logits = self._compute_logits(params=params, batch=batch)
            return losses.weighted_token_cross_entropy(
                logits, targets, weights, impl=self._loss_impl
            )
        head = capture_head(lambda: self._compute_logits(params=params, batch=batch))
        return losses.chunked_weighted_token_cross_entropy(
            head.hidden,
            head.kernel,
            targets,
            weights,
            chunk_length=self._loss_chunk_length,
            impl=self._loss_impl,
            tied=head.tied,
            scale=head.scale,
        )


def check_no_other_loss(model: Any) -> None:
    """Pass if `loss_sum` is the whole of the model's loss.

    An analysis measures `LossMixin.loss_sum`. A subclass that extends its `loss_fn`,
    another base class with its own `loss_fn`, and an instance with a `loss_fn` would
    train one loss and measure another.

    Raises:
        ValueError: it names the method that would be left out, and the remedy.
    """
    if not isinstance(model, LossMixin):
        return
    for name in ("loss_fn", "loss_sum", "_weighted_loss"):
        where = _other_definition(model, name)
        if where:
            raise ValueError(
                f"An analysis measures the cross entropy of {LossMixin.__name__}, and "
                f"must not drop another loss: {type(model).__name__} has its own {name} "
                f"({where}). To measure the cross entropy alone, use as MODEL the class "
                "without it; to measure its own loss, build analysis.Objective in "
                "Python from a function of the parameters and a batch."
            )


def _other_definition(model, name) -> str:
    """Where a method is defined besides the mixin and T5X's models; '' for nowhere."""
    ours = inspect.unwrap(vars(LossMixin)[name])
    if name in vars(model):
        return f"the attribute {name} of the instance"
    for cls in type(model).__mro__:
        # gin wraps methods whose arguments are bound.
        function = inspect.unwrap(vars(cls).get(name, ours))
        if function is not ours and function.__module__ != "t5x.models":
            return f"{function.__module__}.{function.__qualname__}"
    return ""


def segment_ids_for_metrics(batch: Batch) -> dict[str, Any]:
    """Segment ids by feature: those of a packed batch, or the padding masks."""
    suffix = "_segment_ids"
    packed = {k.removesuffix(suffix): v for k, v in batch.items() if k.endswith(suffix)}
    if packed:
        return packed
    names = ("encoder_input_tokens", "decoder_target_tokens")
    return {k: v != 0 for k, v in batch.items() if k in names}


def _unfreeze(tree):
    if isinstance(tree, Mapping):
        return {k: _unfreeze(v) for k, v in tree.items()}
    return tree
