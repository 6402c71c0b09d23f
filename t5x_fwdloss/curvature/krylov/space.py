r"""The Krylov space of a symmetric map, grown one product at a time from the host.

Notation: the basis $v_1 \dots v_n$ is orthonormal, its first $j$ vectors are *expanded*
(multiplied by $A$ once), and $A v_i = \sum_l T_{l i} v_l$ for $i \le j$. So the leading
$j \times j$ part of $T$ is $A$ projected on the expanded vectors, and the rows below it
couple to those still to be expanded. One start vector gives Lanczos, several give band
Lanczos (each may be deflated on its own), and after a thick restart $T$ has Ritz values
on its diagonal: one step serves all three.

A step subtracts the couplings that symmetry already tells. Then the overlap with the whole
basis is predicted (`orthogonality`), and measured where the prediction does not rule out
that it is above the bound. What is above is subtracted, and once more where that shrank
the norm below $1/\sqrt 2$ ("twice is enough"). Overlaps below $\sqrt\epsilon$ would
already leave $T$ correct to rounding (Simon); the bound here, $\epsilon^{2/3}$, keeps the
basis orthogonal to about 2e-5 in float32. $T$ is float64 on the host; vectors stay on the
devices.

References:
  Parlett 1998, The Symmetric Eigenvalue Problem, sections 6.9 and 13.
  Simon 1984, Analysis of the symmetric Lanczos algorithm with reorthogonalization.
  Daniel, Gragg, Kaufman, Stewart 1976, Reorthogonalization and stable algorithms.
  Bai et al. 2000, Templates for Eigenvalue Problems, section 4.6 (band Lanczos).
"""

import math

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature.krylov import basis, orthogonality
from t5x_fwdloss.curvature.vectors import trees

# A remainder of this many units of rounding, relative to the norm of T, is noise.
BREAKDOWN = 10.0
SQRT_HALF = math.sqrt(0.5)
# The power of epsilon at which an overlap with the basis is subtracted.
OVERLAP_POWER = 2 / 3


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


class Krylov:
    """A growing Krylov space: the basis, the projected matrix, and counters.

    Attributes:
      basis: The orthonormal vectors.
      projected: $T$, float64 `[n, n]`; column $i$ is known once $v_i$ is expanded.
      num_expanded: $j$.
      num_products: Products with $A$ so far.
      num_passes: Steps that needed one, and two, passes of Gram-Schmidt.
      num_measured: Steps that measured their overlaps.
    """

    def __init__(self, like: PyTree, *, basis_on_host: bool = False):
        """An empty space.

        Args:
          like: A vector that gives shapes, types and shardings.
          basis_on_host: Whether all but the newest vectors are kept in pinned host
            memory.
        """
        self.basis = basis.Basis(like, on_host=basis_on_host)
        self.projected = np.zeros((0, 0))
        self.num_expanded = 0
        self.num_products = 0
        self.num_passes = [0, 0]
        self.num_measured = 0
        self.orthogonality = orthogonality.Orthogonality()
        self._eps = trees.epsilon(like)
        self._overlap_bound = self._eps**OVERLAP_POWER
        self._tiny = float(np.finfo(np.float64).tiny)

    def arrays(self) -> dict:
        """The state's arrays, a pytree to be saved (orbax takes it as it is)."""
        return {
            "vectors": list(self.basis.vectors),
            "projected": self.projected.copy(),
            "gram": self.orthogonality.gram,
        }

    def metadata(self) -> dict:
        """The rest of the state, plain numbers that JSON holds."""
        return {
            **self.basis.metadata(),
            "num_expanded": self.num_expanded,
            "num_products": self.num_products,
            "num_passes": list(self.num_passes),
            "num_measured": self.num_measured,
            "orthogonality": self.orthogonality.metadata(),
        }

    @classmethod
    def from_saved(cls, like: PyTree, arrays: dict, metadata: dict) -> "Krylov":
        """The space that `arrays` and `metadata` were taken from, bit for bit.

        Args:
          like: A vector that gives shapes, types and shardings.
          arrays: As `arrays()` gave them; vectors are put in the shardings of `like`.
          metadata: As `metadata()` gave it.

        Returns:
          The space.
        """
        space = cls(like)
        space.basis = basis.Basis.from_saved(like, arrays["vectors"], metadata)
        space.projected = np.array(arrays["projected"], np.float64)
        space.num_expanded = metadata["num_expanded"]
        space.num_products = metadata["num_products"]
        space.num_passes = list(metadata["num_passes"])
        space.num_measured = metadata["num_measured"]
        space.orthogonality = orthogonality.Orthogonality.from_saved(
            arrays["gram"], metadata["orthogonality"]
        )
        return space

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
        rest, _, before, after = self.cleared(vector, name)
        if after <= BREAKDOWN * self._eps * before:
            return False
        self._append(rest, after, np.zeros(self.basis.size))
        return True

    def cleared(
        self, vector: PyTree, name: str
    ) -> tuple[PyTree, np.ndarray, float, float]:
        """A vector without its part in the span of the basis.

        NaN or Inf in it raises `NonFiniteError`.

        Args:
          vector: The vector; stays as it is.
          name: What an error calls it.

        Returns:
          The rest, the coefficients of what was subtracted, and the norms of vector and
          rest.
        """
        before = trees.finite_norm(vector, name)
        # A copy, because Gram-Schmidt may reuse the memory of its argument.
        rest, after = trees.scale(1.0, vector), before
        coefficients = np.zeros(self.basis.size)
        for _ in range(3 if self.basis.size else 0):
            last, overlaps = after, self.basis.coefficients(rest)
            rest = self.basis.subtract(rest, overlaps)
            coefficients += overlaps
            after = trees.finite_norm(rest, name)
            if after >= SQRT_HALF * last:
                break
        return rest, coefficients, before, after

    def join(self, other: "Krylov", couplings: np.ndarray) -> None:
        r"""Takes in the space of the complement's map $P A P$, orthogonal to this one.

        $A$ takes the expanded vectors here into the span of this basis, so that their
        couplings to the other space are zero; the vectors waiting here are coupled to
        the expanded ones there. All of these are then expanded, with all of $T$ known.

        Args:
          other: The space, whose vectors are orthogonal to this basis.
          couplings: $\langle v, A q \rangle$ for the waiting vectors $v$ here, by column,
            and the expanded vectors $q$ there, by row.
        """
        j, k = self.num_expanded, other.num_expanded
        mine, theirs = np.arange(self.basis.size), np.arange(other.basis.size)
        mine, theirs = mine + k * (mine >= j), theirs + j
        theirs[k:] += self.basis.size - j
        size = len(mine) + len(theirs)
        projected, gram = np.zeros((size, size)), np.eye(size)
        for space, places in ((self, mine), (other, theirs)):
            projected[np.ix_(places, places)] = space.projected
            gram[np.ix_(places, places)] = space.orthogonality.gram
        projected[np.ix_(mine[j:], theirs[:k])] = couplings.T
        projected[np.ix_(theirs[:k], mine[j:])] = couplings
        self.basis = self.basis.joined(other.basis, j, k)
        self.projected, self.orthogonality.gram = projected, gram
        self.orthogonality.restarted = True
        self.num_expanded += k
        self.num_products += other.num_products

    def _append(self, w, length, overlaps, uncertainty=0.0):
        self.orthogonality.append(overlaps, uncertainty)
        self.basis.append(w, 1.0 / length, donate=True)
        size = self.basis.size
        grown = np.zeros((size, size))
        grown[: size - 1, : size - 1] = self.projected
        self.projected = grown

    def expand(self, matvec: trees.Matvec) -> float:
        r"""Multiplies the next vector by $A$ and appends what is new, one step.

        Args:
          matvec: The product with $A$, a symmetric linear map. It must not keep its
            result, whose memory is used again.

        Returns:
          The norm of the new part, zero at a breakdown: no vector was appended.
        """
        j, size = self.num_expanded, self.basis.size
        name = f"Lanczos step {self.num_products + 1}"
        v = self.basis.row(j)
        w = matvec(v)
        self.num_products += 1

        # Couplings to expanded vectors are known from the symmetry of T.
        known = [int(i) for i in np.flatnonzero(self.projected[j, :j])]
        if len(known) > 8:
            known = known[-1:]  # after a restart: leave them to the full passes
        for i in known[:-1]:
            w = trees.axpy(-self.projected[j, i], self.basis.row(i), w)
        previous, coefficient, overlap = None, 0.0, 0.0
        if known:
            previous = self.basis.row(known[-1])
            coefficient = float(self.projected[j, known[-1]])
            overlap = float(self.orthogonality.gram[j, known[-1]])
        w, alpha, length = self.basis.local_step(w, v, previous, coefficient, overlap)
        after = trees.checked_norm(length, w, name)
        column = np.zeros(size)
        column[j] = float(alpha)

        w, after, overlaps = self._reorthogonalized(w, after, column, name)
        self._store(column)

        if after <= BREAKDOWN * self._eps * self.scale():
            return 0.0
        self._append(w, after, *overlaps)
        self.projected[size, j] = self.projected[j, size] = after
        return after

    def _reorthogonalized(self, w, after, column, name):
        """The remainder made orthogonal, its norm, and its overlaps; adds to `column`.

        The norm is zero where the remainder lies in the space up to rounding. The
        overlaps come with their uncertainty, as `Orthogonality.append` takes them.
        """
        state, j = self.orthogonality, self.num_expanded
        known = column.copy()
        known[:j] = self.projected[j, :j]
        # A remainder near the rounding of the product, or with other vectors waiting to
        # be expanded, cannot be predicted.
        tiny = after <= math.sqrt(self._eps) * self.scale()
        alone = j == self.basis.size - 1
        prediction = None
        if alone and not tiny:
            prediction = state.predict(self.projected, known, after)
        if prediction is not None and state.suffices(prediction, self._overlap_bound):
            return w, after, prediction
        self.num_measured += 1
        bound = state.bound(self._overlap_bound)
        in_space, num_passes, overlap = False, 0, np.zeros(self.basis.size)
        while num_passes < 2:
            overlap = self.basis.coefficients(w)
            if num_passes == 0:
                state.compare(prediction, overlap / max(after, self._tiny))
            if np.abs(overlap).max() <= bound * after:
                break
            w = self.basis.subtract(w, overlap)
            column += overlap
            self.num_passes[num_passes] += 1
            num_passes += 1
            before, after = after, trees.finite_norm(w, name)
            overlap = np.zeros_like(overlap)
            # What a second pass shrinks much, too, lies in the space up to rounding.
            in_space = num_passes == 2 and after < 0.1 * before
            if after >= SQRT_HALF * before:
                break
        state.clean(num_passes > 0)
        if in_space:
            after = 0.0
        return w, after, (overlap / max(after, self._tiny), 0.0)

    def _store(self, column):
        """Puts column `j` into the projected matrix, which stays symmetric."""
        j = self.num_expanded
        column[:j] = self.projected[j, :j]
        self.projected[:, j] = column
        self.projected[j, :] = column
        self.num_expanded += 1
