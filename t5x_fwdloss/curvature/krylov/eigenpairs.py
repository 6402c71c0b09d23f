r"""The largest and smallest eigenpairs of a symmetric map, each with its true residual.

The Krylov space grows until the estimated residuals $\|A y - \theta y\|$ of all wanted
Ritz pairs are small enough: `tolerance` times that pair's own $|\theta|$, plus a level
of rounding that no step reduces (`rounding_level`, relative to the largest $|\theta|$).
Then Lanczos from a fresh random vector searches the complement of the space for copies
of the values found that would move another place (`places`): if there is one, the space
grows from that vector, too. At the end each pair costs one more product, which gives
its Rayleigh quotient and its true residual $r$. An eigenvalue within $r$ of the
reported number exists in every case.
"""

import collections.abc
import dataclasses
import itertools

import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.curvature.krylov import places, ritz
from t5x_fwdloss.curvature.krylov.basis import Basis
from t5x_fwdloss.curvature.krylov.chain import Chain
from t5x_fwdloss.curvature.krylov.eigenpairs_state import (
    EigenpairsResult,
    EigenpairsState,
)
from t5x_fwdloss.curvature.krylov.places import End
from t5x_fwdloss.curvature.krylov.space import Krylov
from t5x_fwdloss.curvature.krylov.wanted import Wanted
from t5x_fwdloss.curvature.vectors import probes, trees

# The fraction of the steps after which a converged end is settled on its own.
LATE = 0.75


def eigenpairs(
    matvec: trees.Matvec,
    start: PyTree | list[PyTree] | int,
    *,
    num_largest: int = 1,
    num_smallest: int = 1,
    max_steps: int = 100,
    tolerance: float = 1e-4,
    rounding: float = 0.0,
    max_basis: int | None = None,
    dimension: int | None = None,
    basis_on_host: bool = False,
    fresh: collections.abc.Callable[[int], PyTree] | None = None,
    on_step: collections.abc.Callable[[EigenpairsState], None] | None = None,
    state: EigenpairsState | None = None,
) -> EigenpairsResult:
    """The eigenpairs at both ends of the spectrum of `matvec`.

    One start vector sees one direction of each eigenspace, a block of several sees as
    many. Multiplicities beyond that are found with fresh random vectors: where the
    space becomes invariant before there are enough pairs, and where the pairs are
    converged, until no copy of a value in front of the last place is overlooked, with a
    chance of at most one in a hundred for each end. Places that `max_steps` or
    `max_basis` leaves open are not settled, and so not converged. A product that holds
    NaN or Inf raises `NonFiniteError`.

    Args:
      matvec: Product with a symmetric matrix: vector to vector.
      start: The start vector, or a list of them; their shardings are kept throughout.
        A number: that many vectors of `fresh`, which are not held beside the basis.
      num_largest: Pairs wanted at the upper end.
      num_smallest: Pairs wanted at the lower end.
      max_steps: Largest number of products, without the one for each pair at the end.
      tolerance: Residual at which to stop, relative to each pair's own magnitude.
      rounding: A measured relative error of the products, added to the residual at
        which to stop, relative to the largest magnitude, if it is larger than that
        of the vectors' dtype.
      max_basis: Largest number of vectors held; beyond it the space is restarted with
        the best Ritz vectors. None: three for each pair and ten more.
      dimension: The dimension of the space on which `matvec` acts, if it is smaller
        than the number of parameters (a parameter group).
      basis_on_host: Whether the basis is kept in pinned host memory.
      fresh: `fresh(i)` returns random vector number `i`, whose entries should be
        normal; None: drawn from seed `i`, and `start` is a vector or a list.
      on_step: Called with the state after each step, which the next one changes; in the
        end the basis is reduced to the wanted pairs.
      state: The state of an earlier run, to resume from.

    Returns:
      The pairs, each marked as converged or not.

    Raises:
      ValueError: A count or the tolerance is out of range, all starts are zero, or
        `start` is a number and `fresh` None.
    """
    starts = start if isinstance(start, list | int) else [start]
    num_starts = starts if isinstance(starts, int) else len(starts)
    if max_basis is None:
        max_basis = default_basis(num_largest + num_smallest, num_starts)
    _check(num_largest, num_smallest, max_steps, tolerance, max_basis, num_starts)
    if not rounding >= 0:
        raise ValueError(f"rounding must be at least 0: got {rounding}.")
    if not isinstance(starts, int):
        vectors, num_fresh = iter(starts), 0
    elif fresh is None:
        raise ValueError(
            f"start must be a vector or a list where fresh is None: got {start}."
        )
    else:
        vectors, num_fresh = map(fresh, range(starts)), starts
    if state is None:
        space = _started(vectors, basis_on_host, dimension)
        state = EigenpairsState(space, [], num_fresh=num_fresh)
    like = state.space.basis.like
    if fresh is None:
        fresh = lambda i: probes.random_like(i, like, "normal")
    total = trees.dimension(like) if dimension is None else dimension
    wanted = Wanted(num_largest, num_smallest, tolerance, rounding, total)
    search = _Search(matvec, wanted, state, fresh, max_basis, max_steps)
    while state.num_products < max_steps and search.step():
        _record(state, wanted)
        if on_step is not None:
            on_step(state)
    if state.chain is not None:
        state.end_chain()
    return _finish(matvec, state, wanted)


@dataclasses.dataclass(frozen=True)
class _Search:
    """A search in progress: each step takes one product."""

    matvec: trees.Matvec
    wanted: Wanted
    state: EigenpairsState
    fresh: collections.abc.Callable[[int], PyTree]
    max_basis: int
    max_steps: int

    def step(self) -> bool:
        """One step; false if nothing is left to do."""
        state, wanted = self.state, self.wanted
        if state.space.num_expanded >= wanted.total:
            return False
        enough = state.space.num_expanded >= min(wanted.count, wanted.total) and (
            state.num_products >= state.grow_until or state.chain is not None
        )
        found: dict[End, places.Places] = {}
        if enough:
            found = wanted.places(state.space)
        converged: list[End] = [
            end for end in found if self._converged(found[end], state.missing[end])
        ]
        unsettled = {
            end: found[end]
            for end in converged
            if not found[end].settled(state.checked[end])
        }
        # Both ends in one chain, unless steps run short for an end that is converged.
        ready = len(converged) == len(found) or self._late
        if state.chain is None and unsettled and ready and not state.crowded:
            state.chain = Chain.start(state.space, *self._draw())
            if state.chain is None:  # the basis is complete
                self._note_checked(unsettled)
        if state.chain is not None:
            self._look(state.chain, unsettled)
            return True
        if enough and len(converged) == len(found):
            return False
        return self._grow()

    @property
    def _late(self):
        return self.state.num_products >= LATE * self.max_steps

    def _converged(self, found, missing):
        # A zero scale says nothing about a matrix before the space is invariant.
        known = found.allowed.max() > 0.0 or self.state.space.exhausted
        value, number = missing
        return found.converged and known and found.number_beyond(value) >= number

    def _grow(self):
        space = self.state.space
        if space.exhausted and not space.add_start(self._draw()[0]):
            return False
        if space.basis.size >= self.max_basis:
            self._restart()
        space.expand(self.matvec)
        return True

    def _draw(self):
        """A fresh vector and its number."""
        number = self.state.num_fresh
        self.state.num_fresh += 1
        return self.fresh(number), number

    def _look(self, chain, unsettled):
        """One step of the chain, and its consequences."""
        state = self.state
        chain.step(state.space, self.matvec, f"Lanczos step {state.num_products + 1}")
        values = chain.values()
        outermost = {"largest": values[-1], "smallest": values[0]}
        moved = [end for end, x in unsettled.items() if x.changed_by(outermost[end])]
        if moved:
            state.end_chain()
            for end in moved:
                value = float(outermost[end])
                number = unsettled[end].number_beyond(value) + 1.0
                state.missing[end] = [value, number]
            self._take_in(chain)
        elif all(self._unlikely(chain, x) for x in unsettled.values()):
            state.end_chain()
            self._note_checked(unsettled)
            # A copy that rounding has let into the space is not in its complement. It
            # grows in the space as it would have done in the chain.
            waiting = state.space.basis.size - state.space.num_expanded
            steps = max(
                places.steps_to_show(chain, value)
                for x in unsettled.values()
                for value in x.at_stake
            )
            state.grow_until = state.num_products + waiting * steps

    def _take_in(self, chain):
        """Grows the space from the chain's start vector, too, to reveal the copy."""
        state, space = self.state, self.state.space
        waiting = space.basis.size - space.num_expanded + 1
        state.crowded = waiting + self.wanted.count + 1 > self.max_basis
        if not state.crowded:
            space.add_start(self.fresh(chain.number))

    def _unlikely(self, chain, found):
        dimension = self.wanted.total - self.state.space.basis.size
        chances = (
            places.chance_overlooked(chain, value, dimension)
            for value in found.at_stake
        )
        return max(chances) <= places.OVERLOOKED

    def _note_checked(self, unsettled):
        for end, found in unsettled.items():
            self.state.checked[end] = float(found.at_stake[-1])

    def _restart(self):
        """Keeps the wanted Ritz vectors and, to converge faster, some more of each end."""
        space, wanted, max_basis = self.state.space, self.wanted, self.max_basis
        values, vectors, _ = ritz.pairs(space)
        j = space.num_expanded
        waiting = space.basis.size - j
        room = min(j, max_basis - waiting - 1)
        kept = min(room, max(wanted.count, (max_basis - waiting) // 2))
        spare = max(kept - wanted.count, 0)
        share = wanted.num_largest / wanted.count
        top = min(wanted.num_largest + round(spare * share), kept)
        columns = [*range(kept - top), *range(j - top, j)]
        ritz.restart(space, values[columns], vectors[:, columns])
        self.state.num_restarts += 1


def _started(vectors, basis_on_host, dimension) -> Krylov:
    """A space of the start vectors, at most as many as its dimension.

    Raises:
      ValueError: All of them are zero.
    """
    vector = next(vectors)
    total = trees.dimension(vector) if dimension is None else dimension
    space = Krylov(Basis(vector, basis_on_host))
    added = [space.add_start(vector)]
    del vector
    added += [space.add_start(x) for x in itertools.islice(vectors, max(total - 1, 0))]
    if not any(added):
        raise ValueError("The start vector must not be zero.")
    return space


def default_basis(num_pairs: int, num_starts: int) -> int:
    """The default `max_basis`: it grows with the pairs, not the steps."""
    return max(3 * num_pairs + 10, smallest_basis(num_pairs, num_starts))


def smallest_basis(num_pairs: int, num_starts: int) -> int:
    """The smallest `max_basis` with room for the pairs when the space is restarted."""
    return num_pairs + num_starts + 2


def _check(num_largest, num_smallest, max_steps, tolerance, max_basis, num_starts):
    if num_starts < 1:
        raise ValueError(f"There must be at least one start vector: got {num_starts}.")
    if min(num_largest, num_smallest) < 0 or num_largest + num_smallest < 1:
        raise ValueError(
            "num_largest and num_smallest must not be negative, and not both zero: got "
            f"{num_largest} and {num_smallest}."
        )
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1: got {max_steps}.")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie between 0 and 1: got {tolerance}.")
    least = smallest_basis(num_largest + num_smallest, num_starts)
    if max_basis < least:
        raise ValueError(
            f"max_basis must be at least {least} for {num_largest} + {num_smallest} "
            f"pairs and {num_starts} start vectors: got {max_basis}."
        )


def _record(state, wanted):
    values, _, estimates = ritz.pairs(state.space)
    row = [float(state.num_products)]
    for chosen in wanted.positions(len(values)).values():
        for position in chosen:
            row += [float(values[position]), float(estimates[position])]
    row += [float("nan")] * (1 + 2 * wanted.count - len(row))
    state.history.append(row)


def _finish(matvec, state, wanted):
    space, exhausted = state.space, state.space.exhausted
    values, coefficients, _ = ritz.pairs(space)
    scale, level = float(np.abs(values).max()), wanted.level(space)
    settled = _settled(state, wanted)
    positions = wanted.positions(len(values))
    ends = [end for end, chosen in positions.items() for _ in chosen]
    chosen = [position for one in positions.values() for position in one]
    # In the memory of the basis, which would else be there beside the eigenvectors.
    ritz.restart(space, values[chosen], coefficients[:, chosen])
    vectors = _orthonormal(space.basis.row(i) for i in range(len(ends)))
    pairs = [
        _rayleigh(matvec, y, f"residual of {end} eigenpair {number + 1}")
        for number, (y, end) in enumerate(zip(vectors, ends, strict=True))
    ]
    thetas, residuals = np.array(pairs).reshape(-1, 2).T
    allowed = wanted.tolerance * np.abs(thetas) + level * scale
    gram = np.array(
        [[float(trees.inner(u, v)) for v in vectors] for u in vectors], np.float64
    )
    return EigenpairsResult(
        eigenvalues=thetas,
        eigenvectors=vectors,
        ends=tuple(ends),
        residuals=residuals,
        converged=tuple(map(bool, (residuals <= allowed) & settled)),
        allowed=allowed,
        settled=tuple(map(bool, settled)),
        scale=scale,
        tolerance=wanted.tolerance,
        rounding=level,
        orthogonality=float(np.abs(gram - np.eye(len(vectors))).max()),
        num_steps=space.num_products,
        num_products=space.num_products + len(vectors),
        num_restarts=state.num_restarts,
        exhausted=exhausted,
        history=np.array(state.history).reshape(
            len(state.history), 1 + 2 * wanted.count
        ),
    )


def _orthonormal(vectors):
    """The vectors, orthogonalized again: the basis is less orthogonal than this.

    A remainder of a vector with a large eigenvalue would show in the residual of a
    small one, multiplied by the large eigenvalue.
    """
    found = []
    for vector in vectors:
        for other in found:
            overlap = float(trees.inner(other, vector))
            vector = trees.axpy(-overlap, other, vector)
        found.append(trees.scale(1.0 / float(trees.norm(vector)), vector))
    return found


def _rayleigh(matvec, y, name):
    """The Rayleigh quotient of a unit vector and its true residual, by one product."""
    product = matvec(y)
    trees.check_finite(product, name)
    theta = float(trees.inner(y, product))
    return theta, float(trees.norm(trees.axpy(-theta, y, product)))


def _settled(state, wanted):
    """For each pair, whether no copy of a value in front of it was overlooked."""
    found = wanted.places(state.space)
    whole = state.space.num_expanded >= wanted.total
    return np.array(
        [
            whole or at_end.settled(state.checked[end], index)
            for end, at_end in found.items()
            for index in range(len(at_end.values))
        ]
    )
