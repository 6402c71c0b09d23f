r"""The loss as a function of the logits, for the objective's curvature.

Everything is summed over tokens with their weights $w$, without the normalizer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_fwdloss import losses

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    r"""The loss $\ell(z)$ of a token's logits.

    Attributes:
        settings: settings of the loss; its implementation is not used.
    """

    settings: losses.LossSettings

    def hessian(self, logits: jax.Array, tangent: jax.Array, batch: Batch) -> jax.Array:
        r"""The product $w \nabla^2 \ell\, u$ in closed form, with smoothing and z-loss."""
        product = losses.logit_hessian_product(
            logits,
            batch["decoder_target_tokens"],
            tangent,
            label_smoothing=self.settings.label_smoothing,
            z_loss=self.settings.z_loss,
        )
        return self._weighted(product, logits, batch)

    def fisher(self, logits: jax.Array, tangent: jax.Array, batch: Batch) -> jax.Array:
        r"""The product $w (\mathrm{diag}\, p - p p^T) u$: labels drawn from the model."""
        # Zero is a label in any vocabulary; without smoothing it does not matter which.
        labels = jnp.zeros(logits.shape[:-1], jnp.int32)
        product = losses.logit_hessian_product(logits, labels, tangent)
        return self._weighted(product, logits, batch)

    def least_scale(self, logits: jax.Array, batch: Batch) -> jax.Array:
        r"""The least $s = \sum_j t_j + 2 c \log Z$ of the tokens that count.

        If it is not negative, the loss is convex in the logits. The target row's sum is
        taken to be one for labels inside the vocabulary.
        """
        log_z = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
        labels = batch["decoder_target_tokens"]
        is_class = (labels >= 0) & (labels < logits.shape[-1])
        counted = self._weights(logits, batch)[..., 0] > 0
        scale = jnp.where(counted, is_class + 2 * self.settings.z_loss * log_z, jnp.inf)
        return jnp.min(scale)

    def gradient(self, logits: jax.Array, batch: Batch) -> jax.Array:
        r"""The gradients $\sqrt w\, \nabla \ell$ at the labels of the data."""

        def total(z):
            loss, _ = losses.token_cross_entropy(
                z,
                batch["decoder_target_tokens"],
                label_smoothing=self.settings.label_smoothing,
                z_loss=self.settings.z_loss,
            )
            return jnp.sum(loss)

        return self._weighted(jax.grad(total)(logits), logits, batch, root=True)

    def sampled_gradient(
        self, keys: jax.Array, logits: jax.Array, batch: Batch
    ) -> jax.Array:
        r"""The gradients $\sqrt w (p - e_y)$ at labels $y$ drawn from the model.

        Args:
            keys: one key per example, `[batch]`.
            logits: `[batch, ..., vocab]`.
            batch: the batch, for its weights.
        """
        labels = jax.vmap(jax.random.categorical)(keys, logits)
        total = lambda z: jnp.sum(losses.token_cross_entropy(z, labels)[0])
        return self._weighted(jax.grad(total)(logits), logits, batch, root=True)

    def _weighted(self, rows, logits, batch, *, root=False) -> jax.Array:
        weights = self._weights(logits, batch)
        factors = jnp.sqrt(weights) if root else weights
        # A token of weight zero may hold NaN, and NaN times zero would be NaN.
        return jnp.where(weights == 0, jnp.zeros_like(rows), rows * factors)

    def _weights(self, logits: jax.Array, batch: Batch) -> jax.Array:
        _, weights = losses.get_loss_normalizing_factor_and_weights(
            self.settings.loss_normalizing_factor, batch
        )
        if weights is None:
            return jnp.ones((*logits.shape[:-1], 1), logits.dtype)
        return jnp.asarray(weights)[..., None]
