"""Ritz pairs of a Krylov space, and the restart that keeps some of them.

References:
  Wu, Simon 2000, Thick-restart Lanczos method for large symmetric eigenproblems.
"""

import numpy as np
from jaxtyping import Float

from t5x_fwdloss.curvature.krylov.space import Krylov

Vector = Float[np.ndarray, " k"]


def pairs(space: Krylov) -> tuple[Vector, Float[np.ndarray, "j k"], Vector]:
    """The Ritz pairs of the expanded vectors.

    Args:
      space: The Krylov space.

    Returns:
      Ritz values (ascending), their vectors' coefficients in the basis, by column, and
      estimates of their residual norms.
    """
    j = space.num_expanded
    values, vectors = np.linalg.eigh(space.projected[:j, :j])
    coupling = space.projected[j:, :j] @ vectors
    return values, vectors, np.linalg.norm(coupling, axis=0)


def restart(space: Krylov, values: Vector, vectors: Float[np.ndarray, "j k"]) -> None:
    """Thick restart: keeps some Ritz vectors and the vectors not yet expanded.

    Args:
      space: The Krylov space; changed.
      values: Ritz values to keep.
      vectors: Their coefficients, by column, as `pairs` gives them.
    """
    j, size, kept = space.num_expanded, space.basis.size, len(values)
    left = kept + size - j
    rotation = np.zeros((size, left))
    rotation[:j, :kept] = vectors
    rotation[j:, kept:] = np.eye(size - j)
    projected = np.zeros((left, left))
    projected[np.arange(kept), np.arange(kept)] = values
    projected[kept:, :kept] = space.projected[j:, :j] @ vectors
    projected[:kept, kept:] = projected[kept:, :kept].T
    space.basis.rotate(rotation)
    space.projected = projected
    space.num_expanded = kept
