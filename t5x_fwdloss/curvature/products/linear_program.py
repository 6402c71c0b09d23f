"""A linear function as a list of steps over constants, to be applied to many vectors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of the rewritten function.

    Attributes:
        function: from values of variables and constants to values of the results.
        variables: numbers of the variables it reads.
        constants: numbers of the constants it reads.
        results: numbers of the variables it writes.
    """

    function: Callable[..., Sequence[Array]]
    variables: tuple[int, ...]
    constants: tuple[int, ...]
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A rewritten linear function, from trees to trees.

    Attributes:
        steps: its operations, in order.
        results: numbers of the variables that it returns.
        structure: the structure of the tree that it returns.
    """

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    structure: Any


@jax.tree_util.register_pytree_node_class
class Folded:
    """Rewritten linear functions and the constants that they share.

    The constants are the leaves of this tree, so that it can leave the traced function
    in which it was made.
    """

    def __init__(self, constants: Sequence[Any], programs: tuple[Program, ...]):
        """Stores the results of `fold`."""
        self.constants, self.programs = list(constants), programs

    def tree_flatten(self) -> tuple[list[Any], tuple[Program, ...]]:
        """The constants, and the functions' steps."""
        return self.constants, self.programs

    @classmethod
    def tree_unflatten(cls, programs, constants) -> "Folded":
        """The functions with these constants."""
        return cls(constants, programs)

    def __call__(self, tree: PyTree, number: int = 0) -> PyTree:
        """Linear function number `number`."""
        program = self.programs[number]
        values = dict(enumerate(jax.tree.leaves(tree)))
        for step in program.steps:
            found = step.function(
                *(values[i] for i in step.variables),
                *(self.constants[i] for i in step.constants),
            )
            values.update(zip(step.results, found, strict=True))
        leaves = [values[i] for i in program.results]
        return jax.tree.unflatten(program.structure, leaves)
