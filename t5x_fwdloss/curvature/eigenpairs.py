r"""The largest and smallest eigenpairs of a symmetric map, each with its true residual.

The Krylov space grows until the estimated residuals $\|A y - \theta y\|$ of all wanted
Ritz pairs are below `tolerance` times the largest $|\theta|$; then each pair costs one
more product, which gives its Rayleigh quotient and its true residual $r$. There is an
eigenvalue within $r$ of the number reported, whatever happened before.
"""

import collections.abc

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature import krylov, probes, ritz, trees
from t5x_fwdloss.curvature.eigenpairs_state import (
    EigenpairsResult,
    EigenpairsState,
    End,
)


def _wanted(size: int, num_largest: int, num_smallest: int) -> list[tuple[int, End]]:
    """Positions in ascending order, largest first; no position twice."""
    largest = min(num_largest, size)
    smallest = min(num_smallest, size - largest)
    top: list[tuple[int, End]] = [(size - 1 - i, "largest") for i in range(largest)]
    return top + [(i, "smallest") for i in range(smallest)]


def eigenpairs(
    matvec: krylov.Matvec,
    start: PyTree | list[PyTree],
    *,
    num_largest: int = 1,
    num_smallest: int = 1,
    max_steps: int = 100,
    tolerance: float = 1e-4,
    max_basis: int | None = None,
    dimension: int | None = None,
    basis_on_host: bool = False,
    fresh: collections.abc.Callable[[int], PyTree] | None = None,
    on_step: collections.abc.Callable[[EigenpairsState], None] | None = None,
    state: EigenpairsState | None = None,
) -> EigenpairsResult:
    """The eigenpairs at both ends of the spectrum of `matvec`.

    A single start vector sees one direction of each eigenspace; several of them (a
    block start) show multiplicities up to their number. Where the space becomes
    invariant before there are enough pairs, a fresh random direction is added. A
    product that holds NaN or Inf raises `NonFiniteError`.

    Args:
      matvec: Product with a symmetric matrix: vector to vector.
      start: The start vector, or a list of them; their shardings are kept throughout.
      num_largest: Pairs wanted at the upper end.
      num_smallest: Pairs wanted at the lower end.
      max_steps: Largest number of products spent on the space.
      tolerance: Relative residual at which to stop.
      max_basis: Largest number of vectors held; beyond it the space is restarted with
        the best Ritz vectors. None: never restarted.
      dimension: The dimension of the space on which `matvec` acts, where it is smaller
        than the number of parameters (a parameter group).
      basis_on_host: Whether the basis is kept in pinned host memory.
      fresh: `fresh(i)` gives the random vector added at breakdown number `i`; None:
        signs from seed `i`.
      on_step: Called with the state after each step.
      state: The state of an earlier run, to go on from there.

    Returns:
      The pairs; those not converged are marked so.

    Raises:
      ValueError: A count or the tolerance is out of range, or all starts are zero.
    """
    starts = start if isinstance(start, list) else [start]
    like = starts[0]
    total = trees.dimension(like) if dimension is None else dimension
    _check(num_largest, num_smallest, max_steps, tolerance, max_basis, len(starts))
    if state is None:
        space = krylov.Krylov(like, basis_on_host=basis_on_host)
        added = [space.add_start(vector) for vector in starts[:total]]
        if not any(added):
            raise ValueError("The start vector must not be zero.")
        state = EigenpairsState(space, [])
    if fresh is None:
        fresh = lambda i: probes.random_like(i, like)

    space = state.space
    wanted_total = min(num_largest + num_smallest, total)
    while not _finished(state, num_largest, num_smallest, tolerance, total):
        if space.num_products >= max_steps:
            break
        if space.exhausted:
            if space.basis.size >= total or space.num_expanded >= wanted_total:
                break
            state.num_fresh += 1
            if not space.add_start(fresh(state.num_fresh - 1)):
                break
        if max_basis is not None and space.basis.size >= max_basis:
            _restart(space, num_largest, num_smallest, max_basis)
            state.num_restarts += 1
        space.expand(matvec)
        _record(state, num_largest, num_smallest)
        if on_step is not None:
            on_step(state)
    return _finish(matvec, state, num_largest, num_smallest, tolerance)


def _check(num_largest, num_smallest, max_steps, tolerance, max_basis, num_starts):
    if min(num_largest, num_smallest) < 0 or num_largest + num_smallest < 1:
        raise ValueError(
            "num_largest and num_smallest must not be negative, and not both zero: got "
            f"{num_largest} and {num_smallest}."
        )
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1: got {max_steps}.")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1: got {tolerance}.")
    least = num_largest + num_smallest + num_starts + 2
    if max_basis is not None and max_basis < least:
        raise ValueError(
            f"max_basis must be at least {least} for {num_largest} + {num_smallest} "
            f"pairs and {num_starts} start vectors: got {max_basis}."
        )


def _record(state, num_largest, num_smallest):
    values, _, estimates = ritz.pairs(state.space)
    row = [float(state.space.num_products)]
    for position, _ in _wanted(len(values), num_largest, num_smallest):
        row += [float(values[position]), float(estimates[position])]
    row += [float("nan")] * (1 + 2 * (num_largest + num_smallest) - len(row))
    state.history.append(row)


def _finished(state, num_largest, num_smallest, tolerance, total):
    space = state.space
    j = space.num_expanded
    if j == 0:
        return False
    if j >= total:
        return True
    if j < num_largest + num_smallest:
        return False
    values, _, estimates = ritz.pairs(space)
    bound = tolerance * np.abs(values).max()
    wanted = [position for position, _ in _wanted(j, num_largest, num_smallest)]
    return bool((estimates[wanted] <= bound).all()) and not (
        # A zero operator or an invariant space: no more to see with this start.
        bound == 0.0 and not space.exhausted
    )


def _restart(space, num_largest, num_smallest, max_basis):
    """Keeps the wanted Ritz vectors and, to converge faster, some more of each end."""
    values, vectors, _ = ritz.pairs(space)
    j = space.num_expanded
    waiting = space.basis.size - j
    room = min(j, max_basis - waiting - 1)
    kept = min(room, max(num_largest + num_smallest, (max_basis - waiting) // 2))
    spare = max(kept - num_largest - num_smallest, 0)
    share = num_largest / (num_largest + num_smallest)
    top = min(num_largest + round(spare * share), kept)
    bottom = kept - top
    columns = [*range(bottom), *range(j - top, j)]
    ritz.restart(space, values[columns], vectors[:, columns])


def _finish(matvec, state, num_largest, num_smallest, tolerance):
    space = state.space
    values, coefficients, _ = ritz.pairs(space)
    wanted = _wanted(len(values), num_largest, num_smallest)
    scale = float(np.abs(values).max())
    thetas, vectors, residuals = [], [], []
    for number, (position, end) in enumerate(wanted):
        y = ritz.vector(space, coefficients[:, position])
        y = trees.scale(1.0 / float(trees.norm(y)), y)
        product = matvec(y)
        name = f"residual of {end} eigenpair {number + 1}"
        trees.check_finite(product, name)
        theta = float(trees.inner(y, product))
        residuals.append(float(trees.norm(trees.axpy(-theta, y, product))))
        thetas.append(theta)
        vectors.append(y)
    gram = np.array(
        [[float(trees.inner(u, v)) for v in vectors] for u in vectors], np.float64
    )
    return EigenpairsResult(
        eigenvalues=np.array(thetas),
        eigenvectors=vectors,
        ends=tuple(end for _, end in wanted),
        residuals=np.array(residuals),
        converged=tuple(r <= tolerance * scale for r in residuals),
        scale=scale,
        tolerance=tolerance,
        orthogonality=float(np.abs(gram - np.eye(len(vectors))).max()),
        num_steps=space.num_products,
        num_products=space.num_products + len(vectors),
        num_restarts=state.num_restarts,
        exhausted=space.exhausted,
        history=np.array(state.history).reshape(
            len(state.history), 1 + 2 * (num_largest + num_smallest)
        ),
    )
