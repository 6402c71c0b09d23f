"""Curvature around real steps of the standalone training."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from t5x_fwdloss.analysis import optimizer as optimizer_lib
from t5x_fwdloss.analysis.objective import normalization
from t5x_fwdloss.curvature.vectors import preconditioning, trees
from t5x_fwdloss.loss_mixin import LossMixin
from t5x_fwdloss.training import along_update, probes
from t5x_fwdloss.training.largest_eigenvalue import HESSIAN, LargestEigenvalues
from t5x_fwdloss.training.noise_scale import NoiseScale
from t5x_fwdloss.training.quantity import ProbedStep, Quantity

LearningRate = optimizer_lib.LearningRate


class StepProbes:
    """The probes of one training run; none without a period."""

    def __init__(
        self,
        learning_rate: LearningRate | None,
        update: preconditioning.Update,
        period: int | None,
        write: Callable[[int, Mapping[str, float]], None],
        measured: Sequence[Quantity],
    ):
        """Nothing is compiled yet.

        Args:
            learning_rate: the optimizer's, or its schedule; None leaves the sharpness
                out.
            update: the optimizer's, of all parameters.
            period: steps from one probe to the next; None for no probes.
            write: takes a step and its numbers by tag.
            measured: what a probe measures, as `quantities` makes it.
        """
        self._probes = probes.Probes(period, write, measured)
        self.training = self._probes.training
        self._rate, self._update = learning_rate, update
        self._copy = jax.jit(along_update.copied)
        self._is_compiled = False
        self._kept: tuple[Any, ...] = ()

    def before(self, step: int, params: Any, batch: Any, key: jax.Array) -> None:
        """Keeps what the probe of a step needs and the step destroys."""
        if not self._probes.is_due(step):
            return
        if not self._is_compiled:
            self._probes.prepare(functools.partial(_compiled, params, batch, key))
            self._is_compiled = True
        self._kept = (*self._copy(params), batch, key)

    def after(self, step: int, params: Any, state: Any) -> None:
        """Probes the step, if it is due, at its new parameters and optimizer's state."""
        if self._probes.is_due(step):
            # Schedules count from 0.
            rate = optimizer_lib.at_step(self._rate, step - 1)
            preconditioner = lambda: optimizer_lib.of_update(
                self._update, state, params, learning_rate=rate
            )
            old, batch, key = self._kept
            self._probes.run(
                step, ProbedStep(old, params, batch, key, rate, preconditioner)
            )
            self._kept = ()


def _compiled(params, batch, key, function, *kinds, result="scalars"):
    """A `quantity.Compile`; the compiler chooses how the results are laid out."""
    del result
    vector = jax.eval_shape(trees.as_vector, params)
    known = {"params": params, "vector": vector, "batch": batch, "key": key}
    of = lambda kind: known[kind] if isinstance(kind, str) else kind
    return jax.jit(function).lower(*map(of, kinds)).compile()


def quantities(
    model: LossMixin,
    *,
    eigenvalue_products: int = 0,
    eigenvalue_matrices: Sequence[str] = (HESSIAN,),
    noise_pieces: int | None = None,
    mixture: str = "",
    batch: Any = None,
) -> list[Quantity]:
    """What the probes of a run measure.

    Args:
        model: its loss has forward mode.
        eigenvalue_products: Lanczos steps for each largest eigenvalue; 0 for none.
        eigenvalue_matrices: "hessian", "preconditioned_hessian" or both.
        noise_pieces: pieces of a batch for the gradient noise scale; None leaves it out.
        mixture: name of the other data, if there are any.
        batch: their batch, measured along the same updates without dropout.
    """
    loss = lambda params, batch, key: model.loss_fn(params, batch, key)[0]
    found: list[Quantity] = [along_update.Along(loss)]
    if batch is not None:
        found.append(along_update.Along(loss, (f"{mixture}/", batch, None)))
    if eigenvalue_products:
        found.append(LargestEigenvalues(loss, eigenvalue_matrices, eigenvalue_products))
    if noise_pieces is not None:
        factor = model.loss_settings.loss_normalizing_factor
        found.append(NoiseScale(_piece_loss(loss, factor), noise_pieces))
    return found


def _piece_loss(loss, factor):
    def of_piece(params, batch, key, number, num_pieces):
        size = next(iter(batch.values())).shape[0] // num_pieces
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size)
        found = loss(params, jax.tree.map(cut, batch), key)
        return found / num_pieces if normalization.is_mean(factor) else found

    return of_piece


def check(
    model: LossMixin,
    optimizer: optax.GradientTransformation,
    learning_rate: LearningRate | None,
) -> None:
    """Passes if the steps of this model and optimizer can be probed.

    Args:
        model: its loss needs forward mode.
        optimizer: that of the training.
        learning_rate: compared with the optimizer's at its second step, if that can be
            measured; None is not.

    Raises:
        ValueError: the loss has no forward mode, or the rate is not the optimizer's.
    """
    probes.check_forward_mode(model.loss_settings)
    measured = None if learning_rate is None else _second_rate(optimizer)
    given = optimizer_lib.at_step(learning_rate, 1)
    if measured and given is not None and abs(given - measured) > 0.01 * measured:
        raise ValueError(
            "LEARNING_RATE_FN must be the learning rate of OPTIMIZER, or None for no "
            f"sharpness: at the second step it gives {given:.4g}, and the optimizer "
            f"has {measured:.4g}."
        )


def _second_rate(optimizer) -> float | None:
    """The learning rate of an optimizer's second step, measured on a small parameter."""
    try:
        params = {"kernel": jnp.ones((2, 2))}
        _, state = optimizer.update(params, optimizer.init(params), params)
        return optimizer_lib.of_update(optimizer.update, state, params).learning_rate
    except Exception:  # it needs other parameters, or is not smooth: nothing to compare
        return None
