r"""The loss along one update of the parameters: slope, curvature and what follows from them.

The update of a step is $D = \theta_{new} - \theta_{old}$, whatever optimizer made it, so
that $m D$ is the step with its learning rate $\eta$ multiplied by $m$. At the old
parameters, with gradient $g$ and Hessian $H$ of the step's loss $L$,

$$L(\theta_{old} + m D) = L + m s + \tfrac{m^2}{2} c + O(m^3), \quad
s = \langle g, D \rangle, \quad c = \langle D, H D \rangle.$$

If $s < 0 < c$, this quadratic model gains until $m = -s / c$ and is back at $L$ at
$m = -2 s / c$. The *directional sharpness* is 2 over the learning rate at which it is
back, $\lambda_{dir} = -c / (\eta s)$; for gradient descent it is $g^T H g / g^T g$. The
*critical sharpness* is the same for the loss itself, of which `line_search` finds the
multiple $m_c$ at which it is back: $\lambda_c = 2 / (\eta m_c)$.

References:
  Kalra et al. 2026, arXiv 2601.16979: critical sharpness.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.vectors import trees
from t5x_fwdloss.training.line_search import line_search
from t5x_fwdloss.training.quantity import Compile, ProbedStep

Loss = Callable[..., Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AlongUpdate:
    """What was measured on the device around one step.

    Attributes:
        loss: the loss of the step's batch at the old parameters.
        slope: $s$.
        curvature: $c$.
        loss_after: the loss of the same batch at the new parameters.
        critical_multiple: $m_c$; NaN if the search did not find it.
        forward_passes: passes of the search, those of the two losses included.
    """

    loss: Any
    slope: Any
    curvature: Any
    loss_after: Any
    critical_multiple: Any
    forward_passes: Any


def along_update(loss: Loss) -> Callable[..., AlongUpdate]:
    """The function `(old, new, *args) -> AlongUpdate`, to be compiled by the caller.

    It takes no reverse pass: one jvp through a jvp, and the forward passes of the search.

    Args:
        loss: `(params, *args)` to the training loss; it needs forward mode.
    """
    derivatives = curvature.second_directional_derivative(loss)

    def measure(old: PyTree, new: PyTree, *args):
        update = curvature.difference(new, old)
        _, slope, second = derivatives(old, update, *args)
        floats = trees.float_part(old)
        at = lambda m: loss(trees.merge(trees.axpy(m, update, floats), old), *args)
        found = line_search(at, -2 * slope / second, slope < 0)
        return AlongUpdate(
            found.loss,
            slope,
            second,
            found.loss_after,
            found.multiple,
            found.passes,
        )

    return measure


class Along:
    """A probe's numbers along the update: of the step's own batch, or of another one."""

    def __init__(self, loss: Loss, other: tuple[str, Any, Any] | None = None):
        """Nothing is compiled yet.

        Args:
            loss: `(params, batch, key)` to the training loss; it needs forward mode.
            other: the prefix of the names, a batch and its key, to be measured in place
                of the step's own.
        """
        self._loss, self._other = loss, other
        self._measure: Any = None

    def prepare(self, compiled: Compile) -> None:
        """Compiles the measurement."""
        measure, kinds = along_update(self._loss), ("batch", "key")
        if self._other is not None:
            _, batch, key = self._other
            measure = lambda old, new, batch: along_update(self._loss)(
                old, new, batch, key
            )
            kinds = (batch,)
        self._measure = compiled(measure, "params", "params", *kinds)

    def measure(self, step: ProbedStep) -> dict[str, float]:
        """The numbers of `scalars`."""
        prefix, given = "", (step.batch, step.key)
        if self._other is not None:
            prefix, *given = self._other[:2]
        found = jax.device_get(self._measure(step.old, step.new, *given))
        numbers = scalars(found, step.learning_rate)
        return {f"{prefix}{name}": x for name, x in numbers.items()}


def scalars(found: AlongUpdate, learning_rate: float | None) -> dict[str, float]:
    """The numbers of a probe by name, those alone that are defined.

    Args:
        found: what was measured.
        learning_rate: the step's learning rate; None if the host does not know it.

    Returns:
        The losses, slope and curvature in any case. The multiples are left out where the
        quadratic model has no minimum ahead, the sharpness where the slope is zero or
        there is no learning rate, the critical numbers where the search found no
        crossing.
    """
    slope, second = float(found.slope), float(found.curvature)
    numbers = {
        "loss": float(found.loss),
        "slope": slope,
        "curvature": second,
        "predicted_change": slope + second / 2,
        "actual_change": float(found.loss_after) - float(found.loss),
        "forward_passes": float(found.forward_passes),
    }
    defined = {"critical_multiple": float(found.critical_multiple)}
    if slope < 0 < second:
        defined["multiple_of_least_loss"] = -slope / second
        defined["multiple_of_return"] = -2 * slope / second
    if slope and learning_rate:
        defined["directional_sharpness"] = -second / (learning_rate * slope)
        defined["critical_sharpness"] = 2 / (
            learning_rate * defined["critical_multiple"]
        )
    return numbers | {name: x for name, x in defined.items() if math.isfinite(x)}


def copied(*trees: PyTree) -> tuple[PyTree, ...]:
    """Copies of the arrays, in memory of their own; to be compiled."""
    return jax.tree.map(jnp.copy, trees)
