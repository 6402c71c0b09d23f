r"""Which matrix a measurement is of: the whole, a group's block, preconditioned, damped.

With $A$ the matrix that the class names, $P$ the projection on a parameter group and
$D^2 = (\sqrt v + \epsilon)^{-1}$ the preconditioner of the checkpoint's optimizer (second
moment $v$), it is

$$ P D A D P + \lambda P, \qquad D = I \text{ unless preconditioned}, $$

a map on the group alone. $D A D$ has the eigenvalues of $D^2 A$: a step of Adam or
Adafactor with a step size $\eta$ is stable while they are below $2 / \eta$ (Cohen et al.
2022, section 2; Adafactor's own relative step sizes come on top).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.context import Context
from t5x_fwdloss.curvature import groups, preconditioning, trees
from t5x_fwdloss.curvature.krylov import Matvec
from t5x_fwdloss.curvature.probe_sums import ProbeEstimates, probe_estimates


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMatrix:
    """Settings shared by the measurements of a matrix; `matrix` names it.

    Attributes:
        group: a regular expression for the whole path of parameters, such as
            'decoder/.*': only their diagonal block is measured; None: all of it.
        preconditioned: whether by the second moment of the checkpoint's optimizer.
        damping: what is added to every eigenvalue.
    """

    matrix: ClassVar[str]

    group: str | None = None
    preconditioned: bool = False
    damping: float = 0.0

    def check_matrix(self, context: Context) -> None:
        """Check that the matrix is there, with group and optimizer.

        Raises:
            ValueError: the objective lacks the matrix, the group matches nothing, the
                damping is not finite, or the run cannot read an optimizer's state.
        """
        context.objective.check_matrix(self.matrix)
        self.mask(context)
        title = type(self).__name__
        if not math.isfinite(self.damping):
            raise ValueError(f"{title}.damping must be finite: got {self.damping}.")
        if self.preconditioned:
            context.check_second_moment(f"{title}.preconditioned")

    def mask(self, context: Context) -> PyTree | None:
        """The group as a tree of booleans; None for all parameters."""
        if self.group is None:
            return None
        return groups.group_mask(context.params, self.group)

    def dimension(self, context: Context) -> int:
        """The number of parameters it is a matrix of."""
        mask = self.mask(context)
        if mask is None:
            return trees.dimension(context.params)
        return groups.group_dimension(context.params, mask)

    def unit(self, context: Context) -> str:
        """The unit of its eigenvalues."""
        return "per θ" if self.preconditioned else context.curvature_unit

    def vector(self, context: Context, v: PyTree) -> PyTree:
        """A gradient in the coordinates of the matrix, $P D v$."""
        if self.preconditioned:
            root = preconditioning.root(context.preconditioner())
            v = preconditioning.apply_diagonal(root, v)
        mask = self.mask(context)
        return v if mask is None else groups.restrict(v, mask)

    def direction(self, context: Context, v: PyTree) -> PyTree:
        """An eigenvector as a direction of the parameters, $D v$."""
        if not self.preconditioned:
            return v
        root = preconditioning.root(context.preconditioner())
        return preconditioning.apply_diagonal(root, v)

    def product(
        self, context: Context, block_size: int = 1, at: PyTree | None = None
    ) -> Callable[[PyTree], PyTree]:
        """The product with one vector, or with stacked ones.

        Args:
            context: the run.
            block_size: 1, or how many vectors are stacked.
            at: other parameters, for products with one vector; None: the checkpoint's.
        """
        found = context.product(self.matrix, block_size, at)
        if self.preconditioned:
            root = preconditioning.root(context.preconditioner())
            found = preconditioning.congruent(found, root)
        mask = self.mask(context)
        if mask is not None:
            found = groups.restricted(found, mask)
        if self.damping:
            found = _damped(found, self.damping, mask)
        return found


def one_probe(
    context: Context, matrix: str, product: Matvec, **settings: Any
) -> ProbeEstimates:
    """What a single probe tells: enough to see how far rounding moves an estimate.

    Args:
        context: the run.
        matrix: the matrix's name, on which the probe depends.
        product: its product with one vector.
        **settings: groups and diagonal, as of `probe_estimates`.
    """
    key = context.key(f"{matrix}/one_probe")
    return probe_estimates(product, context.params, key, num_probes=1, **settings)


def _damped(product, damping, mask):
    def damped(v):
        inside = v if mask is None else groups.restrict(v, mask)
        return trees.axpy(damping, inside, product(v))

    return damped
