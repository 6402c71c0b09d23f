r"""The Krylov space of a symmetric map, grown one product at a time from the host.

Notation: the basis $v_1 \dots v_n$ is orthonormal, its first $j$ vectors are *expanded*
(multiplied by $A$ once), and $A v_i = \sum_l T_{l i} v_l$ for $i \le j$. So the leading
$j \times j$ part of $T$ is $A$ projected on the expanded vectors, and the rows below it
couple to those still to be expanded. One start vector gives Lanczos, several give band
Lanczos (each may be deflated on its own), and after a thick restart $T$ has Ritz values
on its diagonal: one step serves all three.

A step subtracts the couplings that symmetry already tells, then the whole basis is
projected out once, and a second time only where the norm fell below $1/\sqrt 2$ of what
it was ("twice is enough"). $T$ is float64 on the host; vectors stay on the devices.

References:
  Parlett 1998, The Symmetric Eigenvalue Problem, sections 6.9 and 13.
  Daniel, Gragg, Kaufman, Stewart 1976, Reorthogonalization and stable algorithms.
  Bai et al. 2000, Templates for Eigenvalue Problems, section 4.6 (band Lanczos).
  Wu, Simon 2000, Thick-restart Lanczos method for large symmetric eigenproblems.
"""

import collections.abc
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature import basis, errors, trees

Matvec = collections.abc.Callable[[PyTree], PyTree]

# A remainder of this many units of rounding, relative to the norm of T, is noise.
BREAKDOWN = 10.0
SQRT_HALF = math.sqrt(0.5)


class Krylov:
    """A growing Krylov space: the basis, the projected matrix, and counters.

    Attributes:
      basis: The orthonormal vectors.
      projected: $T$, float64 `[n, n]`; column $i$ is known once $v_i$ is expanded.
      num_expanded: $j$.
      num_products: Products with $A$ so far.
      num_second_passes: Steps that needed the second Gram-Schmidt pass.
    """

    def __init__(
        self, like: PyTree, *, rows_per_block: int = 8, basis_on_host: bool = False
    ):
        """An empty space.

        Args:
          like: A vector that gives shapes, types and shardings.
          rows_per_block: Vectors that are stacked in one block.
          basis_on_host: Whether full blocks are kept in pinned host memory.
        """
        self.basis = basis.Basis(
            like, rows_per_block=rows_per_block, on_host=basis_on_host
        )
        self.projected = np.zeros((0, 0))
        self.num_expanded = 0
        self.num_products = 0
        self.num_second_passes = 0
        self._eps = max(
            float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(like)
        )

    @property
    def exhausted(self) -> bool:
        """Whether the space is invariant: every vector is expanded."""
        return self.num_expanded == self.basis.size

    def scale(self) -> float:
        """An estimate of the norm of $A$: the largest column norm of $T$ so far."""
        if not self.num_expanded:
            return 0.0
        return float(np.linalg.norm(self.projected, axis=0).max())

    def add_start(self, vector: PyTree, name: str = "start vector") -> bool:
        """Adds a vector to be expanded, made orthogonal to those there.

        NaN or Inf in it raises `NonFiniteError`, as in `expand`.

        Args:
          vector: The vector; any norm.
          name: What an error calls it.

        Returns:
          Whether it was independent of the vectors there.
        """
        before = _finite_norm(vector, name)
        rest, after = vector, before
        for _ in range(3 if self.basis.size else 0):
            last = after
            rest, _ = self.basis.project_out(rest)
            after = _finite_norm(rest, name)
            if after >= SQRT_HALF * last:
                break
        if after <= BREAKDOWN * self._eps * before:
            return False
        self._append(rest, after)
        return True

    def _append(self, w, length):
        self.basis.append(w, 1.0 / length)
        size = self.basis.size
        grown = np.zeros((size, size))
        grown[: size - 1, : size - 1] = self.projected
        self.projected = grown

    def expand(self, matvec: Matvec) -> float:
        r"""Multiplies the next vector by $A$ and appends what is new, one step.

        Args:
          matvec: The product with $A$, a symmetric linear map.

        Returns:
          The norm of the new part, zero at a breakdown: no vector was appended.
        """
        j, size = self.num_expanded, self.basis.size
        name = f"Lanczos step {self.num_products + 1}"
        v = self.basis.row(j)
        w = matvec(v)
        self.num_products += 1

        # Couplings to expanded vectors are known from the symmetry of T.
        known = np.flatnonzero(self.projected[j, :j])
        if len(known) > 8:
            known = known[-1:]  # after a restart: leave them to the full passes
        for i in known[:-1]:
            w = trees.axpy(-self.projected[j, i], self.basis.row(int(i)), w)
        previous, coefficient = v, 0.0
        if len(known):
            coefficient = float(self.projected[j, known[-1]])
            previous = self.basis.row(int(known[-1]))
        w, alpha, length = self.basis.local_step(w, v, previous, coefficient)
        before = _checked(length, w, name)
        column = np.zeros(size)
        column[j] = float(alpha)

        w, correction = self.basis.project_out(w)
        column += correction
        after = _finite_norm(w, name)
        if after < SQRT_HALF * before:
            self.num_second_passes += 1
            before = after
            w, correction = self.basis.project_out(w)
            column += correction
            after = _finite_norm(w, name)
        column[:j] = self.projected[j, :j]
        self.projected[:size, j] = column
        self.projected[j, j:size] = column[j:]
        self.num_expanded += 1

        noise = BREAKDOWN * self._eps * self.scale()
        # Twice is enough: what shrinks again lies in the space, up to rounding.
        if after <= noise or after < 0.1 * before:
            return 0.0
        self._append(w, after)
        self.projected[size, j] = self.projected[j, size] = after
        return after

    def ritz(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values (ascending), their coefficients by column, residual norms."""
        j = self.num_expanded
        values, vectors = np.linalg.eigh(self.projected[:j, :j])
        coupling = self.projected[j:, :j] @ vectors
        return values, vectors, np.linalg.norm(coupling, axis=0)

    def ritz_vector(self, coefficients: np.ndarray) -> PyTree:
        """The vector with the given coefficients in the expanded basis."""
        padded = np.zeros(self.basis.size)
        padded[: self.num_expanded] = coefficients
        return self.basis.combination(padded)

    def restart(self, keep: np.ndarray, num_values: np.ndarray | None = None) -> None:
        """Thick restart: keeps some Ritz vectors and the vectors not yet expanded.

        Args:
          keep: Coefficients of the Ritz vectors kept, `[num_expanded, kept]`.
          num_values: Their Ritz values; computed from `projected` where not given.
        """
        j, size, kept = self.num_expanded, self.basis.size, keep.shape[1]
        rotation = np.zeros((size, kept + size - j))
        rotation[:j, :kept] = keep
        rotation[j:, kept:] = np.eye(size - j)
        if num_values is None:
            num_values = np.einsum("ik,ij,jk->k", keep, self.projected[:j, :j], keep)
        projected = np.zeros((kept + size - j,) * 2)
        projected[np.arange(kept), np.arange(kept)] = num_values
        projected[kept:, :kept] = self.projected[j:, :j] @ keep
        projected[:kept, kept:] = projected[kept:, :kept].T
        self.basis = self.basis.rotated(rotation)
        self.projected = projected
        self.num_expanded = kept


def _finite_norm(w, name):
    return _checked(trees.norm(w), w, name)


def _checked(length, w, name):
    value = float(length)
    if not math.isfinite(value):
        trees.check_finite(w, name)
        raise errors.NonFiniteError(name, ())
    return value
