r"""Lanczos tridiagonalization of a symmetric map, step by step from the host.

$A Q_k = Q_k T_k + \beta_k q_{k+1} e_k^T$ with $T_k$ tridiagonal: diagonal $\alpha$,
off-diagonal $\beta$. The step, its reorthogonalization and its breakdown test are those
of `space`.
"""

import collections.abc
import dataclasses

import numpy as np
import scipy.linalg
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature.krylov.basis import Basis
from t5x_fwdloss.curvature.krylov.space import Krylov
from t5x_fwdloss.curvature.vectors import trees


@dataclasses.dataclass(frozen=True)
class LanczosResult:
    r"""A tridiagonalization.

    Attributes:
      alphas: The diagonal of $T_k$, float64 `[k]`.
      betas: $\beta_1 \dots \beta_k$; the last one couples to $q_{k+1}$, outside of
        $T_k$, and is zero where the space is invariant.
      basis: $q_1 \dots q_k$, and $q_{k+1}$ unless the space is invariant.
      exhausted: Whether the space is invariant: it contains every eigenvector that the
        start vector has a part in.
      start_norm: The norm of the start vector.
    """

    alphas: Float[np.ndarray, " k"]
    betas: Float[np.ndarray, " k"]
    basis: Basis
    exhausted: bool
    start_norm: float


def lanczos(
    matvec: trees.Matvec,
    start: PyTree,
    *,
    num_steps: int,
    basis_on_host: bool = False,
    on_step: collections.abc.Callable[[Krylov], None] | None = None,
    space: Krylov | None = None,
) -> LanczosResult:
    """The tridiagonalization of `matvec` from `start` in at most `num_steps` products.

    Never takes more steps than there are parameters, and stops where the space becomes
    invariant. A product that holds NaN or Inf raises `NonFiniteError`.

    Args:
      matvec: Product with a symmetric matrix: vector to vector.
      start: The start vector, not zero; its shardings are kept throughout.
      num_steps: Largest number of products.
      basis_on_host: Whether the basis is kept in pinned host memory, a few vectors at
        a time on the devices.
      on_step: Called with the space after each step.
      space: A space to resume from, as passed to `on_step`; `start` is then not read.

    Returns:
      The result.

    Raises:
      ValueError: `num_steps` is below one, or the start vector is zero.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1: got {num_steps}.")
    start_norm = float(trees.norm(start))
    if space is None:
        space = Krylov(Basis(start, basis_on_host))
        if not space.add_start(start):
            raise ValueError("The start vector must not be zero.")
    limit = min(num_steps, trees.dimension(start))
    while space.num_expanded < limit and not space.exhausted:
        space.expand(matvec)
        if on_step is not None:
            on_step(space)
    k = space.num_expanded
    size = space.basis.size
    betas = np.array(
        [space.projected[i + 1, i] if i + 1 < size else 0.0 for i in range(k)]
    )
    return LanczosResult(
        alphas=np.diag(space.projected)[:k].copy(),
        betas=betas,
        basis=space.basis,
        exhausted=space.exhausted,
        start_norm=start_norm,
    )


def eigh_tridiagonal(
    alphas: np.ndarray, betas: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (ascending) and eigenvectors of the tridiagonal matrix, float64.

    Args:
      alphas: The diagonal, `[k]`.
      betas: The off-diagonal, `[k]` or `[k - 1]`; a last entry of `[k]` is not read.

    Returns:
      Eigenvalues `[k]`, and eigenvectors by column.
    """
    result = scipy.linalg.eigh_tridiagonal(alphas, betas[: len(alphas) - 1])
    return np.asarray(result[0]), np.asarray(result[1])
