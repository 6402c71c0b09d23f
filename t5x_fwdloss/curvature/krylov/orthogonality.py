r"""How orthogonal a Krylov basis is, known without reading it at every step.

With $G$ the Gram matrix of the basis, $A v_k = \sum_l T_{lk} v_l$ for expanded $k$ and a
remainder $w = A v_j - \sum_i T_{ij} v_i$ of norm $\beta$, symmetry of $A$ gives the
overlaps of the next vector with those before, up to rounding in the product:

$$ \langle w, v_k \rangle = \sum_l G_{jl} T_{lk} - \sum_i T_{ij} G_{ik}. $$

This is Simon's recurrence, with signs and for any $T$. What rounding adds, $\delta$, is not
modelled but observed, as the difference between predicted and measured overlaps. Errors in
$G$ follow the same recurrence. In the direction of a Ritz value $\theta$ it is that of the
Lanczos polynomials, which grow fastest at the ends of the spectrum, without a change of
sign or with one at each step; what a row owes to all $\delta$ before it, $u_j$, is then

$$ u_{j+1} = \frac{\max |\theta - T_{jj}|\, u_j - \|T_{<j,j}\|\, u_{j-1}}{\beta} + \delta. $$

While prediction and uncertainty stay below the bound, the basis is not read. (Subtracting
what was only predicted saves another read, and does not work: the error it leaves enters
the next two predictions, and orthogonality was lost within twenty steps.)

References:
  Simon 1984, The Lanczos algorithm with partial reorthogonalization, section 4.
"""

import copy
import dataclasses

import numpy as np
from jaxtyping import Float

# Factor on the uncertainty of a prediction.
SAFETY = 2.0
# The part of the largest error seen that is kept from one comparison to the next.
FORGETTING = 0.7
# Predictions from measured overlaps that must have been compared before one is trusted.
LEAST_CHECKS = 3
# Measured overlaps above this part of the bound are subtracted: they would exceed it in
# one or two more steps.
PART = 0.5


@dataclasses.dataclass
class Orthogonality:
    r"""The estimated Gram matrix of a basis, and how far the estimate is trusted.

    Attributes:
        gram: $G$, float64; one on the diagonal.
        error: $\delta$, relative.
        num_checks: predictions from measured rows that were compared with measurements.
        uncertainties: $u$ of the row before the last and of the last.
        restarted: whether the basis was changed: rotated vectors fulfil the recurrence
            less well than new ones, and every step measures from then on.
        subtracted: whether the last vector had its overlaps subtracted. The one before
            it still has them, and hands them on: the next vector needs it, too.
    """

    gram: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    error: float = 0.0
    num_checks: int = 0
    uncertainties: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    restarted: bool = False
    subtracted: bool = False

    def metadata(self) -> dict:
        """What is not in `gram`, plain numbers that JSON holds."""
        found = dataclasses.asdict(self)
        del found["gram"]
        return found

    @classmethod
    def from_saved(cls, gram: np.ndarray, metadata: dict) -> "Orthogonality":
        """The state that `gram` and `metadata` were taken from."""
        size = int(np.sqrt(np.size(gram)))
        rest = copy.deepcopy(metadata)
        return cls(np.array(gram, np.float64).reshape(size, size), **rest)

    def predict(
        self, projected: np.ndarray, column: np.ndarray, length: float
    ) -> tuple[Float[np.ndarray, " size"], float] | None:
        """The overlaps of the remainder with the basis, relative to its norm.

        Args:
            projected: $T$; its first `len(gram) - 1` columns are known.
            column: column $j$ of it, with $j$ the last vector.
            length: the norm of the remainder.

        Returns:
            The overlaps and their uncertainty; None where other vectors than the last
            are not expanded yet.
        """
        size = len(self.gram)
        if len(column) != size or length == 0.0:
            return None
        known = size - 1
        found = np.zeros(size)
        found[:known] = self.gram[-1] @ projected[:size, :known]
        found[:known] -= column @ self.gram[:, :known]
        spread = 0.0
        if known:
            ritz = np.linalg.eigvalsh(projected[:known, :known])
            spread = float(np.abs(ritz - column[known]).max())
        before, last = self.uncertainties
        coupling = float(np.linalg.norm(column[:known]))
        grown = abs(spread * last - coupling * before) / length
        return found / length, min(max(grown, last) + self.error, 1.0)

    def suffices(self, prediction: tuple | None, bound: float) -> bool:
        """Whether a prediction says that all overlaps are below the bound."""
        unknown = self.restarted or self.num_checks < LEAST_CHECKS
        if prediction is None or self.subtracted or unknown:
            return False
        overlaps, uncertainty = prediction
        return bool(np.abs(overlaps).max() + SAFETY * uncertainty <= bound)

    def compare(self, prediction: tuple | None, measured: np.ndarray) -> None:
        """Learns from measured overlaps, relative, how good predictions are."""
        if prediction is None:
            return
        overlaps, uncertainty = prediction
        before = list(self.uncertainties)
        error = float(np.abs(measured - overlaps).max())
        # Errors grow: that of the row before, which was not measured, is no larger.
        self.uncertainties[1] = min(self.uncertainties[1], error)
        if before == [0.0, 0.0]:
            self.num_checks += 1
        elif uncertainty > 0.0:
            error *= self.error / uncertainty
        self.error = max(FORGETTING * self.error, error)

    def bound(self, bound: float) -> float:
        """The measured overlap that is subtracted, for one that may remain."""
        part = PART * bound
        return min(part, SAFETY * self.error) if self.subtracted else part

    def clean(self, subtracted: bool) -> None:
        """Notes whether a step subtracted overlaps: two steps in a row should."""
        self.subtracted = subtracted and not self.subtracted

    def append(self, overlaps: np.ndarray, uncertainty: float = 0.0) -> None:
        """Takes in a new vector with these overlaps."""
        size = len(self.gram)
        grown = np.eye(size + 1)
        grown[:size, :size] = self.gram
        grown[size, :size] = grown[:size, size] = overlaps
        self.gram = grown
        self.uncertainties = [self.uncertainties[1], uncertainty]

    def rotate(self, rotation: np.ndarray) -> None:
        """Changes to the basis of the columns of `rotation`."""
        self.gram = rotation.T @ self.gram @ rotation
        np.fill_diagonal(self.gram, 1.0)
        self.restarted = True
