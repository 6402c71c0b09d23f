r"""An optimizer's preconditioner, found by differentiating its update.

An optimizer that divides by the root of a second moment, whatever else it corrects,
clips or scales, moves the parameters by $-D g$ for a small gradient $g$, besides the
part of its momentum; $D$ is diagonal. Let the momentum be $m' = \beta m + a g$. With
everything else frozen, a step along an eigenvector of $D A$ with the eigenvalue
$\lambda$ is stable while

$$ \lambda < \frac{2}{1 - r / (1 + \beta)}, $$

where $D g$ is followed by a step of $r D g$ when the next gradient is zero: $r = \beta$
for heavy-ball momentum and for averaged gradients, which gives $2 + 2 \beta$, and
$\beta^2 / (1 + \beta)$ for Nesterov's, which gives $(2 + 2 \beta) / (1 + 2 \beta)$ in
units of the step without momentum. (The characteristic polynomial has a root at -1
there.)

References:
  Cohen et al. 2022, Adaptive gradient methods at the edge of stability, section 2 and
  appendix: $(2 + 2 \beta_1) / ((1 - \beta_1) \eta)$ for Adam.
"""

import collections.abc
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import layout, trees

# (gradient, state, params) to the change of the parameters and the new state.
Update = collections.abc.Callable[[PyTree, Any, PyTree], tuple[PyTree, Any]]

# A gradient that no second moment notices: its square is far below the 1e-30 that
# Adafactor adds and the square of Adam's 1e-8, and is still a normal number in float32.
SMALL = 5e-18
# At a gradient of SMALL a momentum's derivative is as large as its factor, a second
# moment's is about SMALL.
LEAST_MOMENTUM = 1e-14
# Beyond this relative spread a factor is not the same for all parameters; the spread of
# a momentum kept in bfloat16 is smaller.
SPREAD = 1e-2


@dataclasses.dataclass(frozen=True)
class Response:
    r"""How an optimizer in a given state responds to a small gradient.

    Attributes:
      diagonal: $D$, a vector: the step is $-D g$; the learning rate and momentum's share
        of the newest gradient are in it, where the optimizer applies them. It is zero
        where parameters are not trained.
      momentum: $\beta$; 0 without momentum, NaN if it differs between parameters.
      follow_up: $r$: the next step is $-r D g$ when its gradient is zero.
    """

    diagonal: PyTree
    momentum: float
    follow_up: float

    @property
    def threshold(self) -> float:
        """The eigenvalue of $D A$ above which steps diverge; NaN where unknown."""
        return 2 / (1 - self.follow_up / (1 + self.momentum))


def small_gradient_response(update: Update, state: Any, params: PyTree) -> Response:
    """An optimizer's preconditioner of small gradients, by differentiating its update.

    The derivative is taken in forward mode at a gradient of 5e-18, in float64, so that
    terms independent of the gradient (momentum, weight decay) drop out and no second
    moment is too small for it. Nothing is gathered: the diagonal has the shardings of
    the parameters.

    Args:
      update: The optimizer: gradient, state and parameters to the change of the
        parameters and the new state. For small gradients, every entry of the change may
        depend only on its own entry of the gradient.
      state: Its state.
      params: The parameters.

    Returns:
      The diagonal and the momentum.

    Raises:
      ValueError: The update does not depend on a small gradient, or not smoothly.
    """
    leaves = jax.tree.leaves(trees.float_part(params))
    layouts = tuple(map(layout.sharding_of, leaves))
    with jax.enable_x64(True):
        diagonal, sums = _compiled(update, layouts)(state, params)
        found = {name: float(x) for name, x in jax.device_get(sums).items()}
    if not math.isfinite(found["square"]) or found["square"] == 0.0:
        zero = ", as with a learning rate of zero" * (found["square"] == 0.0)
        raise ValueError(
            "The optimizer's update must be a smooth function of small gradients and "
            f"depend on them: the squares of its derivatives sum to {found['square']}"
            f"{zero}."
        )
    same = found["momentum_spread"] <= SPREAD and found["follow_up_spread"] <= SPREAD
    return Response(
        diagonal,
        found["momentum"] if same else math.nan,
        found["follow_up"] if same else math.nan,
    )


# Compiled once for an optimizer whose state changes.
@functools.lru_cache(maxsize=8)
def _compiled(update, layouts):
    @jax.jit
    def differentiated(state, params):
        diagonal, sums = _differentiated(update, state, params)
        sums = {k: layout.replicate(x, layouts) for k, x in sums.items()}
        return layout.constrain(diagonal, layouts), sums

    return differentiated


def _differentiated(update, state, params):
    """The diagonal in the types of a vector, and the sums that give the momentum."""
    floats, rebuild = _float_leaves(state)
    like = trees.float_part(params)
    wide = jax.tree.map(lambda x: x.astype(np.float64), like)
    ones = jax.tree.map(jnp.ones_like, wide)

    def step(gradient, floats):
        gradient = trees.merge(gradient, params)
        change, new = update(gradient, rebuild(floats), trees.merge(wide, params))
        return trees.float_part(change), _float_leaves(new)[0]

    at = (trees.scale(SMALL, ones), floats)
    zeros = [jnp.zeros_like(x) for x in floats]
    _, (first, answer) = jax.jvp(step, at, (ones, zeros))
    answer = [jnp.where(jnp.abs(x) > LEAST_MOMENTUM, x, 0.0) for x in answer]
    none = jax.tree.map(jnp.zeros_like, ones)
    _, (second, kept) = jax.jvp(step, at, (none, answer))
    momentum, momentum_spread = _ratio(kept, answer)
    follow_up, follow_up_spread = _ratio(
        jax.tree.leaves(second), jax.tree.leaves(first)
    )
    diagonal = jax.tree.map(
        lambda d, p: (0.0 - d).astype(trees.vector_dtype(p)), first, like
    )
    return diagonal, {
        "square": trees.inner(first, first),
        "momentum": momentum,
        "momentum_spread": momentum_spread,
        "follow_up": follow_up,
        "follow_up_spread": follow_up_spread,
    }


def _ratio(leaves, of):
    """The factor between two lists of leaves, and their deviation from it."""
    if not of:
        return jnp.zeros(()), jnp.zeros(())
    square = sum(jnp.sum(x * x) for x in of)
    product = sum(jnp.sum(x * y) for x, y in zip(leaves, of, strict=True))
    factor = jnp.where(square > 0, product / jnp.where(square > 0, square, 1.0), 0.0)
    apart = [
        jnp.max(jnp.where(x == 0, 0.0, jnp.abs(y / jnp.where(x == 0, 1.0, x) - factor)))
        for y, x in zip(leaves, of, strict=True)
        if x.size
    ]
    return factor, jnp.max(jnp.stack(apart))


def _float_leaves(state):
    """The float leaves of a state in float64, and the way back to the state."""
    leaves, structure = jax.tree.flatten(state)
    is_float = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
    floats = [
        jnp.asarray(x).astype(np.float64)
        for x, flag in zip(leaves, is_float, strict=True)
        if flag
    ]

    def rebuild(floats):
        rest = iter(floats)
        merged = [
            next(rest) if flag else x for x, flag in zip(leaves, is_float, strict=True)
        ]
        return jax.tree.unflatten(structure, merged)

    return floats, rebuild


@jax.jit
def apply_diagonal(diagonal: PyTree, vector: PyTree) -> PyTree:
    """The elementwise product of two vectors, such as a preconditioned gradient."""
    return jax.tree.map(lambda d, x: d.astype(x.dtype) * x, diagonal, vector)


@jax.jit
def root(diagonal: PyTree) -> PyTree:
    """The elementwise square root."""
    return jax.tree.map(jnp.sqrt, diagonal)


def congruent(matvec: trees.Matvec, diagonal: PyTree) -> trees.Matvec:
    r"""The map $v \mapsto D A D v$, symmetric where $A$ is.

    With $D$ the root of the preconditioner $P$ it has the eigenvalues of $P A$.

    Args:
      matvec: The product with $A$.
      diagonal: $D$, a vector.

    Returns:
      The product.
    """
    return lambda v: apply_diagonal(diagonal, matvec(apply_diagonal(diagonal, v)))
