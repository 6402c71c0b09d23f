r"""Lanczos in the complement of a Krylov space, by its three-term recurrence alone.

It starts from a fresh random vector to see whether the space overlooked an eigenvector
(`places` says how). That is rare, so it keeps two vectors and no basis. The loss of
orthogonality by rounding (Paige 1971) repeats values of the complement but moves none
of them outwards.

References:
  Paige 1971, The computation of eigenvalues and eigenvectors of very large sparse
  matrices.
"""

import dataclasses

import numpy as np
import scipy.linalg
from jaxtyping import PyTree

from t5x_fwdloss.curvature.krylov.space import BREAKDOWN, Krylov
from t5x_fwdloss.curvature.vectors import trees


@dataclasses.dataclass
class Chain:
    r"""Lanczos on $P A P$, with $P$ the projection on the complement of a space.

    Attributes:
      number: The number of the fresh vector that it started from.
      last: The vector to be multiplied next, of norm one.
      before: The vector before it.
      alphas: $\alpha_1 \dots \alpha_k$.
      betas: $\beta_1 \dots \beta_k$; the last is zero if the complement is exhausted.
    """

    number: int
    last: PyTree
    before: PyTree | None = None
    alphas: list[float] = dataclasses.field(default_factory=list)
    betas: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def start(cls, space: Krylov, vector: PyTree, number: int) -> "Chain | None":
        """A chain from a vector's part outside of a space; None if that part is zero.

        Args:
          space: The space.
          vector: The vector, of any norm.
          number: Its number.
        """
        rest, _, before, after = space.cleared(vector, "fresh vector")
        if after <= BREAKDOWN * trees.epsilon(rest) * before:
            return None
        return cls(number, trees.scale(1.0 / after, rest))

    def step(self, space: Krylov, matvec: trees.Matvec, name: str) -> None:
        """One step: a product with $A$, and its new part.

        Args:
          space: The space, as it was at the start.
          matvec: The product.
          name: Its name in error messages.
        """
        product, *_ = space.cleared(matvec(self.last), name)
        coupling = self.betas[-1] if self.betas else 0.0
        rest, alpha, length = space.basis.local_step(
            product, self.last, self.before, coupling
        )
        beta = trees.checked_norm(length, rest, name)
        self.alphas.append(float(alpha))
        scale = max(map(abs, (*self.alphas, *self.betas, beta)))
        if beta <= BREAKDOWN * trees.epsilon(rest) * scale:
            beta = 0.0
        self.betas.append(beta)
        if beta:
            self.before, self.last = self.last, trees.scale(1.0 / beta, rest)

    def values(self) -> np.ndarray:
        """The Ritz values, ascending."""
        found = scipy.linalg.eigvalsh_tridiagonal(self.alphas, self.betas[:-1])
        return np.asarray(found)
