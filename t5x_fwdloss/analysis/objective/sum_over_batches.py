r"""A sum over a fixed list of batches, and its derivatives.

The function is $L(\theta) = \sum_b n_b(\theta) / W$, where $n_b$ is the weighted sum of
the losses of batch $b$ and $W$ the total normalizer of all batches: however the same
examples are split into batches, it is the same function, up to rounding. It is never a
mean of batch means.

Every derivative is compiled once and walks over the batches; vectors are trees like the
parameters, keep their shardings, and are summed in float32 or wider. Scalars are summed
on the host in float64.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings as settings_lib
from t5x_fwdloss.analysis.objective import batches as batches_lib
from t5x_fwdloss.analysis.objective import forward_mode, parameters
from t5x_fwdloss.analysis.objective.finite import (
    by_batch,
    check_finite,
    check_vector,
)
from t5x_fwdloss.analysis.objective.programs import Programs
from t5x_fwdloss.curvature.products.derivatives import (
    directional_derivative,
    gradient,
    mixed_directional_derivative,
)
from t5x_fwdloss.curvature.products.linearized import compiled_for, summed
from t5x_fwdloss.curvature.vectors import in_flight, probes, trees

PRECISIONS = ("default", "high", "highest")
Precision = Annotated[str, settings_lib.one_of(*PRECISIONS)]


class SumOverBatches:
    r"""$L(\theta) = \sum_b n_b(\theta) / W$ over a fixed list of batches.

    Every method takes the whole parameter tree and, before anything is compiled,
    rejects a direction that does not fit it (`ValueError`). A NaN or an infinity in a
    result raises `NonFiniteLossError`, which names the batch and the parameter block.

    Attributes:
        batches: the batches, or the microbatches they are cut into, on the device.
        num_microbatches: the number of pieces per batch.
        batches_hash: SHA-256 of the batches' names, shapes, dtypes and bytes.
        W: the total normalizer.
        precision: matmul precision of every derivative.
        dropout_seed: the seed of the batches' dropout keys; None turns dropout off.
    """

    def __init__(
        self,
        numerator: Callable[..., Any],
        batches: Sequence[Mapping[str, Any]],
        *,
        total: float,
        num_microbatches: int,
        dropout_seed: int | None,
        precision: str,
    ):
        """A sum of functions of one batch.

        Args:
            numerator: `(params, batch, key)` to the batch's weighted sum of losses; key
                is None unless `dropout_seed` is given.
            batches: feature dictionaries, all of the same names, shapes and dtypes.
            total: the divisor of the sum over batches.
            num_microbatches: pieces that every batch is cut into.
            dropout_seed: one fixed dropout key per batch; None turns dropout off.
            precision: 'highest', 'high' or 'default', as `jax.default_matmul_precision`.

        Raises:
            ValueError: microbatches that do not divide the batches, microbatches with
                dropout, or an unknown precision.
        """
        settings_lib.check("precision", precision, Precision)
        settings_lib.check("num_microbatches", num_microbatches, settings_lib.Positive)
        settings_lib.check("dropout_seed", dropout_seed, settings_lib.Seed | None)
        if dropout_seed is not None and num_microbatches > 1:
            raise ValueError(
                "num_microbatches must be 1 where dropout_seed is given, because "
                "dropout draws its masks for each piece anew and the loss would be "
                f"another: got num_microbatches={num_microbatches}, "
                f"dropout_seed={dropout_seed}; lower the batch size instead."
            )
        self.batches_hash = batches_lib.digest(batches)
        pieces = batches_lib.split(batches, num_microbatches)
        self.batches = [batches_lib.on_device(batch) for batch in pieces]
        self.num_microbatches = num_microbatches
        self.W = total
        self.precision = precision
        self.dropout_seed = dropout_seed
        self._numerator = numerator
        self._activation_dtype: str | None = None
        self._programs = Programs(precision)
        # Kept for the next checkpoint of a sweep: nothing is compiled twice.
        self._compiled: dict[Any, Any] = {}
        if dropout_seed is None:
            self._keys = [None] * len(self.batches)
        else:
            root = probes.as_key(dropout_seed)
            self._keys = [jax.random.fold_in(root, i) for i in range(len(self.batches))]

    def compiled(
        self, name: str, function: Callable[..., Any], params: PyTree, *more: Any
    ) -> Any:
        """`function(params, batch, key, *more)` compiled for the first batch, once.

        At this objective's matmul precision; for measuring memory and time.

        Args:
            name: name of its result; the same name must mean the same function.
            function: the function.
            params: parameters.
            *more: further arguments.
        """
        args = (params, self.batches[0], self._keys[0], *more)
        key = name, compiled_for(args)
        if key not in self._compiled:
            with jax.default_matmul_precision(self.precision):
                self._compiled[key] = jax.jit(function).lower(*args).compile()
        return self._compiled[key]

    @property
    def num_traces(self) -> dict[str, int]:
        """How often each derivative was traced: once each, unless shapes change."""
        return self._programs.num_traces

    def key(self, number: int) -> jax.Array | None:
        """The fixed dropout key of batch `number`; None where dropout is off."""
        return self._keys[number]

    def batch_loss(
        self, params: PyTree, batch: Any, key: Any = None, index: Any = None
    ) -> jax.Array:
        """One batch's share of the objective, $n_b / W$: traceable, differentiable.

        Args:
            params: parameters.
            batch: one of the batches.
            key: its dropout key.
            index: its number; the loss does not depend on it.
        """
        del index
        return self._share(self._numerator(params, batch, key))

    def _share(self, numerator):
        share = numerator / self.W
        return share.astype(jnp.promote_types(share.dtype, jnp.float32))

    def batch_values(self, params: PyTree) -> np.ndarray:
        """Each batch's share $n_b / W$ of the objective, in order, float64."""
        found = self._scalars("the loss", self.batch_loss, params)
        pieces = np.asarray([float(x) for x in found], np.float64)
        return pieces.reshape(-1, self.num_microbatches).sum(axis=1)

    def value(self, params: PyTree) -> float:
        r"""The loss $L(\theta)$, summed over batches in float64."""
        shares = self.batch_values(params)
        check_finite("the loss", by_batch({"its value": x} for x in shares))
        return math.fsum(shares)

    def gradient(self, params: PyTree) -> PyTree:
        """The gradient, a tree like the parameters' floating-point leaves."""
        layout = parameters.shardings(params)
        program = self._programs.compiled(
            "the gradient", gradient(self.batch_loss), layout
        )
        wide = parameters.widened(params)
        parts = lambda: (program(wide, *pair) for pair in self.pairs())
        total = summed(parts())
        check_vector("the gradient", total, parts, self.num_microbatches)
        return total

    def jvp(self, params: PyTree, direction: PyTree) -> tuple[float, float]:
        r"""The loss and its directional derivative $\langle \nabla L, v \rangle$.

        It takes one forward pass; the loss must have forward mode, which a
        `jax.custom_vjp` loss has not.
        """
        trees.check_like(direction, params, "direction")
        found = self._scalars(
            "the jvp", directional_derivative(self.batch_loss), params, direction
        )
        shares = [(float(x), float(y)) for x, y in found]
        parts = ({"its value": x, "its derivative": y} for x, y in shares)
        check_finite("the loss", by_batch(parts, self.num_microbatches))
        value, derivative = zip(*shares, strict=True)
        return math.fsum(value), math.fsum(derivative)

    def mixed(self, params: PyTree, u: PyTree, v: PyTree) -> tuple[float, float]:
        r"""The derivatives $\langle \nabla L, u \rangle$ and $\langle u, H v \rangle$.

        By one jvp through a jvp: the loss must have forward mode.
        """
        for direction in (u, v):
            trees.check_like(direction, params, "direction")
        function = mixed_directional_derivative(self.batch_loss)
        found = self._scalars("the second derivative", function, params, u, v)
        pairs = [(float(x), float(y)) for x, y in found]
        parts = ({"its slope": x, "its curvature": y} for x, y in pairs)
        check_finite("the loss", by_batch(parts, self.num_microbatches))
        slope, curvature = zip(*pairs, strict=True)
        return math.fsum(slope), math.fsum(curvature)

    def tolerance(self, params: PyTree) -> float:
        """The relative error that rounding may leave in a derivative."""
        return forward_mode.TOLERANCES.get(self.activation_dtype(params), 1e-1)

    def activation_dtype(self, params: PyTree) -> str:
        """The narrowest type in which the network multiplies matrices; traces, once."""
        if self._activation_dtype is None:
            traced = self.traced_jvp(params)
            self._activation_dtype = forward_mode.narrowest_product(traced)
        return self._activation_dtype

    def traced_jvp(self, params: PyTree) -> Any:
        """The jaxpr of `jvp` for the first batch; a later `jvp` compiles this trace."""
        params = parameters.widened(params)
        return self._programs.traced(
            "the jvp",
            directional_derivative(self.batch_loss),
            parameters.replicated(params),
            *(params, trees.float_part(params), *next(self.pairs())),
        ).jaxpr

    def traced_gradient(self, params: PyTree) -> jax.stages.Traced:
        """The gradient of the first batch, traced, as `gradient` compiles it."""
        return self._programs.traced(
            "the gradient",
            gradient(self.batch_loss),
            parameters.shardings(params),
            *(parameters.widened(params), *next(self.pairs())),
        )

    def pairs(self) -> Iterator[tuple[Any, Any, int]]:
        """The arguments after the parameters and vectors, batch by batch."""
        return zip(self.batches, self._keys, range(len(self.batches)), strict=True)

    def _scalars(self, name, function, params, *directions):
        layout = parameters.replicated(params)
        program = self._programs.compiled(name, function, layout)
        params = parameters.widened(params)
        found = [
            in_flight.limited(number, program(params, *directions, *pair))
            for number, pair in enumerate(self.pairs())
        ]
        return jax.device_get(found)
