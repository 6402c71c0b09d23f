r"""The Krylov space of a symmetric map, grown one product at a time from the host.

Notation: the basis $v_1 \dots v_n$ is orthonormal, its first $j$ vectors are *expanded*
(multiplied by $A$ once), and $A v_i = \sum_l T_{l i} v_l$ for $i \le j$. So the leading
$j \times j$ part of $T$ is $A$ projected on the expanded vectors, and the rows below it
couple to those still to be expanded. One start vector gives Lanczos, several give band
Lanczos (each may be deflated on its own), and after a thick restart $T$ has Ritz values
on its diagonal: one step serves all three.

A step is that of the three-term recurrence; then the overlaps with the whole basis, read
as one block, are subtracted, and once more where that shrank the norm below $1/\sqrt 2$
("twice is enough"). So the basis stays orthogonal to a few units of rounding.
Its size is bounded by thick restart (`eigenpairs`). $T$ is float64 on the host; vectors
stay on the devices.

References:
  Parlett 1998, The Symmetric Eigenvalue Problem, sections 6.9 and 13.
  Daniel, Gragg, Kaufman, Stewart 1976, Reorthogonalization and stable algorithms.
  Bai et al. 2000, Templates for Eigenvalue Problems, section 4.6 (band Lanczos).
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature.krylov import basis as basis_lib
from t5x_fwdloss.curvature.vectors import trees

# A remainder of this many units of rounding, relative to the norm of T, is noise.
BREAKDOWN = 10.0
SQRT_HALF = math.sqrt(0.5)
# A vector that the second pass also shrinks this much is in the space up to rounding.
IN_SPACE = 0.1


def rounding_level(epsilon: float, num_steps: int, rounding: float = 0.0) -> float:
    r"""How far rounding moves Ritz values and residuals, relative to the norm of $A$.

    A step leaves up to `BREAKDOWN` units of rounding in its column of $T$: the error of
    the product and of its orthogonalization, and a remainder that is taken for noise.
    The errors of $k$ columns together have a norm of at most $\sqrt k$ times that, and
    no eigenvalue of $T$ moves farther (Weyl). So the level is

    $$ \max(10\, \epsilon \sqrt k,\; \rho). $$

    Args:
      epsilon: The unit of rounding $\epsilon$ of the products (`trees.epsilon`).
      num_steps: The number of products $k$.
      rounding: A measured relative error $\rho$ of the products, where they are computed
        in a narrower type than their result has.

    Returns:
      The level, to be multiplied by the norm of $A$, the largest $|\theta|$.
    """
    return max(BREAKDOWN * epsilon * math.sqrt(num_steps), rounding)


@dataclasses.dataclass
class Krylov:
    """A growing Krylov space: the basis, the projected matrix, and a counter.

    Attributes:
      basis: The orthonormal vectors.
      projected: $T$, float64 `[n, n]`; column $i$ is known once $v_i$ is expanded.
      num_expanded: $j$.
      num_products: Products with $A$ so far.
    """

    basis: basis_lib.Basis
    projected: Float[np.ndarray, "n n"] = dataclasses.field(
        default_factory=lambda: np.zeros((0, 0))
    )
    num_expanded: int = 0
    num_products: int = 0

    @property
    def _eps(self) -> float:
        return trees.epsilon(self.basis.like)

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
        """Adds a vector to be expanded, made orthogonal to the basis.

        NaN or Inf in it raises `NonFiniteError`, as in `expand`.

        Args:
          vector: The vector; any norm.
          name: Its name in error messages.

        Returns:
          Whether it was linearly independent of the basis.
        """
        rest, _, before, after = self.cleared(vector, name)
        if after <= BREAKDOWN * self._eps * before:
            return False
        self._append(rest, after)
        return True

    def cleared(
        self, vector: PyTree, name: str
    ) -> tuple[PyTree, np.ndarray, float, float]:
        """A vector without its part in the span of the basis.

        NaN or Inf in it raises `NonFiniteError`.

        Args:
          vector: The vector; not modified.
          name: Its name in error messages.

        Returns:
          The rest, the coefficients of what was subtracted, and the norms of vector and
          rest.
        """
        before = trees.finite_norm(vector, name)
        # A copy, because Gram-Schmidt reuses the memory of its argument.
        rest, coefficients, after = self._orthogonalized(
            trees.scale(1.0, vector), before, name
        )
        return rest, coefficients, before, after

    def _append(self, w, length):
        self.basis.append(w, 1.0 / length, donate=True)
        size = self.basis.size
        grown = np.zeros((size, size))
        grown[: size - 1, : size - 1] = self.projected
        self.projected = grown

    def expand(self, matvec: trees.Matvec) -> float:
        r"""One step: multiplies the next vector by $A$ and appends the new part.

        Args:
          matvec: The product with $A$, a symmetric linear map. It must not keep its
            result, whose memory is reused.

        Returns:
          The norm of the new part, zero at a breakdown: no vector was appended.
        """
        j, size = self.num_expanded, self.basis.size
        name = f"Lanczos step {self.num_products + 1}"
        v = self.basis.row(j)
        w = matvec(v)
        self.num_products += 1

        # The coupling to the vector before is known from the symmetry of T. Further
        # ones, in a band or after a restart, are left to the passes.
        known, previous, coefficient = np.flatnonzero(self.projected[j, :j]), None, 0.0
        if len(known):
            previous = self.basis.row(int(known[-1]))
            coefficient = float(self.projected[j, known[-1]])
        w, alpha, length = self.basis.local_step(w, v, previous, coefficient)
        before = trees.checked_norm(length, w, name)
        w, column, after = self._orthogonalized(w, before, name)
        column[j] += float(alpha)
        self._store(column)

        if after <= BREAKDOWN * self._eps * self.scale():
            return 0.0
        self._append(w, after)
        self.projected[size, j] = self.projected[j, size] = after
        return after

    def _orthogonalized(self, w, before, name):
        """The rest of `w`, which is donated, the coefficients subtracted, its norm.

        The norm is zero where the rest lies in the space up to rounding.
        """
        coefficients, after = np.zeros(self.basis.size), before
        for number in range(2 if self.basis.size else 0):
            overlaps = self.basis.coefficients(w)
            w = self.basis.subtract(w, overlaps)
            coefficients += overlaps
            last, after = after, trees.finite_norm(w, name)
            if after >= SQRT_HALF * last:
                break
            if number == 1 and after < IN_SPACE * last:
                after = 0.0
        return w, coefficients, after

    def _store(self, column):
        """Puts column `j` into the projected matrix, which stays symmetric."""
        j = self.num_expanded
        column[:j] = self.projected[j, :j]
        self.projected[:, j] = column
        self.projected[j, :] = column
        self.num_expanded += 1
