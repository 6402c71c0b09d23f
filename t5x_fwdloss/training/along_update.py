r"""The loss along one update of the parameters: slope, curvature and what follows from them.

The update of a step is $D = \theta_{new} - \theta_{old}$, whatever optimizer made it, so
that $m D$ is the step with its learning rate $\eta$ multiplied by $m$. At the old
parameters, with gradient $g$ and Hessian $H$ of the step's loss $L$,

$$L(\theta_{old} + m D) = L + m s + \tfrac{m^2}{2} c + O(m^3), \quad
s = \langle g, D \rangle, \quad c = \langle D, H D \rangle.$$

If $s < 0 < c$, this quadratic model gains until $m = -s / c$ and is back at $L$ at
$m = -2 s / c$. The *directional sharpness* is 2 over the learning rate at which it is
back, $\lambda_{dir} = -c / (\eta s)$; for gradient descent it is $g^T H g / g^T g$.

References:
  Kalra et al. 2026, arXiv 2601.16979: critical sharpness, found by forward passes only.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from t5x_fwdloss import curvature

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
    """

    loss: Any
    slope: Any
    curvature: Any
    loss_after: Any


def along_update(loss: Loss) -> Callable[..., AlongUpdate]:
    """The function `(old, new, *args) -> AlongUpdate`, to be compiled by the caller.

    It takes no reverse pass: one jvp through a jvp, and one more forward pass.

    Args:
        loss: `(params, *args)` to the training loss; it needs forward mode.
    """
    derivatives = curvature.second_directional_derivative(loss)

    def measure(old: PyTree, new: PyTree, *args):
        update = curvature.difference(new, old)
        value, slope, second = derivatives(old, update, *args)
        return AlongUpdate(value, slope, second, loss(new, *args))

    return measure


def scalars(found: AlongUpdate, learning_rate: float | None) -> dict[str, float]:
    """The numbers of a probe by name, those alone that are defined.

    Args:
        found: finite numbers.
        learning_rate: the step's learning rate; None if the host does not know it.

    Returns:
        The multiples are left out where the quadratic model has no minimum ahead, the
        sharpness where the slope is zero or there is no learning rate.
    """
    slope, second = float(found.slope), float(found.curvature)
    numbers = {
        "loss": float(found.loss),
        "slope": slope,
        "curvature": second,
        "predicted_change": slope + second / 2,
        "actual_change": float(found.loss_after) - float(found.loss),
    }
    if slope < 0 < second:
        numbers["multiple_of_least_loss"] = -slope / second
        numbers["multiple_of_return"] = -2 * slope / second
    if slope and learning_rate:
        numbers["directional_sharpness"] = -second / (learning_rate * slope)
    return {name: x for name, x in numbers.items() if math.isfinite(x)}


def not_finite(found: AlongUpdate) -> list[str]:
    """The names and values of what is NaN or infinite."""
    values = {f.name: float(getattr(found, f.name)) for f in dataclasses.fields(found)}
    return [
        f"{name} {value}" for name, value in values.items() if not math.isfinite(value)
    ]


def copied(tree: PyTree) -> PyTree:
    """A copy of a tree's arrays, in memory of their own; to be compiled."""
    return jax.tree.map(jnp.copy, tree)
