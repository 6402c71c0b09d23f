r"""Products that linearize once per batch, and are then cheap to repeat.

At fixed parameters and batch $v \mapsto A v$ is the same linear map each time.
Linearizing the gradient (or the outputs) once keeps the intermediate values, the
*residuals*, and saves the forward and backward pass in every later product. They take
memory: batches are linearized as long as the compiler's own estimate fits the budget,
the others are differentiated anew in each product. `AmortizedProduct.batches` says
which was done for each.
"""

import collections.abc
import dataclasses
import os
import typing

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.curvature import folding, operators, products, trees

# The part of free memory that residuals may take where no budget is given.
SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class BatchRecord:
    """How one batch is treated.

    Attributes:
      linearized: Whether its residuals are kept.
      residual_bytes: What they take on each device, by the compiler's estimate.
      reason: Why, in words.
    """

    linearized: bool
    residual_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """A product split in what depends on the vector and what does not.

    Attributes:
      linearize: `(params, *args) -> residuals`, pure.
      apply: `(residuals, params, v, *args) -> A v`, pure.
      direct: `(params, v, *args) -> A v`, pure, without residuals.
    """

    linearize: collections.abc.Callable[..., typing.Any]
    apply: collections.abc.Callable[..., PyTree]
    direct: collections.abc.Callable[..., PyTree]


def hessian_map(loss: products.Function) -> LinearMap:
    """The Hessian product, forward over reverse, as a linear map of the gradient."""

    def linearize(params, *args):
        function = products.of_floats(loss, params, args)
        floats = trees.float_part(params)
        _, linear = jax.linearize(jax.grad(function), floats)
        return folding.fold((linear, floats))

    def apply(linear, params, v, *args):
        del args
        return trees.as_vector(linear(products.tangent(v, params)))

    return LinearMap(linearize, apply, products.hessian_product(loss))


def gauss_newton_map(
    outputs: products.Function, output_hessian: products.Function
) -> LinearMap:
    """The Gauss-Newton product, with the outputs' Jacobian linearized once."""

    def linearize(params, *args):
        function = products.of_floats(outputs, params, args)
        floats = trees.float_part(params)
        z, jacobian = jax.linearize(function, floats)
        transpose = jax.linear_transpose(jacobian, floats)
        return z, folding.fold((jacobian, floats), (lambda bar: transpose(bar)[0], z))

    def apply(residuals, params, v, *args):
        z, folded = residuals
        return products.sandwich(
            z, folded, output_hessian, params, v, args, lambda bar: folded(bar, 1)
        )

    direct = products.gauss_newton_product(outputs, output_hessian)
    return LinearMap(linearize, apply, direct)


def free_bytes() -> int:
    """Memory free on the first device; for CPUs, each device's share of the host's."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // max(jax.local_device_count(), 1)


class AmortizedProduct:
    """The map `v -> factor * sum over batches of A_b v`, linearized where it fits.

    Attributes:
      batches: A `BatchRecord` for each batch.
    """

    def __init__(
        self,
        linear_map: LinearMap,
        params: PyTree,
        batches: collections.abc.Sequence[tuple],
        *,
        factor: float = 1.0,
        memory_budget: int | None = None,
    ):
        """Linearizes the batches that fit, in order.

        Args:
          linear_map: The product, such as `hessian_map(loss)`.
          params: The parameters.
          batches: For each batch the tuple of further arguments.
          factor: One over the normalizer of all batches together.
          memory_budget: Bytes that residuals may take on each device; None: half of
            what is free now; 0: never linearize.

        Raises:
          ValueError: There are no batches.
        """
        if not batches:
            raise ValueError("A product must have at least one batch: got none.")
        budget = SHARE * free_bytes() if memory_budget is None else memory_budget
        self._params = params
        self._args = list(batches)
        self._factor = factor
        self._linearize = jax.jit(linear_map.linearize)
        self._compiled: dict = {}
        self._apply = jax.jit(linear_map.apply)
        self._direct = jax.jit(linear_map.direct)
        self._apply_many = jax.jit(
            lambda residuals, params, vs, *args: jax.vmap(
                lambda v: linear_map.apply(residuals, params, v, *args)
            )(vs)
        )
        self._direct_many = jax.jit(operators.stacked(linear_map.direct))
        self._residuals = []
        self.batches: list[BatchRecord] = []
        for args in self._args:
            self._add(args, int(budget))
        self._compiled.clear()

    def _program(self, args):
        """The compiled linearization, once for all batches of the same shapes."""
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        if key not in self._compiled:
            self._compiled[key] = self._linearize.lower(self._params, *args).compile()
        return self._compiled[key]

    def _add(self, args, budget):
        used = sum(
            record.residual_bytes for record in self.batches if record.linearized
        )
        if budget <= 0:
            self._residuals.append(None)
            self.batches.append(BatchRecord(False, 0, "no memory budget"))
            return
        compiled = self._program(args)
        analysis = compiled.memory_analysis()
        need = int(getattr(analysis, "output_size_in_bytes", 0))
        fits = used + need <= budget
        sentence = (
            f"residuals of {need} bytes, {used} already held, budget {budget} bytes"
        )
        self._residuals.append(compiled(self._params, *args) if fits else None)
        self.batches.append(BatchRecord(fits, need, sentence))

    @property
    def num_linearized(self) -> int:
        """How many batches are linearized."""
        return sum(record.linearized for record in self.batches)

    def _sum(self, apply, direct, v):
        def part(residuals, args):
            if residuals is None:
                return direct(self._params, v, *args)
            return apply(residuals, self._params, v, *args)

        pairs = list(zip(self._residuals, self._args, strict=True))
        product = lambda _, __, index: part(*pairs[index])
        numbers = [(index,) for index in range(len(pairs))]
        # The parts are compiled, so that their results are new arrays.
        total = operators.summed(
            product, None, numbers, factor=self._factor, fresh=True
        )
        return total(v)

    def __call__(self, v: PyTree) -> PyTree:
        """The product with one vector."""
        return self._sum(self._apply, self._direct, v)

    def stacked(self, vs: PyTree) -> PyTree:
        """The products with vectors stacked along the first axis, in one program."""
        return self._sum(self._apply_many, self._direct_many, vs)
