r"""Any loss of any outputs, with its curvature by differentiation.

Everything is summed over the losses with their weights, without the normalizer. Where a
loss is not convex in the outputs, its Hessian there, and with it the Gauss-Newton matrix,
has negative eigenvalues.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.analysis.objective import batches as batches_lib
from t5x_fwdloss.analysis.objective import normalization
from t5x_fwdloss.analysis.objective.normalization import Normalizer

Batch = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class AnyLoss:
    """A weighted sum of losses of the outputs.

    Attributes:
        losses: `(outputs, batch)` to the losses, an array in the shape of the weights.
        weights: the feature of a batch that has the losses' weights; None: one loss per
            example, all of weight one.
    """

    losses: Callable[..., Any]
    weights: str | None = None

    def total(self, outputs: PyTree, batch: Batch) -> jax.Array:
        """The weighted sum of the losses of a batch.

        Raises:
            ValueError: the losses do not have the shape of their weights, such as one
                that is a mean over the batch already.
        """
        losses, weights = self.losses(outputs, batch), self._weights(batch)
        if jnp.shape(losses) != weights.shape:
            wanted = "one for each example of the batch"
            if self.weights is not None:
                wanted = f"in the shape of the weights {self.weights}"
            raise ValueError(
                f"The loss of Objective.from_loss must give losses {wanted}, "
                f"{weights.shape}, and no sum or mean of them: got an array of shape "
                f"{jnp.shape(losses)}."
            )
        # A loss of weight zero may be NaN, and NaN times zero would be NaN.
        return jnp.sum(jnp.where(weights == 0, 0, weights * losses))

    def hessian(self, outputs: PyTree, tangent: PyTree, batch: Batch) -> PyTree:
        """The product of the total's Hessian in the outputs, forward over reverse."""
        slope = jax.grad(lambda z: self.total(z, batch))
        return jax.jvp(slope, (outputs,), (tangent,))[1]

    def counted(self, batch: Batch) -> jax.Array:
        """Which losses count: those of nonzero weight."""
        return self._weights(batch) != 0

    def normalizer(self, batches: Sequence[Batch]) -> Normalizer:
        """The total weight of all batches.

        Raises:
            ValueError: a batch has no such weights, or their sum is not positive.
        """
        if self.weights is not None and self.weights not in batches[0]:
            raise ValueError(
                "weights must name a feature of the batches, "
                f"{', '.join(batches[0])}: got {self.weights!r}."
            )
        return normalization.of_weights(list(map(self._weights, batches)))

    def _weights(self, batch) -> jax.Array:
        if self.weights is None:
            return jnp.ones(batches_lib.num_examples(batch), jnp.float32)
        return jnp.asarray(batch[self.weights])
