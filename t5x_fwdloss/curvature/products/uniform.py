"""Residuals that hold one number everywhere: the number is noted, the array is not kept.

The linear functions of `where` and `relu` have arrays of zeros among their residuals.
Nothing says how such an array lies on a mesh, so that each device would hold all of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import PyTree

# Operations whose result holds one number if their argument does.
SAME_NUMBER = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reshape",
    "squeeze",
    "transpose",
}


@dataclasses.dataclass(frozen=True)
class Uniform:
    """An array that holds one number.

    Attributes:
        number: its bytes.
        dtype: its type.
        shape: its shape.
    """

    number: bytes
    dtype: np.dtype
    shape: tuple[int, ...]

    def array(self) -> jax.Array:
        """The array."""
        return jnp.full(self.shape, np.frombuffer(self.number, self.dtype)[0])


@jax.tree_util.register_pytree_node_class
class Kept:
    """The residuals of a linear function but for those that hold one number."""

    def __init__(
        self, arrays: Sequence[Any], others: tuple[Uniform | None, ...], structure
    ):
        """Stores what `kept` found: for each leaf its one number, or None."""
        self.arrays, self.others, self.structure = list(arrays), others, structure

    def tree_flatten(self) -> tuple[list[Any], tuple[Any, Any]]:
        """The arrays, and what is known without them."""
        return self.arrays, (self.others, self.structure)

    @classmethod
    def tree_unflatten(cls, static, arrays):
        """The inverse."""
        return cls(arrays, *static)

    def whole(self) -> PyTree:
        """All residuals, in their structure."""
        arrays = iter(self.arrays)
        return self.structure.unflatten(
            [next(arrays) if x is None else x.array() for x in self.others]
        )


def kept(function: Callable[..., PyTree], *args: PyTree) -> Callable[..., Kept]:
    """The same function, whose result leaves out arrays that hold one known number.

    Args:
        function: pure; it is traced here, once.
        *args: arguments as it will get them: arrays or their shapes.
    """
    traced = jax.jit(function).trace(*args)
    jaxpr = traced.jaxpr
    numbers = _numbers(jaxpr.jaxpr, [None] * len(jaxpr.jaxpr.invars))
    others = tuple(
        None
        if number is None or not atom.aval.shape
        else Uniform(number.tobytes(), number.dtype, atom.aval.shape)
        for number, atom in zip(numbers, jaxpr.jaxpr.outvars, strict=True)
    )
    structure = jax.tree.structure(traced.out_info)
    evaluate = core.jaxpr_as_fun(jaxpr)

    def linearize(*args):
        found = evaluate(*jax.tree.leaves(args))
        arrays = [x for x, other in zip(found, others, strict=True) if other is None]
        return Kept(arrays, others, structure)

    return linearize


def _numbers(jaxpr, given) -> list[np.ndarray | None]:
    """The one number of each result of a program, or None.

    Args:
        jaxpr: the program.
        given: the same of its arguments.
    """
    known = dict(zip(jaxpr.invars, given, strict=True))

    def number(atom):
        if isinstance(atom, core.Literal):
            value = np.asarray(atom.val)
            return value if value.ndim == 0 else None
        return known.get(atom)

    for eqn in jaxpr.eqns:
        arguments = [number(x) for x in eqn.invars]
        found = [None] * len(eqn.outvars)
        name = eqn.primitive.name
        if name in SAME_NUMBER and arguments[0] is not None:
            found = [arguments[0]]
        elif name == "jit":
            found = _numbers(eqn.params["jaxpr"].jaxpr, arguments)
        elif name == "scan":
            # What differs from step to step is not known; the rest is stacked.
            num_constants = eqn.params["num_consts"]
            constants, rest = arguments[:num_constants], arguments[num_constants:]
            inner = eqn.params["jaxpr"].jaxpr
            found = _numbers(inner, constants + [None] * len(rest))
            num_carried = eqn.params["num_carry"]
            found = [None] * num_carried + found[num_carried:]
        for variable, value in zip(eqn.outvars, found, strict=True):
            if value is not None:
                known[variable] = value.astype(variable.aval.dtype)
    return [number(x) for x in jaxpr.outvars]
