r"""The solution of $A x = b$ by conjugate gradients, product by product from the host.

$x_k$ minimizes $\tfrac12 x^T A x - b^T x$ over the Krylov space of $k$ products, if $A$
is positive definite there. A direction $p$ with $p^T A p \le 0$ ends the search: $A$ is
not positive definite, and there is no minimum.

`jax.scipy.sparse.linalg.cg` takes trees, too, but it calls the product inside of a
compiled loop: the products here sum over batches on the host, and a search of hours has
to show its progress, to be saved, and to resume.

References:
  Hestenes, Stiefel 1952, Methods of conjugate gradients for solving linear systems.
  Steihaug 1983: where the search meets negative curvature.
"""

import collections.abc
import dataclasses

from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import trees


@dataclasses.dataclass
class CgState:
    r"""The state of a search, passed to `on_step` and accepted as `state`.

    Attributes:
      solution: $x_k$.
      residual: $b - A x_k$, by its recurrence.
      direction: The next direction.
      squared: The squared norms of the residuals so far, the first that of $b$.
      negative: Whether the last product showed a direction without positive curvature.
    """

    solution: PyTree
    residual: PyTree
    direction: PyTree
    squared: list[float]
    negative: bool = False

    @property
    def num_products(self) -> int:
        """Products so far."""
        return len(self.squared) - 1 + self.negative

    @property
    def relative_residual(self) -> float:
        r"""$\|b - A x_k\| / \|b\|$; zero if $b$ is zero."""
        first, last = self.squared[0], self.squared[-1]
        return (last / first) ** 0.5 if first else 0.0


def conjugate_gradients(
    matvec: trees.Matvec,
    right_side: PyTree,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 50,
    on_step: collections.abc.Callable[[CgState], None] | None = None,
    state: CgState | None = None,
) -> CgState:
    """Solves `matvec(x) = right_side`, as far as `max_steps` products go.

    A product that holds NaN or Inf raises `NonFiniteError`.

    Args:
      matvec: Product with a symmetric matrix: vector to vector.
      right_side: The right side; its shardings are kept.
      tolerance: The search ends where the residual's norm is this fraction of that of
        the right side.
      max_steps: Largest number of products.
      on_step: Called with the state after each product.
      state: A state to resume from; `right_side` is then not read.

    Returns:
      The last state: `solution`, `relative_residual`, `negative`.
    """
    if state is None:
        first = float(trees.inner(right_side, right_side))
        zero = trees.zeros_like(right_side)
        state = CgState(zero, right_side, right_side, [first])
    while (
        state.num_products < max_steps
        and not state.negative
        and state.relative_residual > tolerance
    ):
        state = _after_one_product(matvec, state)
        if on_step is not None:
            on_step(state)
    return state


def _after_one_product(matvec, state) -> CgState:
    product = matvec(state.direction)
    trees.finite_norm(product, f"product {state.num_products + 1}")
    curvature = float(trees.inner(state.direction, product))
    if curvature <= 0:
        return dataclasses.replace(state, negative=True)
    length = state.squared[-1] / curvature
    solution = trees.axpy(length, state.direction, state.solution)
    residual = trees.axpy(-length, product, state.residual)
    squared = float(trees.inner(residual, residual))
    direction = trees.axpy(squared / state.squared[-1], state.direction, residual)
    return CgState(solution, residual, direction, [*state.squared, squared])
