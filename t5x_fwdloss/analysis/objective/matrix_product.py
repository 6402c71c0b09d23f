"""A matrix at fixed parameters: many products, whose common work is done once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis.objective.finite import (
    NegativeCurvatureError,
    check_vector,
)
from t5x_fwdloss.analysis.store import multihost
from t5x_fwdloss.curvature.products import linearized
from t5x_fwdloss.curvature.products.linearized import (
    FOLDED,
    SHARE,
    AmortizedProduct,
    CompiledMap,
    LinearMap,
)
from t5x_fwdloss.curvature.vectors import probes, trees


class MatrixProduct:
    """The map from a vector to its product, or from stacked vectors to theirs.

    A product that is not finite raises `NonFiniteLossError`, which names the batch and
    the parameter block; a negative quadratic form of a semidefinite matrix raises
    `NegativeCurvatureError`.
    """

    def __init__(
        self,
        name: str,
        linear_map: CompiledMap,
        params: PyTree,
        batches: Sequence[tuple[Any, ...]],
        *,
        num_microbatches: int = 1,
        precision: str,
        memory_budget: int | None,
        fold: bool,
        is_semidefinite: Callable[[], bool] | None = None,
        rounding: Callable[[], float] = lambda: 0.0,
    ):
        """Linearizes the batches, in order, while they fit.

        Args:
            name: the matrix, as a noun phrase.
            linear_map: its product, of `in_layout`.
            params: parameters, float32 or wider.
            batches: for each batch, or piece of one, the further arguments of the map.
            num_microbatches: into how many pieces each batch is cut.
            precision: matmul precision.
            memory_budget: bytes per device to keep; None: half of the free memory.
            fold: whether to rewrite the linear functions to read less memory.
            is_semidefinite: called once a form $v^T A v$ is negative: whether that is
                an error; None: forms may have either sign, and are not computed.
            rounding: the relative error that a product may have, called then, too.
        """
        if memory_budget is None:
            # Agreed by all: a process with less memory would compile other functions.
            memory_budget = multihost.least(SHARE * linearized.free_bytes())
        self._name, self._precision = name, precision
        self._params, self._largest = params, None
        self._num_microbatches = num_microbatches
        self._is_semidefinite, self._rounding = is_semidefinite, rounding
        with jax.default_matmul_precision(precision):
            self._product = AmortizedProduct(
                linear_map,
                params,
                batches,
                memory_budget=memory_budget,
                fold=fold,
            )

    @property
    def how(self) -> str:
        """How many (micro)batches are linearized, their memory, and why not folded."""
        records = self._product.batches
        parts = "batches" if self._num_microbatches == 1 else "microbatches"
        sentence = (
            f"{self._product.num_linearized} of {len(records)} {parts} linearized, "
            f"{self.residual_bytes / 2**20:.1f} MiB per device"
        )
        if self._product.num_linearized and self._product.folding != FOLDED:
            sentence += f", {self._product.folding}"
        return sentence

    @property
    def residual_bytes(self) -> int:
        """Bytes per device that linearized batches keep."""
        return self._product.residual_bytes

    def temporary_bytes(self, v: PyTree) -> int:
        """Bytes per device that come and go in a product with one vector.

        Args:
            v: a vector that was multiplied before: then nothing is compiled.
        """
        with jax.default_matmul_precision(self._precision):
            return self._product.temporary_bytes(v)

    def __call__(self, v: PyTree) -> PyTree:
        """The product with one vector; `ValueError` for one of other shapes."""
        trees.check_like(v, self._params)
        return self._checked(self._product, v)

    def stacked(self, vs: PyTree) -> PyTree:
        """The products with vectors stacked in front, by one compiled function."""
        return self._checked(self._product.stacked, vs, stacked=True)

    def at(self, params: PyTree) -> Callable[[PyTree], PyTree]:
        """The product with one vector at other parameters.

        Nothing is linearized for them: each product differentiates anew.

        Args:
            params: parameters of the same shapes, float32 or wider.
        """
        product = self._product.at(params)
        return lambda v: self._checked(product, v, params=params)

    def _checked(self, product, argument, *, stacked=False, params=None):
        with jax.default_matmul_precision(self._precision):
            found = product(argument)
            check_vector(
                f"the product with {self._name}",
                found,
                lambda: self._product.parts(argument, stacked=stacked, params=params),
                self._num_microbatches,
            )
        self._check_sign(argument, found, stacked)
        return found

    def _check_sign(self, argument, found, stacked):
        """Reject a negative quadratic form of a semidefinite matrix.

        Raises:
            NegativeCurvatureError: with the form and the size of the matrix.
        """
        if self._is_semidefinite is None:
            return
        forms = jax.device_get(_forms(argument, found, stacked=stacked))
        form, square, product_square = map(np.atleast_1d, forms)
        lengths = np.sqrt(np.maximum(square, np.finfo(square.dtype).tiny))
        least = float((form / lengths**2).min())
        if self._largest is not None:
            self._largest = max(self._largest, _growth(lengths, product_square))
        if least >= 0 or least >= -self._rounding() * self._size():
            return
        if self._is_semidefinite():
            raise NegativeCurvatureError(
                f"{self._name} must not be negative along any vector, being positive "
                f"semidefinite: v.Av is {least:.4g} for a vector of norm one, while "
                f"products are as long as {self._size():.4g}. The compiler or a "
                "derivative rule of the model is wrong; block_size = 1 or MEMORY_BUDGET "
                "= 0 may avoid it."
            )

    def _size(self):
        # A lower bound of the matrix's norm, at first from a random vector's product.
        if self._largest is None:
            with jax.default_matmul_precision(self._precision):
                probe = probes.random_like(0, self._params)
                product = self._product(probe)
            _, square, product_square = jax.device_get(
                _forms(probe, product, stacked=False)
            )
            self._largest = _growth(np.sqrt(square), product_square)
        return self._largest


@functools.partial(jax.jit, static_argnames="stacked")
def _forms(v, product, *, stacked):
    """For each vector v.Av, v.v and Av.Av."""

    def one(v, product):
        return tuple(
            trees.inner(*pair) for pair in ((v, product), (v, v), (product, product))
        )

    return (jax.vmap(one) if stacked else one)(v, product)


def _growth(lengths, product_squares) -> float:
    return float((np.sqrt(product_squares) / lengths).max())


def in_layout(linear_map: LinearMap, layout: PyTree | None) -> CompiledMap:
    """A linear map whose products have these shardings, compiled once.

    Args:
        linear_map: its product, split into linearization and application.
        layout: the shardings of `parameters.shardings`, or None.
    """
    return CompiledMap(
        LinearMap(
            linear_map.linearize,
            linear_map.fold,
            _constrained(linear_map.apply, layout),
            _constrained(linear_map.direct, layout),
        )
    )


def _constrained(product, layout):
    # The compiler would choose the results' shardings; vectors keep the parameters'.
    def laid_out(*args):
        found = product(*args)
        if layout is None:
            return found
        return jax.lax.with_sharding_constraint(found, layout)

    return laid_out
