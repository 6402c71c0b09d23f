r"""The optimizer of a checkpoint: its preconditioner, and when its steps are stable.

The diagonal $P$ is found by differentiating the optimizer's own update in the state that
the checkpoint holds, at its step: bias corrections, epsilons, parameter scales and
schedules are the optimizer's. Two factors are divided out where they are known: the
learning rate $\eta$ and the momentum's share $c$ of the newest gradient, so that Adam's
is $P = 1 / (\sqrt{\hat v} + \epsilon)$. Weight decay is not part of it.

With the momentum $\beta$, steps are stable while the eigenvalues of $P A$ are below

- $(2 + 2 \beta) / \eta$ for heavy-ball momentum, $2 / \eta$ without;
- $(2 + 2 \beta) / ((1 - \beta) \eta)$ for an averaged gradient, as in Adam.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import preconditioning, trees

LearningRate = float | Callable[[int], Any]

# Second moments at which epsilon is negligible, for measuring the learning rate.
LARGE = 1e12
NAMES = {
    optax.ScaleByAdamState: "Adam",
    optax.FactoredState: "Adafactor",
    optax.ScaleByRmsState: "RMSProp",
    optax.ScaleByRssState: "Adagrad",
    optax.TraceState: "SGD with momentum",
}


@dataclasses.dataclass(frozen=True)
class Preconditioner:
    r"""An optimizer's preconditioner.

    Attributes:
        diagonal: $P$, a vector; zero where parameters are not trained.
        optimizer: its name, for the reader.
        learning_rate: $\eta$; None if neither the checkpoint nor the configuration has
            it.
        includes_learning_rate: whether $\eta$, unknown, is a factor of the diagonal.
        threshold: the eigenvalue of $P A$, times $\eta$, below which steps are stable;
            None if the optimizer's kind of momentum is unknown.
    """

    diagonal: PyTree
    optimizer: str
    learning_rate: float | None = None
    includes_learning_rate: bool = False
    threshold: float | None = None

    @property
    def trained(self) -> PyTree:
        """For each leaf whether the optimizer trains any of it."""
        return _any_positive(self.diagonal)


def of_update(
    update: preconditioning.Update,
    state: Any,
    params: PyTree,
    *,
    learning_rate: float | None = None,
) -> Preconditioner:
    """The preconditioner of an optimizer whose update carries its learning rate.

    Args:
        update: gradient, state and parameters to the change of the parameters and the
            new state, as `update` of an `optax.GradientTransformation`.
        state: the state in the checkpoint.
        params: the checkpoint's parameters.
        learning_rate: the learning rate at the checkpoint's step, if the caller knows
            it; otherwise it is measured, for Adam, Adafactor and SGD, on a copy of the
            state whose second moments are large.

    An update that does not depend smoothly on a small gradient raises `ValueError`.
    """
    response = preconditioning.small_gradient_response(update, state, params)
    share, in_long_run = _shares(state, response)
    if learning_rate is None:
        learning_rate = _injected(state) or _measured(update, state, params, share)
    factor = share * (1.0 if learning_rate is None else learning_rate)
    known = bool(np.isfinite(response.threshold))
    return Preconditioner(
        trees.scale(1.0 / factor, response.diagonal),
        name_of(state),
        learning_rate,
        includes_learning_rate=learning_rate is None,
        threshold=response.threshold / in_long_run if known else None,
    )


def at_step(learning_rate: LearningRate | None, step: int | None) -> float | None:
    """The learning rate at a step, of a number or of a schedule."""
    if callable(learning_rate):
        return float(learning_rate(0 if step is None else step))
    return None if learning_rate is None else float(learning_rate)


def _shares(state, response) -> tuple[float, float]:
    """The newest gradient's share in a step, now and without Adam's correction."""
    beta = response.momentum
    # Nesterov's momentum counts the newest gradient once more, one step early.
    nesterov = response.follow_up < (beta + beta**2 / (1 + beta)) / 2
    ahead = 1 + beta if nesterov else 1.0
    adam = _nodes(state, optax.ScaleByAdamState)
    if not (adam or _nodes(state, optax.EmaState)):
        return ahead, ahead
    correction = 1 - beta ** (_count(adam[0]) + 1) if adam else 1.0
    return ahead * (1 - beta) / correction, ahead * (1 - beta)


def _measured(update, state, params, share) -> float | None:
    """The learning rate, if the update is its product with g / sqrt(v) for a large v."""
    if any(
        _nodes(state, kind) for kind in (optax.ScaleByRmsState, optax.ScaleByRssState)
    ):
        return None
    large = jax.tree.map(_with_large_moments, state, is_leaf=_has_moments)
    ones = jax.tree.map(jnp.ones_like, params)
    diagonal = preconditioning.small_gradient_response(update, large, ones).diagonal
    low, high = map(float, jax.device_get(_range(diagonal)))
    if not high <= low * (1 + preconditioning.SPREAD):
        return None
    kept = _kept(update, large, ones)
    adam = _nodes(state, optax.ScaleByAdamState)
    corrected = kept / (1 - kept ** (_count(adam[0]) + 1)) if adam else kept
    moment = LARGE * corrected if kept else 1.0
    return high * float(np.sqrt(moment)) / share


def _kept(update, state, params) -> float:
    """The decay of the second moment in one update; 0 if there is none."""
    zero = jax.tree.map(jnp.zeros_like, trees.float_part(params))
    with jax.enable_x64(True):
        _, new = _jitted(update)(trees.merge(zero, params), state, params)
    for node in _nodes(new, optax.ScaleByAdamState):
        return _largest(node.nu) / LARGE
    for node in _nodes(new, optax.FactoredState):
        return _largest((node.v, node.v_row)) / LARGE
    return 0.0


@functools.lru_cache(maxsize=8)  # or every checkpoint would compile it again
def _jitted(update):
    return jax.jit(update)


def _with_large_moments(node):
    large = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, LARGE), tree)
    if isinstance(node, optax.ScaleByAdamState):
        return node._replace(nu=large(node.nu))
    if isinstance(node, optax.FactoredState):
        moments = {name: large(getattr(node, name)) for name in ("v", "v_row", "v_col")}
        return node._replace(**moments)
    return node


def _has_moments(node) -> bool:
    return isinstance(node, optax.ScaleByAdamState | optax.FactoredState)


def _injected(state) -> float | None:
    """The learning rate that `optax.inject_hyperparams` keeps in the state."""
    kind = optax.InjectStatefulHyperparamsState
    for node in _nodes(state, kind):
        if "learning_rate" in node.hyperparams:
            return float(node.hyperparams["learning_rate"])
    return None


def name_of(state: Any) -> str:
    """The name of the optimizer with such a state, or such shapes of a state."""
    names = [name for kind, name in NAMES.items() if _nodes(state, kind)]
    return names[0] if names else "SGD"


def _nodes(state, kind) -> list[Any]:
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _count(node) -> int:
    return int(np.asarray(jax.device_get(node.count)))


def _largest(tree) -> float:
    return float(jax.device_get(_maximum(tree)))


@jax.jit
def _maximum(tree):
    return jnp.max(jnp.stack([jnp.max(x) for x in jax.tree.leaves(tree) if x.size]))


@jax.jit
def _range(tree):
    """The smallest and the largest nonzero entry."""
    leaves = [x for x in jax.tree.leaves(tree) if x.size]
    least = [jnp.min(jnp.where(x == 0, jnp.inf, x)) for x in leaves]
    return jnp.min(jnp.stack(least)), jnp.max(jnp.stack([jnp.max(x) for x in leaves]))


def _any_positive(tree) -> PyTree:
    found = jax.device_get(_positive(tree))
    return jax.tree.map(bool, found)


@jax.jit
def _positive(tree):
    return jax.tree.map(lambda x: jnp.any(x != 0), tree)
