"""Where a search for eigenpairs stands, and what it ends with."""

import dataclasses
import typing

import numpy as np
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature import krylov

End = typing.Literal["largest", "smallest"]


@dataclasses.dataclass(frozen=True)
class EigenpairsResult:
    r"""Eigenpairs: the largest in falling order, then the smallest in rising order.

    Attributes:
      eigenvalues: Rayleigh quotients of the eigenvectors, float64.
      eigenvectors: Vectors of norm one.
      ends: For each pair, the end of the spectrum it belongs to.
      residuals: True residual norms $\|A y - \theta y\|$, by one more product each.
      converged: Whether the residual is at most `tolerance` times `scale`.
      scale: The largest $|\theta|$ seen: the norm of $A$ on the space.
      tolerance: The relative residual asked for.
      orthogonality: Largest entry of $|Y^T Y - I|$ over the eigenvectors.
      num_steps: Products spent on the Krylov space.
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
    scale: float
    tolerance: float
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
      num_fresh: Random vectors added after the space had become invariant.
    """

    space: krylov.Krylov
    history: list[list[float]]
    num_restarts: int = 0
    num_fresh: int = 0

    def arrays(self) -> dict:
        """The state's arrays, a pytree to be saved."""
        return {**self.space.arrays(), "history": np.array(self.history)}

    def metadata(self) -> dict:
        """The rest of the state, plain numbers that JSON holds."""
        return {
            "space": self.space.metadata(),
            "num_restarts": self.num_restarts,
            "num_fresh": self.num_fresh,
        }

    @classmethod
    def from_saved(
        cls, like: PyTree, arrays: dict, metadata: dict
    ) -> "EigenpairsState":
        """The state that `arrays` and `metadata` were taken from, to the bit.

        Args:
          like: A vector that gives shapes, types and shardings.
          arrays: As `arrays()` gave them.
          metadata: As `metadata()` gave it.

        Returns:
          The state.
        """
        return cls(
            krylov.Krylov.from_saved(like, arrays, metadata["space"]),
            np.asarray(arrays["history"]).tolist(),
            metadata["num_restarts"],
            metadata["num_fresh"],
        )
