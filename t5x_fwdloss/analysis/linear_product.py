"""A matrix at fixed parameters: many products, the common work of which is done once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from t5x_fwdloss.analysis import agreement, parameters
from t5x_fwdloss.analysis.finite import check_finite
from t5x_fwdloss.analysis.programs import all_finite, largest_magnitudes
from t5x_fwdloss.curvature import amortized, trees
from t5x_fwdloss.curvature.amortized import (
    FOLDED,
    SHARE,
    AmortizedProduct,
    LinearMap,
)


class LinearProduct:
    """The map from a vector to its product, or from stacked vectors to theirs."""

    def __init__(
        self,
        name: str,
        linear_map: LinearMap,
        params: PyTree,
        batches: Sequence[tuple[Any, ...]],
        *,
        precision: str,
        memory_budget: int | None,
        fold: bool,
        blame: Callable[[PyTree], Any],
    ):
        """Linearizes the batches, in order, while they fit.

        Args:
            name: the matrix, as a noun phrase.
            linear_map: its product, split.
            params: parameters, float32 or wider.
            batches: for each batch the further arguments of the map.
            precision: matmul precision.
            memory_budget: bytes a device that may be kept; None: half of the free.
            fold: whether to rewrite the linear functions to read less memory.
            blame: called with a vector whose product is not finite; raises an error
                that says where, if it can.
        """
        if memory_budget is None:
            # Agreed: a process with less memory would compile other functions.
            memory_budget = agreement.least(SHARE * amortized.free_bytes())
        self._name, self._precision, self._blame = name, precision, blame
        constrained = LinearMap(
            linear_map.linearize,
            linear_map.fold,
            _in_layout(linear_map.apply, params),
            _in_layout(linear_map.direct, params),
        )
        with jax.default_matmul_precision(precision):
            self._product = AmortizedProduct(
                constrained,
                params,
                batches,
                memory_budget=memory_budget,
                fold=fold,
            )

    @property
    def how(self) -> str:
        """How many batches are linearized, what that takes, and if they are not folded."""
        records = self._product.batches
        kept = sum(record.residual_bytes for record in records if record.linearized)
        sentence = (
            f"{self._product.num_linearized} of {len(records)} batches linearized, "
            f"{kept / 2**20:.1f} MiB a device"
        )
        if self._product.num_linearized and self._product.folding != FOLDED:
            sentence += f", {self._product.folding}"
        return sentence

    def __call__(self, v: PyTree) -> PyTree:
        """The product with one vector."""
        return self._checked(self._product, v, lambda v: [v])

    def stacked(self, vs: PyTree) -> PyTree:
        """The products with vectors stacked in front, by one compiled program."""
        return self._checked(self._product.stacked, vs, trees.unstack)

    def at(self, params: PyTree) -> Callable[[PyTree], PyTree]:
        """The product with one vector at other parameters.

        Nothing is linearized for them: each product differentiates anew.

        Args:
            params: parameters of the same shapes, float32 or wider.
        """
        product = self._product.at(params)
        return lambda v: self._checked(product, v, lambda _: ())

    def _checked(self, product, argument, one_by_one):
        with jax.default_matmul_precision(self._precision):
            found = product(argument)
        if not all_finite(found):
            for v in one_by_one(argument):
                self._blame(v)
            name = f"the product with {self._name}"
            check_finite(name, [("the sum over batches", largest_magnitudes(found))])
        return found


def _in_layout(product, params):
    # The compiler would choose the results' shardings; vectors keep the parameters'.
    layout = parameters.shardings(params)

    def laid_out(*args):
        found = product(*args)
        if layout is None:
            return found
        return jax.lax.with_sharding_constraint(found, layout)

    return laid_out
