r"""Randomized trace estimates that first take out a subspace: Hutch++ and XTrace.

The subspace $Q$ is an orthonormal basis of products with random probes; there $A$ is
known exactly, and only the rest is estimated. $Q$ is built by Gram-Schmidt (`basis`),
with every overlap measured again after it is subtracted. That needs the same small
all-reduced Gram products as CholeskyQR2, no array of parameter size, and keeps the
triangular factor to full precision, where a Gram matrix squares the condition number:
products with random probes are badly conditioned by nature.

References:
  Meyer, Musco, Musco, Woodruff 2021, Hutch++: Optimal stochastic trace estimation.
  Epperly, Tropp, Webber 2024, XTrace: Making the most of every sample in stochastic
  trace estimation.
"""

import math

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature.krylov import basis
from t5x_fwdloss.curvature.vectors import trees

# A remainder of this many units of rounding, relative to the vector, is noise.
NOISE = 50.0


def extend(space: basis.Basis, vector: PyTree, name: str) -> tuple[np.ndarray, bool]:
    """Orthogonalizes a vector against a basis and appends the remainder.

    Args:
      space: The basis; grows by one unless the vector lies in it.
      vector: The vector; not modified.
      name: Its name in error messages.

    Returns:
      Coefficients of the vector in the basis after the call, and whether it grew.
    """
    length = rest = trees.finite_norm(vector, name)
    coefficients = np.zeros(space.size)
    w = trees.scale(1.0, vector)
    for _ in range(3):
        overlap = space.coefficients(w)
        if not space.size or np.abs(overlap).max() <= trees.epsilon(vector) * rest:
            break
        w = space.subtract(w, overlap)
        coefficients += overlap
        before, rest = rest, trees.finite_norm(w, name)
        if rest >= math.sqrt(0.5) * before:
            break
    if rest <= NOISE * trees.epsilon(vector) * length:
        return coefficients, False
    space.append(w, 1.0 / rest, donate=True)
    return np.append(coefficients, rest), True


def apply_all(
    matvec: trees.Matvec, vectors: list[PyTree], block_size: int
) -> list[PyTree]:
    """The products of several vectors, `block_size` of them in each call of `matvec`.

    Args:
      matvec: The product; with `block_size` above one, of stacked vectors.
      vectors: The vectors.
      block_size: Vectors in one call; the last block repeats its last vector.

    Returns:
      The products, in order.
    """
    if block_size == 1:
        return [matvec(vector) for vector in vectors]
    results = []
    for first in range(0, len(vectors), block_size):
        block = vectors[first : first + block_size]
        filled = block + [block[-1]] * (block_size - len(block))
        results += trees.unstack(matvec(trees.stack(filled)))[: len(block)]
    return results
