"""The state and the result of a search for eigenpairs."""

import dataclasses

import numpy as np
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature.krylov.chain import Chain
from t5x_fwdloss.curvature.krylov.places import End
from t5x_fwdloss.curvature.krylov.space import Krylov


@dataclasses.dataclass(frozen=True)
class EigenpairsResult:
    r"""Eigenpairs: the largest in descending order, then the smallest ascending.

    Attributes:
      eigenvalues: Rayleigh quotients of the eigenvectors, float64.
      eigenvectors: Vectors of norm one.
      ends: For each pair, its end of the spectrum.
      residuals: True residual norms $\|A y - \theta y\|$, by one more product each.
      converged: Whether the residual is at most `allowed` and the place is settled.
      allowed: The largest residual of a converged pair: `tolerance` times $|\theta|$,
        plus the level of rounding, `rounding` times `scale`.
      settled: Whether the pair is known to belong in its place: a fresh
        random start showed no further copy of an eigenvalue in front of it (`places`).
      scale: The largest $|\theta|$ seen: the norm of $A$ on the space.
      tolerance: The requested relative residual.
      rounding: The relative level of rounding, `rounding_level`.
      orthogonality: Largest entry of $|Y^T Y - I|$ over the eigenvectors.
      num_steps: Products spent on the Krylov space and on settling the places.
      num_products: All products, those for the residuals included.
      num_restarts: Thick restarts.
      exhausted: Whether the Krylov space became invariant.
      history: Rows `[step, theta_1, estimate_1, ...]` of the wanted pairs, one per step
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
    """The state of a run, passed to `on_step` and accepted as `state`.

    Attributes:
      space: The Krylov space.
      history: As in the result, a list of rows.
      num_restarts: Thick restarts so far.
      num_fresh: Fresh random vectors so far.
      chain: Lanczos in the complement of `space`, during a search for copies there.
      checked: For each end, the innermost value of which no copy was overlooked.
      missing: For each end, a value of the complement that moves its last place, and
        how many values there must be as far out: the space grows until there are.
      grow_until: Products up to which the space grows, whatever is converged.
      crowded: Whether `max_basis` left no room for another start vector.
    """

    space: Krylov
    history: list[list[float]]
    num_restarts: int = 0
    num_fresh: int = 0
    chain: Chain | None = None
    checked: dict[End, float | None] = dataclasses.field(
        default_factory=lambda: {"largest": None, "smallest": None}
    )
    missing: dict[End, list[float]] = dataclasses.field(
        default_factory=lambda: {"largest": [0.0, 0.0], "smallest": [0.0, 0.0]}
    )
    grow_until: int = 0
    crowded: bool = False

    @property
    def num_products(self) -> int:
        """Products so far."""
        return self.space.num_products + (len(self.chain.alphas) if self.chain else 0)

    def end_chain(self) -> None:
        """Drops the chain; its products still count."""
        self.space.num_products, self.chain = self.num_products, None
