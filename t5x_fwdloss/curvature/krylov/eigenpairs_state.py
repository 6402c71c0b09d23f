"""Where a search for eigenpairs stands, and what it ends with."""

import dataclasses

import numpy as np
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature.krylov.places import End
from t5x_fwdloss.curvature.krylov.space import Krylov


@dataclasses.dataclass(frozen=True)
class EigenpairsResult:
    r"""Eigenpairs: the largest in falling order, then the smallest in rising order.

    Attributes:
      eigenvalues: Rayleigh quotients of the eigenvectors, float64.
      eigenvectors: Vectors of norm one.
      ends: For each pair, the end of the spectrum it belongs to.
      residuals: True residual norms $\|A y - \theta y\|$, by one more product each.
      converged: Whether the residual is allowed and the place is settled.
      allowed: The largest residual of a converged pair: `tolerance` times $|\theta|$,
        plus what rounding leaves, `rounding` times `scale`.
      settled: Whether the pair is known to be the one that its place says: a fresh
        random start showed no further copy of an eigenvalue in front of it (`places`).
      scale: The largest $|\theta|$ seen: the norm of $A$ on the space.
      tolerance: The relative residual asked for.
      rounding: The relative level of rounding, `rounding_level`.
      orthogonality: Largest entry of $|Y^T Y - I|$ over the eigenvectors.
      num_steps: Products spent on the Krylov space and on settling the places.
      num_products: All products, those for the residuals included.
      num_restarts: Thick restarts.
      exhausted: Whether the Krylov space became invariant.
      history: Rows `[step, theta_1, estimate_1, ...]` of the wanted pairs, one a step
        (NaN before there are as many Ritz values).
    """

    eigenvalues: Float[np.ndarray, " k"]
    eigenvectors: list[PyTree]
    ends: tuple[End, ...]
    residuals: Float[np.ndarray, " k"]
    converged: tuple[bool, ...]
    allowed: Float[np.ndarray, " k"]
    settled: tuple[bool, ...]
    scale: float
    tolerance: float
    rounding: float
    orthogonality: float
    num_steps: int
    num_products: int
    num_restarts: int
    exhausted: bool
    history: Float[np.ndarray, "steps columns"]


@dataclasses.dataclass
class EigenpairsState:
    """Where a run stands, given to `on_step` and taken back by `state`.

    Attributes:
      space: The Krylov space.
      history: As in the result, a list of rows.
      num_restarts: Thick restarts so far.
      num_fresh: Fresh random vectors so far.
      chain: The space grown from a fresh vector in the complement of `space`, while one
        looks there for copies.
      couplings: For each expanded vector of the chain, the inner products of its product
        with the vectors of `space` that are not expanded.
      checked: For each end, the innermost value of which no copy was overlooked.
      num_checks: Chains that ended.
      crowded: Whether `max_basis` left no room for another chain.
    """

    space: Krylov
    history: list[list[float]]
    num_restarts: int = 0
    num_fresh: int = 0
    chain: Krylov | None = None
    couplings: list[list[float]] = dataclasses.field(default_factory=list)
    checked: dict[End, float | None] = dataclasses.field(
        default_factory=lambda: {"largest": None, "smallest": None}
    )
    num_checks: int = 0
    crowded: bool = False

    @property
    def num_products(self) -> int:
        """Products so far."""
        chain = 0 if self.chain is None else self.chain.num_products
        return self.space.num_products + chain

    @property
    def generation(self) -> int:
        """Changes whenever vectors that were saved change their values or places."""
        return self.num_restarts + self.num_checks

    def end_chain(self, *, join: bool) -> None:
        """Gives the chain up, or takes its vectors into the space."""
        chain = self.chain
        assert chain is not None
        if join:
            waiting = self.space.basis.size - self.space.num_expanded
            couplings = np.reshape(self.couplings, (chain.num_expanded, waiting))
            self.space.join(chain, couplings)
        else:
            self.space.num_products += chain.num_products
        self.chain, self.couplings = None, []
        self.num_checks += 1

    def arrays(self) -> dict:
        """The state's arrays, a pytree to be saved."""
        found = {**self.space.arrays(), "history": np.array(self.history)}
        if self.chain is not None:
            chain = self.chain.arrays()
            found["vectors"] += chain.pop("vectors")
            found |= {f"chain_{name}": array for name, array in chain.items()}
        return found

    def metadata(self) -> dict:
        """The rest of the state, plain numbers that JSON holds."""
        return {
            "space": self.space.metadata(),
            "num_restarts": self.num_restarts,
            "num_fresh": self.num_fresh,
            "chain": None if self.chain is None else self.chain.metadata(),
            "couplings": [list(row) for row in self.couplings],
            "checked": dict(self.checked),
            "num_checks": self.num_checks,
            "crowded": self.crowded,
        }

    @classmethod
    def from_saved(
        cls, like: PyTree, arrays: dict, metadata: dict
    ) -> "EigenpairsState":
        """The state that `arrays` and `metadata` were taken from, bit for bit.

        Args:
          like: A vector that gives shapes, types and shardings.
          arrays: As `arrays()` gave them.
          metadata: As `metadata()` gave it.

        Returns:
          The state.
        """
        rest = dict(metadata)
        space, chain = rest.pop("space"), rest.pop("chain")
        count, vectors = space["size"], arrays["vectors"]
        mine = {**arrays, "vectors": vectors[:count]}
        if chain is not None:
            names = ("projected", "gram")
            theirs = {name: arrays[f"chain_{name}"] for name in names}
            theirs["vectors"] = vectors[count:]
            chain = Krylov.from_saved(like, theirs, chain)
        rest["couplings"] = [list(row) for row in rest["couplings"]]
        rest["checked"] = dict(rest["checked"])
        return cls(
            space=Krylov.from_saved(like, mine, space),
            history=np.asarray(arrays["history"]).tolist(),
            chain=chain,
            **rest,
        )
