r"""Products that linearize once per batch, and are then cheap to repeat.

At fixed parameters and batch $v \mapsto A v$ is the same linear map each time.
Linearizing the gradient (or the outputs) once keeps the intermediate values, the
*residuals*, and saves the forward and backward pass in every later product. They take
memory: batches are linearized as long as the compiler's own estimate fits the budget;
the others are differentiated anew in each product. `AmortizedProduct.batches` says
which was done for each.

The linear functions are rewritten to read less (`folding`). Where that fails they are
kept as JAX made them: `AmortizedProduct.folding` says why.
"""

import collections.abc
import dataclasses
import functools
import logging
import os
import typing

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.curvature.products import derivatives, folding, uniform
from t5x_fwdloss.curvature.vectors import in_flight, layout, trees

# The fraction of free memory that residuals may take if no budget is given.
SHARE = 0.5
FOLDED = "folded"


@dataclasses.dataclass(frozen=True)
class BatchRecord:
    """Whether one batch is linearized, and why.

    Attributes:
      linearized: Whether its residuals are kept.
      residual_bytes: Their size on each device, by the compiler's estimate.
      reason: The reason, in words.
    """

    linearized: bool
    residual_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """A product, split into a part that depends on the vector and one that does not.

    Attributes:
      linearize: `(params, *args) -> residuals`, pure.
      fold: `(residuals, params) -> residuals` that are cheaper to apply, pure.
      apply: `(residuals, params, v, *args) -> A v`, pure, with either kind of residuals.
      direct: `(params, v, *args) -> A v`, pure, without residuals.
    """

    linearize: collections.abc.Callable[..., typing.Any]
    fold: collections.abc.Callable[..., typing.Any]
    apply: collections.abc.Callable[..., PyTree]
    direct: collections.abc.Callable[..., PyTree]


def hessian_map(loss: derivatives.Function) -> LinearMap:
    """The Hessian product, forward over reverse, as a linear map of the gradient."""

    def linearize(params, *args):
        function = derivatives.of_floats(loss, params, args)
        floats = trees.float_part(params)
        return jax.linearize(jax.grad(function), floats)[1]

    def fold(linear, params):
        return folding.fold((linear, trees.float_part(params)))

    def apply(linear, params, v, *args):
        del args
        return trees.as_vector(linear(derivatives.tangent(v, params)))

    return LinearMap(linearize, fold, apply, derivatives.hessian_product(loss))


def gauss_newton_map(
    outputs: derivatives.Function, output_hessian: derivatives.Function
) -> LinearMap:
    """The Gauss-Newton product, with the outputs' Jacobian linearized once."""

    def linearize(params, *args):
        function = derivatives.of_floats(outputs, params, args)
        return jax.linearize(function, trees.float_part(params))

    def fold(residuals, params):
        z, jacobian = residuals
        floats = trees.float_part(params)
        transpose = jax.linear_transpose(jacobian, floats)
        return z, folding.fold((jacobian, floats), (lambda bar: transpose(bar)[0], z))

    def apply(residuals, params, v, *args):
        z, jacobian = residuals
        transpose = None
        if isinstance(jacobian, folding.Folded):
            transpose = lambda bar: jacobian(bar, 1)
        return derivatives.sandwich(
            z, jacobian, output_hessian, params, v, args, transpose
        )

    direct = derivatives.gauss_newton_product(outputs, output_hessian)
    return LinearMap(linearize, fold, apply, direct)


def free_bytes() -> int:
    """Memory free on the first device; for CPUs, each device's share of the host's."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // max(jax.local_device_count(), 1)


class AmortizedProduct:
    """The map `v -> sum over batches of A_b v`, linearized where it fits.

    Attributes:
      batches: A `BatchRecord` for each batch.
      folding: Whether the linear functions are folded, and why not, in words.
    """

    def __init__(
        self,
        linear_map: "LinearMap | CompiledMap",
        params: PyTree,
        batches: collections.abc.Sequence[tuple],
        *,
        memory_budget: int | None = None,
        fold: bool = True,
    ):
        """Linearizes the batches that fit, in order.

        Args:
          linear_map: The product, such as `hessian_map(loss)`; as a `CompiledMap`, its
            functions are compiled once for all products made of it.
          params: The parameters.
          batches: For each batch the tuple of further arguments.
          memory_budget: Bytes that residuals may take on each device; None: half of the
            memory free now; 0: never linearize.
          fold: Whether to rewrite the linear functions to read less memory.

        Raises:
          ValueError: There are no batches.
        """
        if not batches:
            raise ValueError("A product must have at least one batch: got none.")
        budget = SHARE * free_bytes() if memory_budget is None else memory_budget
        self._budget = int(budget)
        self._params = params
        self._args = list(batches)
        if isinstance(linear_map, LinearMap):
            linear_map = CompiledMap(linear_map)
        self._map = linear_map
        self.folding = FOLDED if fold else "not folded: switched off"
        try:
            self._residuals, self.batches = self._linearized(fold)
        except Exception as error:
            if not fold or _is_of_device(error):
                raise
            self._residuals, self.batches = self._linearized(fold=False)
            self._say_why(error)

    def _linearized(self, fold):
        """Residuals of each batch, None for one that does not fit, and the records."""
        residuals, records = [], []
        for args in self._args:
            found, record = self._kept(args, fold, records)
            residuals.append(found)
            records.append(record)
        return residuals, records

    def _kept(self, args, fold, records):
        if self._budget <= 0:
            return None, BatchRecord(False, 0, "no memory budget")
        linearize = self._map.linearized(fold, self._params, *args)
        analysis = linearize.memory_analysis()
        need = int(getattr(analysis, "output_size_in_bytes", 0))
        used = sum(x.residual_bytes for x in records if x.linearized)
        kept = fits(need, used, self._budget)
        sentence = (
            f"residuals of {need} bytes, {used} already held, "
            f"budget {self._budget} bytes"
        )
        found = linearize(self._params, *args) if kept else None
        return found, BatchRecord(kept, need, sentence)

    def _say_why(self, error):
        first_line = str(error).partition("\n")[0]
        self.folding = f"not folded: {type(error).__name__}: {first_line}"
        logging.getLogger(__name__).warning("Linear functions are %s", self.folding)

    @property
    def num_linearized(self) -> int:
        """How many batches are linearized."""
        return sum(record.linearized for record in self.batches)

    @property
    def residual_bytes(self) -> int:
        """Bytes on each device of the residuals that are kept."""
        return sum(x.residual_bytes for x in self.batches if x.linearized)

    def temporary_bytes(self, v: PyTree) -> int:
        """Bytes on each device that come and go in a product with one vector.

        Args:
          v: A vector that was multiplied before: then nothing is compiled.

        Returns:
          The largest of the batches' functions, by the compiler's count.
        """
        functions = [
            self._map.one.direct.lower(self._params, v, *args)
            if residuals is None
            else self._map.one.apply.lower(residuals, self._params, v, *args)
            for residuals, args in zip(self._residuals, self._args, strict=True)
        ]
        sizes = [function.compile().memory_analysis() for function in functions]
        return max(getattr(x, "temp_size_in_bytes", 0) for x in sizes)

    def parts(
        self, v: PyTree, *, stacked: bool = False, params: PyTree | None = None
    ) -> collections.abc.Iterator[PyTree]:
        """The product of each batch, in order, as new arrays.

        Args:
          v: A vector, or several.
          stacked: Whether `v` holds several, stacked in front.
          params: Other parameters, at which nothing is linearized.

        Yields:
          The products.
        """
        compiled = self._map.several if stacked else self._map.one
        for residuals, args in zip(self._residuals, self._args, strict=True):
            if params is not None:
                yield compiled.direct(params, v, *args)
            elif residuals is None:
                yield compiled.direct(self._params, v, *args)
            else:
                yield compiled.apply(residuals, self._params, v, *args)

    def _product(self, v, *, stacked):
        try:
            return summed(self.parts(v, stacked=stacked))
        except Exception as error:
            if self.folding != FOLDED or _is_of_device(error):
                raise
            before = self._residuals, self.batches
            try:
                self._residuals, self.batches = self._linearized(fold=False)
                found = summed(self.parts(v, stacked=stacked))
            except Exception:
                # An error that has nothing to do with folding.
                self._residuals, self.batches = before
                raise
            self._say_why(error)
            return found

    def at(self, params: PyTree) -> collections.abc.Callable[[PyTree], PyTree]:
        """The map at other parameters of the same shapes, differentiated anew."""
        return lambda v: summed(self.parts(v, params=params))

    def __call__(self, v: PyTree) -> PyTree:
        """The product with one vector."""
        return self._product(v, stacked=False)

    def stacked(self, vs: PyTree) -> PyTree:
        """The products with vectors stacked along the first axis, by one compiled call."""
        return self._product(vs, stacked=True)


class CompiledMap:
    """A linear map's compiled functions, which do not depend on the parameters' values.

    Products at other parameters of the same shapes and shardings, such as those of the
    next checkpoint, compile nothing.

    Attributes:
      one: The products with one vector.
      several: The products with vectors stacked in front.
    """

    def __init__(self, linear_map: LinearMap):
        """Compiles nothing yet.

        Args:
          linear_map: The product, such as `hessian_map(loss)`.
        """
        self._map, self._compiled = linear_map, {}

        def apply(residuals, params, v, *args):
            return linear_map.apply(residuals.whole(), params, v, *args)

        self.one = _Compiled(apply, linear_map.direct)
        self.several = _Compiled(
            lambda residuals, params, vs, *args: jax.vmap(
                lambda v: apply(residuals, params, v, *args)
            )(vs),
            lambda params, vs, *args: jax.vmap(
                lambda v: linear_map.direct(params, v, *args)
            )(vs),
        )

    def linearized(self, fold: bool, *args: PyTree) -> typing.Any:
        """The linearization compiled for arguments like these; its residuals are `Kept`.

        Args:
          fold: Whether it rewrites the linear functions.
          *args: The parameters and the further arguments of a batch.
        """

        def linearize(params, *more):
            residuals = self._map.linearize(params, *more)
            return self._map.fold(residuals, params) if fold else residuals

        key = fold, compiled_for(args)
        if key not in self._compiled:
            kept = uniform.kept(linearize, *args)
            self._compiled[key] = jax.jit(kept).lower(*args).compile()
        return self._compiled[key]

    def residuals(self, fold: bool, *args: PyTree) -> PyTree:
        """The shapes, types and shardings of the residuals of `linearized`."""
        return layout.described(self.linearized(fold, *args).out_info)


def fits(need: int, used: int, budget: int) -> bool:
    """Whether the residuals of one more batch may be kept.

    Args:
      need: Their bytes on each device.
      used: Bytes of those that are kept already.
      budget: Bytes that all of them may take; 0: none are kept.
    """
    return budget > 0 and used + need <= budget


def compiled_for(args: PyTree) -> collections.abc.Hashable:
    """The structure, shapes, types and shardings that a compiled function depends on."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(
        (jnp.shape(x), jnp.result_type(x), getattr(x, "sharding", None)) for x in leaves
    )


class _Compiled:
    """A linear map's two ways to multiply, compiled at their first use."""

    def __init__(self, apply, direct):
        self.apply, self.direct = jax.jit(apply), jax.jit(direct)


def summed(parts: collections.abc.Iterable[PyTree]) -> PyTree:
    """The sum of vectors, in order, in the memory of the first.

    Args:
      parts: New arrays, as compiled functions return them; at least one.

    Returns:
      The sum, which waits for the devices once in a while (`in_flight`).
    """
    iterator, number = iter(parts), 0
    total = next(iterator)
    while (part := next(iterator, None)) is not None:
        number += 1
        total = in_flight.limited(number, _added(total, part))
        del part  # or it would be there beside the next one
    return total


@functools.partial(jax.jit, donate_argnames="total")
def _added(total, part):
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)


def _is_of_device(error) -> bool:
    """Whether memory or a device failed, which compiling anew would not fix."""
    return isinstance(error, jax.errors.JaxRuntimeError)
