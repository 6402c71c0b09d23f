"""The network with its loss, a model in T5X's sense, for the standalone host.

`LossMixin` has `loss_fn`, `loss_sum` and `score_batch`, the same code as in the T5X
models; this class adds the three things it needs: logits, settings and metrics.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from clu import metrics as clu_metrics

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.loss_mixin import LossMixin

Batch = Mapping[str, Any]  # of arrays


class StandaloneModel(LossMixin):
    """An encoder-decoder network and the settings of its loss."""

    def __init__(
        self,
        module: nn.Module,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: Any = None,
        loss_impl: str = "custom_vjp",
        loss_chunk_length: int | None = None,
    ):
        """The settings are those of T5X's models, and the choice of loss.

        Args:
            module: called like `network.Transformer`.
            label_smoothing: share of the target spread over the other classes, [0, 1).
            z_loss: coefficient of the squared log partition function.
            loss_normalizing_factor: divisor of the summed loss: a number, None, or the
                name of one of T5X's special factors.
            loss_impl: a name in `losses.IMPLEMENTATIONS`.
            loss_chunk_length: target positions per chunk of the head and the loss;
                None computes all logits at once.
        """
        self.module = module
        self._label_smoothing = label_smoothing
        self._z_loss = z_loss
        self._loss_normalizing_factor = loss_normalizing_factor
        self._set_loss(loss_impl, loss_chunk_length)

    @property
    def vocab_size(self) -> int:
        """The number of classes of the network.

        Raises:
            ValueError: the network has no configuration with a vocabulary size.
        """
        name = type(self.module).__name__
        config = getattr(self.module, "config", None)
        size = getattr(config, "vocab_size", None)
        if isinstance(self.module, type) or not isinstance(size, int):
            raise ValueError(
                f"StandaloneModel.module must be a network whose config has a whole "
                f"vocab_size, such as network.T5Config(): got "
                f"{settings.shown(self.module) if config is None else name} with "
                f"config = {settings.shown(config)}."
            )
        return size

    def get_initial_params(self, key: jax.Array, batch: Batch) -> Any:
        """Parameters drawn from T5's initial distributions, for batches like this."""
        inputs, options = _arguments(batch)
        return self.module.init(key, *inputs, **options, enable_dropout=False)["params"]

    def _compute_logits(
        self,
        params: Any,
        batch: Batch,
        dropout_rng: jax.Array | None = None,
        mutable: Any = False,
        other_variables: Mapping[str, Any] | None = None,
    ):
        inputs, options = _arguments(batch)
        return self.module.apply(
            {"params": params, **(other_variables or {})},
            *inputs,
            **options,
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {"dropout": dropout_rng},
            mutable=mutable,
        )

    def _compute_metrics(
        self,
        logits: Any,  # or the substitute for logits that were never in memory
        targets: Any,
        mask: Any,
        loss: Any,
        z_loss: Any = None,
        segment_ids: Mapping[str, Any] | None = None,
    ) -> dict[str, clu_metrics.Metric]:
        """T5X's metrics of one batch, by T5X's names, without its clocks."""
        accuracy = clu_metrics.Accuracy.from_model_output(
            logits=logits, labels=targets.astype(jnp.int32), mask=mask
        )
        num_weighted = targets.size if mask is None else jnp.sum(mask)
        metrics = {
            "accuracy": accuracy,
            "loss": _average(loss, 1),
            "loss_per_nonpadding_target_token": _average(loss, num_weighted),
            "loss_per_all_target_tokens": _average(loss, targets.size),
            "non_padding_fraction/loss_weights": _average(num_weighted, targets.size),
        }
        if z_loss is not None:
            metrics["z_loss"] = _average(z_loss, 1)
            metrics["cross_ent_loss"] = _average(loss - z_loss, 1)
        for name, ids in (segment_ids or {}).items():
            fraction = _average(jnp.sum(ids != 0), ids.size)
            metrics[f"non_padding_fraction/{name}"] = fraction
        return metrics


def _arguments(batch: Batch) -> tuple[list[Any], dict[str, Any]]:
    names = "encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens"
    packed = ("segment_ids", "positions")
    options = {f"{side}_{kind}" for side in ("encoder", "decoder") for kind in packed}
    return [batch[k] for k in names], {k: v for k, v in batch.items() if k in options}


def _average(total, count) -> clu_metrics.Average:
    # Made by flax's dataclass decorator, which type checkers do not follow.
    make: Any = clu_metrics.Average
    return make(total=jnp.asarray(total), count=jnp.asarray(count))
