"""Values in a linear jaxpr: linear combinations of its variables, and constants."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Form:
    """A sum of variables times coefficients; None means the coefficient one."""

    terms: dict[int, Array | np.ndarray | float | None]

    @property
    def num_arrays(self) -> int:
        """How many coefficients take memory."""
        return sum(c is not None and jnp.ndim(c) > 0 for c in self.terms.values())

    def plus(self, other: "Form") -> "Form":
        """The sum of two linear combinations."""
        terms = dict(self.terms)
        for i, c in other.terms.items():
            if i not in terms:
                terms[i] = c
                continue
            ours, theirs = (1.0 if x is None else x for x in (terms[i], c))
            terms[i] = jnp.asarray(combined(operator.add, ours, theirs))
        return Form(terms)


@dataclasses.dataclass(frozen=True)
class Fill:
    """An array of one number, made in every product: zeros of unused parameters."""

    number: Any
    aval: Any

    def array(self) -> Array:
        """The array."""
        return jnp.full(self.aval.shape, self.number, self.aval.dtype)


@dataclasses.dataclass
class Pool:
    """Constants, each stored once, whichever functions read it.

    Attributes:
        constants: the constants that a step reads.
        numbers: their positions, by identity.
        made: results by operation and operands, so that each is computed once.
    """

    constants: list[Any]
    numbers: dict[int, int]
    made: dict[Any, tuple[Any, Any]]

    def number(self, value: Any) -> int:
        """The position of a constant."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.constants)
            self.constants.append(value)
        return self.numbers[id(value)]

    def compute(self, name: Any, function: Callable[..., Any], *values: Any) -> Any:
        """`function(*values)`, computed once for the same name and values."""
        key = name, tuple(map(id, values))
        if key not in self.made:
            # Keeps the values alive, so that none of their ids is reused.
            self.made[key] = values, function(*values)
        return self.made[key][1]

    def product(self, left: Any, right: Any) -> Any:
        """The elementwise product of two coefficients; None is one."""
        if left is None or right is None:
            return right if left is None else left
        pair = sorted((left, right), key=id)
        return self.compute("product", lambda *x: combined(operator.mul, *x), *pair)


def combined(operation: Callable[..., Any], left: Any, right: Any) -> Any:
    """The sum or the product of two coefficients, in float32 at least.

    The jaxpr itself never computes it: it applies one coefficient after the other, to
    values that keep the results within the range of a narrow type.
    """
    if isinstance(left, float) and isinstance(right, float):
        return operation(left, right)
    dtype = wider(_dtype(left), _dtype(right), jnp.float32)
    return operation(jnp.asarray(left, dtype), jnp.asarray(right, dtype))


def scaled(variable: Array, coefficient: Any) -> Array:
    """A variable times a coefficient, in the wider of their types."""
    dtype = wider(variable.dtype, _dtype(coefficient))
    return variable.astype(dtype) * jnp.asarray(coefficient, dtype)


def wider(*dtypes: Any) -> Any:
    """The widest of several floating types."""
    return max(map(jnp.dtype, dtypes), key=lambda dtype: dtype.itemsize)


def _dtype(coefficient):
    is_float = isinstance(coefficient, float)
    return jnp.dtype(jnp.float32) if is_float else jnp.result_type(coefficient)
