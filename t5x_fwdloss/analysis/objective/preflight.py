r"""The checks a run makes of itself before it measures anything.

The loss of the first batch must be what the model's own `loss_fn` says. With a
direction $u = g/\|g\| + r$, r random of norm one, a matrix $A$ that will be measured, and
$w = A u / \|A u\|$: the loss must give the same value twice; the jvp along $u$ must be
$\langle g, u \rangle$; $\langle u, A w \rangle$ must be
$\langle w, A u \rangle = \|A u\|$, which for an operator that is not symmetric fails
however many parameters there are; and $A 0$ must be 0.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.analysis.objective import forward_mode, parameters
from t5x_fwdloss.analysis.objective.finite import NegativeCurvatureError
from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct
from t5x_fwdloss.curvature.vectors import probes, trees
from t5x_fwdloss.loss_mixin import LossMixin

# The flag that keeps XLA from fusing products and sums of rows into YNNPACK kernels.
YNN_OFF = "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type="
# One loss computed twice in a compiled function: roundings of the network's type.
LOSS_ROUNDINGS = 2


class PreflightError(RuntimeError):
    """A check that failed before the run measured anything; the message names it."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One passed check: the two numbers that were compared, and how closely.

    Attributes:
        name: what was compared.
        first: one number.
        second: the other number.
        tolerance: the largest difference that passes.
        meaning: the fault if it fails.
    """

    name: str
    first: float
    second: float
    tolerance: float
    meaning: str

    @property
    def passed(self) -> bool:
        """Whether the numbers agree; NaN agrees with nothing."""
        return abs(self.first - self.second) <= self.tolerance


def model_loss(objective: Objective, params: PyTree) -> tuple[float, float] | None:
    """The first batch's loss by the model's own `loss_fn`, and as it is measured.

    Both are shares of the objective's value. None where the model has no `loss_fn`, and
    where no token of the first batch counts.

    Args:
        objective: the objective.
        params: parameters of the checkpoint.
    """
    if not hasattr(objective.model, "loss_fn"):
        return None
    model = copy.copy(objective.model)
    if isinstance(model, LossMixin):  # whose loss does not depend on its metrics
        model._compute_metrics = lambda **_: {}

    def both(params, batch, key):
        _, normalizer = model.loss_sum(params, batch, key)
        loss, _ = model.loss_fn(params, batch, key)
        own = loss * normalizer / objective.W
        return own, objective.batch_loss(params, batch, key), normalizer

    params = parameters.widened(params)
    program = objective.compiled("the model's own loss", both, params)
    found = program(params, objective.batches[0], objective.key(0))
    own, measured, normalizer = map(float, jax.device_get(found))
    return (own, measured) if normalizer else None


def has_forward_mode(objective: Objective, params: PyTree, needed_by: str = "") -> bool:
    """Whether the loss has forward mode; compiles nothing.

    Args:
        objective: what will be measured.
        params: parameters of the checkpoint.
        needed_by: name of a measurement that needs forward mode, if there is one.

    Raises:
        PreflightError: `needed_by` is given, and the loss or a part of the network is a
            `jax.custom_vjp` function.
    """
    chosen = objective.loss_settings
    of_loss = chosen is not None and not chosen.implementation.has_forward_mode
    blocked = of_loss or forward_mode.is_blocked(objective.traced_jvp(params))
    if not blocked or not needed_by:
        return not blocked
    if of_loss:
        raise PreflightError(no_forward_loss(needed_by))
    args = (parameters.widened(params), objective.batches[0], objective.key(0))
    found = forward_mode.custom_vjp_functions(
        jax.make_jaxpr(objective.batch_loss)(*args)
    )
    named = f" ({', '.join(found)})" if found else ""
    raise PreflightError(
        f"{needed_by} needs a model that has forward mode, and a part of it "
        f"is a jax.custom_vjp function{named}: choose the plain form of that part, or "
        f"leave {needed_by} out of MEASUREMENTS."
    )


def no_forward_loss(needed_by: str) -> str:
    """Why a measurement cannot use T5X's own rule of the loss, and the remedy."""
    return (
        f"{needed_by} needs a loss that has forward mode, and LOSS_IMPL = "
        '"custom_vjp", T5X\'s own rule, has none: set LOSS_IMPL = "custom_jvp" in '
        "gin (on the command line: --gin.LOSS_IMPL=\"'custom_jvp'\"). Values, "
        "gradients and the checkpoint stay the same."
    )


def loss_value(objective: Objective, params: PyTree, *, forward: bool) -> float:
    """The loss, by a function that is compiled for the checks in any case.

    Args:
        objective: what will be measured.
        params: parameters of the checkpoint.
        forward: whether the loss has forward mode.
    """
    if not forward:
        return objective.value(params)
    value, _ = objective.jvp(params, trees.float_part(parameters.widened(params)))
    return value


def check_objective(
    objective: Objective,
    params: PyTree,
    key: jax.Array,
    *,
    value: float | None = None,
    matrix: str = "the Hessian",
    product: Callable[[PyTree], PyTree] | None = None,
    forward: bool = True,
) -> list[Check]:
    """Run every check; the list goes into the results.

    Args:
        objective: what will be measured.
        params: parameters of the checkpoint.
        key: a threefry key for the random part of the directions.
        value: the loss, if it is known from `loss_value`.
        matrix: the matrix of `product`, in words.
        product: the product that will be used; None: there is none to be checked.
        forward: whether the loss has a forward mode to be checked.

    Raises:
        PreflightError: the first check that fails, with both numbers.
    """
    if value is None:
        value = loss_value(objective, params, forward=forward)
    done = []
    for check in _checks(objective, params, key, value, matrix, product, forward):
        if not check.passed:
            raise PreflightError(_failure(check))
        done.append(check)
    return done


def check_stacked(
    matrix: str,
    product: MatrixProduct,
    params: PyTree,
    key: jax.Array,
    *,
    block_size: int,
    relative: float,
) -> Check:
    """Products with several vectors at once against products one by one.

    Args:
        matrix: its name in words.
        product: the product that will be used.
        params: parameters of the checkpoint.
        key: a threefry key for the vectors.
        block_size: how many are stacked.
        relative: the relative difference that rounding explains.

    Raises:
        PreflightError: they differ by more; names a way around the compiler.
    """
    vectors = probes.random_stack(key, list(range(block_size)), params)
    together = trees.unstack(product.stacked(vectors))
    lengths, differences = [], []
    for vector, found in zip(trees.unstack(vectors), together, strict=True):
        alone = product(vector)
        lengths.append(float(trees.norm(alone)))
        differences.append(float(trees.norm(trees.axpy(-1.0, alone, found))))
    check = Check(
        f"{matrix}, {block_size} vectors at once equal one by one",
        max(differences),
        0.0,
        relative * max(lengths),
        "the compiler has miscompiled the function of stacked vectors: on a "
        f"CPU set the environment variable {YNN_OFF}, or block_size = 1",
    )
    if not check.passed:
        raise PreflightError(_failure(check))
    return check


def _failure(check) -> str:
    return (
        f"the check '{check.name}' failed: {check.first:.9g} and {check.second:.9g} "
        f"must differ by at most {check.tolerance:.3g}; {check.meaning}."
    )


def _checks(objective, params, key, value, matrix, product, forward) -> Iterator[Check]:
    dtype = objective.activation_dtype(params)
    relative = forward_mode.TOLERANCES.get(dtype, 1e-1)
    if forward:
        u, gradient = _direction(objective, params, key)
        again, slope = objective.jvp(params, u)
        yield _twice(value, again)
        yield from _of_model(objective, params, dtype)
        yield Check(
            "jvp equals <gradient, v>",
            slope,
            float(trees.inner(gradient, u)),
            relative * float(trees.norm(gradient)) * float(trees.norm(u)),
            "forward and reverse mode differ: a derivative rule in the model is wrong",
        )
    else:
        yield _twice(value, objective.value(params))
        yield from _of_model(objective, params, dtype)
        u = None if product is None else _direction(objective, params, key)[0]
    if product is not None:
        # A negative form of a semidefinite matrix stops its measurements, not the run.
        with contextlib.suppress(NegativeCurvatureError):
            yield from _of_product(matrix, product, u, relative)


def _twice(value, again) -> Check:
    return Check(
        "loss twice",
        value,
        again,
        1e-6 * abs(value),
        "the loss is random: turn dropout off, or give one fixed key per batch",
    )


def _direction(objective, params, key) -> tuple[PyTree, PyTree]:
    """The gradient's direction plus a random one, and the gradient."""
    gradient = objective.gradient(params)
    length = float(trees.norm(gradient))
    noise = probes.random_like(key, params, "normal")
    u = trees.scale(1.0 / float(trees.norm(noise)), noise)
    return (trees.axpy(1.0 / length, gradient, u) if length > 0 else u), gradient


def _of_model(objective, params, dtype) -> Iterator[Check]:
    losses = model_loss(objective, params)
    if losses is not None:
        own, measured = losses
        yield Check(
            "the model's own loss_fn",
            own,
            measured,
            max(1e-5, LOSS_ROUNDINGS * float(jnp.finfo(dtype).eps)) * abs(measured),
            "the model trains another loss than the cross entropy that is measured",
        )


def _of_product(matrix, product, u, relative) -> Iterator[Check]:
    found = product(u)
    length = float(trees.norm(found))
    w = trees.scale(1.0 / length, found) if length > 0 else u
    again = product(w)
    yield Check(
        f"u.Av equals v.Au for {matrix}",
        float(trees.inner(u, again)),
        float(trees.inner(w, found)),
        relative * float(trees.norm(u)) * float(trees.norm(again)),
        f"{matrix} is not symmetric: the loss is random or a derivative rule is wrong",
    )
    zero = product(trees.scale(0.0, u))
    yield Check(
        f"A.0 equals 0 for {matrix}",
        float(trees.norm(zero)),
        0.0,
        0.0,
        f"the product with {matrix} is not linear",
    )
