"""What a run will take, measurement by measurement: nothing is restored or measured.

A measurement's `work` counts its products and its vectors; the functions that the run
compiles give the bytes and the operations of one product. The memory of a measurement
is the largest of several moments: the linearization of the last batch, a product with
the basis complete, a restart of the basis, and products at other parameters, by which
the rounding of a narrow network is measured.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.work import Work
from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.plan import compiled as compiled_lib
from t5x_fwdloss.curvature.products import linearized
from t5x_fwdloss.curvature.vectors import layout, trees


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run that is to be planned.

    Attributes:
        objective: the loss over one batch like all others; its values do not matter.
        params: the shapes, types and shardings of the parameters.
        measurements: the measurements.
        num_batches: the number of batches of the run.
        memory_budget: as of the run; None: half of the memory that is free.
        fold: as of the run.
        device_bytes: the memory of a device; None: it is not known.
    """

    objective: Objective
    params: PyTree
    measurements: Sequence[Any]
    num_batches: int
    memory_budget: int | None = None
    fold: bool = True
    device_bytes: int | None = None

    @property
    def num_pieces(self) -> int:
        """The number of batches, or of the microbatches that they are cut into."""
        return self.num_batches * self.objective.num_microbatches

    @property
    def wide(self) -> PyTree:
        """The parameters as the run has them."""
        return parameters.widened(self.params)

    @property
    def vector(self) -> PyTree:
        """A vector."""
        return layout.described(trees.float_part(self.wide))

    @property
    def standing(self) -> int:
        """Bytes that are there from the beginning: the parameters and the batches."""
        batch = compiled_lib.device_bytes(self.objective.batches[0])
        total = compiled_lib.device_bytes(self.wide) + batch * self.num_pieces
        narrow = [
            x
            for x, y in zip(
                jax.tree.leaves(self.params), jax.tree.leaves(self.wide), strict=True
            )
            if x.dtype != y.dtype
        ]
        return total + compiled_lib.device_bytes(narrow)

    @property
    def budget(self) -> int:
        """Bytes that residuals may take, as the run chooses them."""
        if self.memory_budget is not None:
            return self.memory_budget
        if self.device_bytes is None:
            return int(linearized.SHARE * linearized.free_bytes())
        return max(int(linearized.SHARE * (self.device_bytes - self.standing)), 0)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one measurement takes on each device; the bytes add up to its largest moment.

    Attributes:
        name: its name.
        parameters: bytes of the parameters and the batches.
        residuals: bytes of what linearized batches keep.
        basis: bytes of the vectors that it, or the run, holds.
        temporaries: bytes that come and go.
        on_host: bytes of vectors in host memory.
        num_products: products with one vector, at most; None: it is not planned.
        num_linearized: how many of the (micro)batches are linearized.
        flops: operations of all products.
    """

    name: str
    parameters: int
    residuals: int = 0
    basis: int = 0
    temporaries: int = 0
    on_host: int = 0
    num_products: int | None = None
    num_linearized: int = 0
    flops: float = 0.0

    @property
    def total(self) -> int:
        """Bytes on each device."""
        return self.parameters + self.residuals + self.basis + self.temporaries


@dataclasses.dataclass(frozen=True)
class Product:
    """One product with a matrix over all batches, as the run computes it.

    Attributes:
        num_linearized: how many of the (micro)batches are linearized.
        residuals: bytes that they keep.
        linearizing: bytes that linearizing one of them takes besides.
        during: bytes that come and go during the product, its result included.
        flops: operations for one vector.
    """

    num_linearized: int
    residuals: int
    linearizing: int
    during: int
    flops: float


def rows(planned: Planned) -> list[Row]:
    """A row for the run's own checks and for each measurement, in order."""
    vector = compiled_lib.device_bytes(planned.vector)
    rounded = jnp.finfo(planned.objective.activation_dtype(planned.wide)).bits < 32
    checks = _checks(planned, vector)
    found, kept, loaded = [checks], 0, 0
    for measurement in planned.measurements:
        work = measurement.work(planned.params)
        if work is None:
            found.append(Row(measurement.name, planned.standing))
            continue
        loaded = max(loaded, int(bool(measurement.optimizer_setting)))
        row = _row(planned, work, vector, kept + loaded, rounded=rounded)
        found.append(dataclasses.replace(row, name=measurement.name))
        kept = max(kept, int(work.gradient))
    return found


def product(planned: Planned, matrix: str, block_size: int = 1) -> Product:
    """One product with a matrix, or with several vectors at once.

    Args:
        planned: the run.
        matrix: its name.
        block_size: 1, or how many vectors are stacked.
    """
    objective, number = planned.objective, planned.num_pieces
    functions = objective.linear_map(matrix, planned.wide)
    args = (planned.wide, *next(objective.pairs()))
    compiled = functions.one if block_size == 1 else functions.several
    v = planned.vector if block_size == 1 else _stacked(planned.vector, block_size)
    need = linearizing = kept = 0
    sizes, flops = [], 0.0
    with jax.default_matmul_precision(objective.precision):
        if planned.budget > 0:
            memory = functions.linearized(planned.fold, *args).memory_analysis()
            need, linearizing = memory.output_size_in_bytes, memory.temp_size_in_bytes
            while kept < number and linearized.fits(need, kept * need, planned.budget):
                kept += 1
        if kept:
            residuals = functions.residuals(planned.fold, *args)
            size = compiled_lib.size_of(
                compiled.apply, residuals, planned.wide, v, *args[1:]
            )
            sizes.append(size)
            flops += kept * size.flops
        if kept < number:
            size = compiled_lib.size_of(compiled.direct, args[0], v, *args[1:])
            sizes.append(size)
            flops += (number - kept) * size.flops
    # The sum over batches is there beside the result of the next one.
    results = min(number, 2)
    during = max(size.temporary + results * size.output for size in sizes)
    return Product(kept, kept * need, linearizing, during, flops / block_size)


def _row(planned, work: Work, vector: int, kept: int, *, rounded: bool) -> Row:
    found = product(planned, work.matrix, work.block_size)
    basis = (work.basis - work.on_host + kept) * vector
    largest = compiled_lib.largest_leaf_bytes(planned.vector)
    moments = [
        found.during + work.working * vector,
        found.linearizing - basis,
        work.replaced * largest,
    ]
    num_products, flops = work.num_products, work.num_products * found.flops
    if rounded:
        anew = product(dataclasses.replace(planned, memory_budget=0), work.matrix)
        # The moved parameters, and the argument.
        held = (work.num_results + kept + 2) * vector
        moments.append(anew.during + held - basis)
        num_products += work.rounded_products
        flops += work.rounded_products * anew.flops
    return Row(
        name="",
        parameters=planned.standing,
        residuals=found.residuals,
        basis=basis,
        temporaries=max(moments),
        on_host=work.on_host * vector,
        num_products=num_products,
        num_linearized=found.num_linearized,
        flops=flops,
    )


def _checks(planned, vector) -> Row:
    """The run's own checks: a gradient and three products, beside six vectors."""
    first = [m.first_matrix for m in planned.measurements if m.first_matrix]
    gradient = compiled_lib.size_of_traced(
        planned.objective.traced_gradient(planned.params)
    )
    results = min(planned.num_pieces, 2)
    row = Row(
        "checks",
        planned.standing,
        basis=0,
        temporaries=gradient.temporary + results * gradient.output + vector,
        flops=planned.num_pieces * gradient.flops,
    )
    if not first:
        return row
    found = product(planned, first[0])
    temporaries = max(row.temporaries, found.linearizing, found.during + 6 * vector)
    return dataclasses.replace(
        row,
        residuals=found.residuals,
        temporaries=temporaries,
        num_products=3,
        num_linearized=found.num_linearized,
        flops=row.flops + 3 * found.flops,
    )


def _stacked(vector, count) -> PyTree:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (count, *x.shape),
            x.dtype,
            sharding=layout.stacked_sharding(x.sharding),
        ),
        vector,
    )
