r"""The gradient noise scale while training, from the pieces of a step's batch.

A batch of $B$ sequences is cut into $n$ pieces of $b = B / n$. With $g_i$ the gradient of
a piece's part of the loss, $G = \sum_i g_i$ and $\Sigma$ the covariance of the gradient
of one sequence,

$$ \operatorname{tr} \widehat \Sigma =
     \frac{b\, n^2}{n - 1} \Big(\sum_i |g_i|^2 - \frac{|G|^2}{n}\Big), \qquad
   \widehat{|G|^2} = |G|^2 - \frac{\operatorname{tr} \widehat \Sigma}{B}, $$

which are the estimates of McCandlish et al. from the batch sizes $b$ and $B$. One step's
are noisy, so each has a running average over the probes, and the noise scale
$B_\text{simple} = \operatorname{tr} \Sigma / |G|^2$ is the ratio of the averages, never an
average of ratios.

References:
  McCandlish, Kaplan, Amodei et al. 2018, arXiv 1812.06162, appendix A.1.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_fwdloss import curvature
from t5x_fwdloss.analysis.objective import batches
from t5x_fwdloss.curvature.vectors import trees
from t5x_fwdloss.training.quantity import Compile, ProbedStep

# The share of the earlier probes in a running average.
KEPT = 0.9


class NoiseScale:
    """The gradient noise scale, in sequences and in tokens that the loss counts."""

    def __init__(self, loss_of_piece: Callable[..., Any], num_pieces: int):
        """No average yet.

        Args:
            loss_of_piece: `(params, batch, key, number, num_pieces)` to the part of the
                training loss that a piece of the batch has; the pieces' parts add up to
                the loss.
            num_pieces: at least 2.
        """
        self._loss, self._pieces = loss_of_piece, num_pieces
        self._norms: Any = None
        # Both begin at 0, a bias that their ratio does not have.
        self._variance, self._square = 0.0, 0.0

    def prepare(self, compiled: Compile) -> None:
        """Compiles the gradients of the pieces, one after another."""
        self._norms = compiled(self._squared_norms, "params", "batch", "key")

    def _squared_norms(self, params, batch, key):
        of_piece = lambda p, *x: self._loss(p, *x, self._pieces)
        gradient = curvature.gradient(of_piece)

        def add(number, found):
            total, squares = found
            g = gradient(params, batch, key, number)
            return trees.add(total, g), squares + trees.inner(g, g)

        zero = jax.tree.map(jnp.zeros_like, trees.as_vector(params))
        start = (zero, jnp.zeros_like(trees.inner(zero, zero)))
        total, squares = jax.lax.fori_loop(0, self._pieces, add, start)
        mask = batches.counted(batch)
        return squares, trees.inner(total, total), mask.sum(), mask.any(axis=-1).sum()

    def measure(self, step: ProbedStep) -> dict[str, float]:
        """This step's estimates, and the noise scale of the running averages.

        `gradient_variance` is tr Σ for one sequence, `squared_gradient` |G|² without its
        bias. The scale is left out while the average of the latter is not positive.
        """
        found = jax.device_get(self._norms(step.old, step.batch, step.key))
        squares, square, tokens, sequences = map(float, found)
        variance, unbiased = estimates(squares, square, self._pieces, sequences)
        numbers = {"gradient_variance": variance, "squared_gradient": unbiased}
        if not math.isfinite(variance + unbiased):
            return numbers
        self._variance = KEPT * self._variance + (1 - KEPT) * variance
        self._square = KEPT * self._square + (1 - KEPT) * unbiased
        if self._square > 0:
            scale = self._variance / self._square
            numbers["noise_scale_in_sequences"] = scale
            numbers["noise_scale_in_tokens"] = scale * tokens / sequences
        return numbers


def estimates(
    squares: float, square: float, num_pieces: int, sequences: float
) -> tuple[float, float]:
    r"""$\operatorname{tr} \Sigma$ of one sequence and $|G|^2$, without bias.

    Args:
        squares: $\sum_i |g_i|^2$.
        square: $|\sum_i g_i|^2$.
        num_pieces: $n$.
        sequences: $B$.
    """
    spread = num_pieces / (num_pieces - 1) * (squares - square / num_pieces)
    # The variance of G; of the sum of B sequences' parts it is tr Sigma / B.
    return sequences * spread, square - spread
