r"""Which places at the ends of a spectrum are settled.

The $i$-th largest Ritz value is the $i$-th largest eigenvalue only if the Krylov space
overlooked none above it. A start vector $s$ sees one direction of each eigenspace, and
every eigenvector that is not orthogonal to $s$ shows in the end. So only copies can be
overlooked: unit eigenvectors $u$ of an eigenvalue $\lambda$ that was found, orthogonal
to the whole space. A copy of the last wanted place changes nothing; a copy of an
earlier one, whose value differs, moves every place behind it.

A fresh random vector $f$ decides. Let $P$ project onto the complement of the space.
Then $P A P u = \lambda u$, and Lanczos on $P A P$ from $f / \|f\|$, with $T$ of
diagonal $\alpha$ and off-diagonal $\beta$, has basis vectors $q_k$ with
$\langle q_k, u \rangle = p_k(\lambda) \langle q_0, u \rangle$, where

$$ p_0 = 1, \quad
   \beta_k p_{k+1}(\lambda) = (\lambda - \alpha_k) p_k(\lambda) - \beta_{k-1} p_{k-1}. $$

None is larger than one, hence $\langle q_0, u \rangle^2 \le 1 / \max_k p_k(\lambda)^2$,
which falls geometrically where $\lambda$ lies outside of the values of the complement.
(Rounding errors of earlier vectors add to $\langle q_k, u \rangle$, grown by the same
recurrence, but less than $\langle q_0, u \rangle$ does, by the ratio of the unit of
rounding to it.) But $\langle q_0, u \rangle^2$ of a normal $f$ in $d$ dimensions is
Beta(1/2, (d - 1)/2), and below $x$ with a chance of at most $\sqrt{2 d x / \pi}$. So
the chance that a copy exists and was not seen falls below any level in a few products,
or a value of the complement moves beyond the last place: then a copy was found.

References:
  Parlett 1998, The Symmetric Eigenvalue Problem, section 13.10 (multiplicities).
  Kuczynski, Wozniakowski 1992, on what Lanczos from a random start may miss.
"""

import dataclasses
import math
import typing

import numpy as np
from jaxtyping import Float

from t5x_fwdloss.curvature.krylov.chain import Chain

End = typing.Literal["largest", "smallest"]
SIGNS: dict[End, float] = {"largest": 1.0, "smallest": -1.0}
# The chance, for each end, at which a copy may be overlooked.
OVERLOOKED = 0.01
# A part of a copy as small as this hardly moves its value in the complement.
HIDDEN = 0.01
# A growth beyond this certainly suffices, and would only overflow.
LARGE = 1e50


@dataclasses.dataclass(frozen=True)
class Places:
    r"""The Ritz pairs at one end of a spectrum, from the outermost inwards.

    Attributes:
      sign: 1 at the upper end, -1 at the lower one.
      values: Ritz values.
      residuals: Residual norms, estimated or true.
      allowed: Residuals at which they are converged.
    """

    sign: float
    values: Float[np.ndarray, " k"]
    residuals: Float[np.ndarray, " k"]
    allowed: Float[np.ndarray, " k"]

    @property
    def converged(self) -> bool:
        """Whether every residual is small enough."""
        return bool((self.residuals <= self.allowed).all())

    def before(self, index: int) -> np.ndarray:
        """The values further out than place `index`, by more than their residuals."""
        gap = np.abs(self.values - self.values[index])
        apart = gap > self.allowed + self.allowed[index]
        return self.values[:index][apart[:index]]

    @property
    def at_stake(self) -> np.ndarray:
        """The values of which a copy would change the last place."""
        return self.before(len(self.values) - 1)

    def settled(self, checked: float | None, index: int = -1) -> bool:
        """Whether no copy can have moved a place, the last one by default.

        Args:
          checked: The innermost value of which no copy was overlooked.
          index: The place.
        """
        values = self.before(index % len(self.values))
        if checked is None:
            return not len(values)
        inside = self.sign * (checked - values)
        return bool((inside <= self.allowed.max()).all())

    def number_beyond(self, value: float) -> int:
        """How many of the values are at least as far out as another, up to rounding."""
        return int((self.sign * (self.values - value) >= -self.allowed).sum())

    def changed_by(self, value: float) -> bool:
        """Whether another eigenvalue, at `value` or further out, moves the last place."""
        return bool(self.sign * (value - self.values[-1]) > self.allowed[-1])


def allowed_residuals(
    values: np.ndarray, tolerance: float, level: float
) -> Float[np.ndarray, " k"]:
    r"""The residual at which each pair is converged: $\tau |\theta| + \rho \max |\theta|$.

    Args:
      values: All Ritz values of a space.
      tolerance: $\tau$, relative to each value itself.
      level: $\rho$, the level of rounding, relative to the largest (`rounding_level`).

    Returns:
      The residuals.
    """
    return tolerance * np.abs(values) + level * np.abs(values).max(initial=0.0)


def growth(chain: Chain, value: float) -> Float[np.ndarray, " k"]:
    r"""How much larger the part of a copy is in each vector of a chain than at its start.

    Args:
      chain: Lanczos in the complement.
      value: The eigenvalue, $\lambda$.

    Returns:
      $|p_0(\lambda)|, |p_1(\lambda)|, \dots$, ended by infinity where the chain is
      invariant and does not hold the value, or where it would overflow.
    """
    found, last, before, coupling = [1.0], 1.0, 0.0, 0.0
    for alpha, beta in zip(chain.alphas, chain.betas, strict=True):
        if beta == 0.0 or abs(last) > LARGE:
            return np.array([*found, math.inf])
        new = ((value - alpha) * last - coupling * before) / beta
        before, last, coupling = last, new, beta
        found.append(abs(new))
    return np.array(found)


def chance_overlooked(chain: Chain, value: float, dimension: int) -> float:
    """The chance that a copy of an eigenvalue exists in the complement, unseen.

    Args:
      chain: Lanczos in the complement, from one normal vector.
      value: The eigenvalue.
      dimension: The dimension of the complement.

    Returns:
      An upper bound.
    """
    largest = growth(chain, value).max()
    return float(min(1.0, math.sqrt(2 * dimension / math.pi) / largest))


def steps_to_show(chain: Chain, value: float) -> int:
    """Steps after which a copy shows, if the space holds the part `HIDDEN` of it.

    Args:
      chain: Lanczos in the complement, which ruled out a copy there.
      value: The eigenvalue.
    """
    return int(np.argmax(growth(chain, value) >= 1 / HIDDEN))
