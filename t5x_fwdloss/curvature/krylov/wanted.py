"""Which eigenpairs are wanted, and where they stand in a Krylov space."""

import dataclasses

from t5x_fwdloss.curvature.krylov import places, ritz
from t5x_fwdloss.curvature.krylov.places import End
from t5x_fwdloss.curvature.krylov.space import Krylov, rounding_level
from t5x_fwdloss.curvature.vectors import trees


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The wanted pairs, and the dimension of the space.

    Attributes:
      num_largest: Pairs wanted at the upper end.
      num_smallest: Pairs wanted at the lower end.
      tolerance: The largest residual of a converged pair, relative to its own magnitude.
      rounding: A measured relative error of the products.
      total: The dimension of the space on which the map acts.
    """

    num_largest: int
    num_smallest: int
    tolerance: float
    rounding: float
    total: int

    @property
    def count(self) -> int:
        """The number of pairs at both ends."""
        return self.num_largest + self.num_smallest

    def positions(self, size: int) -> dict[End, list[int]]:
        """Positions in ascending order, from the outermost inwards; none twice."""
        largest = min(self.num_largest, size)
        smallest = min(self.num_smallest, size - largest)
        return {
            "largest": [size - 1 - i for i in range(largest)],
            "smallest": list(range(smallest)),
        }

    def level(self, space: Krylov) -> float:
        """The residual that rounding leaves, relative to the largest value."""
        epsilon = trees.epsilon(space.basis.like)
        return rounding_level(epsilon, space.num_products, self.rounding)

    def places(self, space: Krylov) -> dict[End, places.Places]:
        """The places at each end at which pairs are wanted."""
        values, _, residuals = ritz.pairs(space)
        allowed = places.allowed_residuals(values, self.tolerance, self.level(space))
        return {
            end: places.Places(
                places.SIGNS[end], values[chosen], residuals[chosen], allowed[chosen]
            )
            for end, chosen in self.positions(len(values)).items()
            if chosen
        }
