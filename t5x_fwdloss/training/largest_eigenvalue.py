r"""The largest eigenvalue of the Hessian while training, from the last eigenvector on.

Every probe takes $k$ Lanczos steps, one product each, at the parameters after the step,
with the step's batch: what an analysis of the checkpoint after this step would find on
that batch. The first probe starts at a random vector, each later one at the eigenvector
of the one before it, to which the eigenvector has moved little. With $\theta$ the largest
Ritz value and $r$ the norm of its residual, an eigenvalue lies in
$[\theta - r, \theta + r]$, and $\theta$ is at most the largest one.

With $P$ the preconditioner of the optimizer, $P^{1/2} H P^{1/2}$ has the eigenvalues of
$P H$. Gradient descent is stable below $2 / \eta$; other optimizers have thresholds of
their own (see `analysis.optimizer`).

References:
  Cohen et al. 2021, arXiv 2103.00065; 2022, arXiv 2207.14484: the edge of stability.
  Gilmer et al. 2021, arXiv 2110.04369: the largest eigenvalue in a training loop.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from absl import logging
from jaxtyping import PyTree

from t5x_fwdloss import curvature
from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.curvature.krylov.lanczos import eigh_tridiagonal
from t5x_fwdloss.curvature.vectors import preconditioning, trees
from t5x_fwdloss.training.quantity import Compile, ProbedStep

HESSIAN, PRECONDITIONED = "hessian", "preconditioned_hessian"
Matrix = Annotated[str, settings.one_of(HESSIAN, PRECONDITIONED)]
Loss = Callable[..., Any]


class LargestEigenvalues:
    """The largest eigenvalue of some matrices, each with the norm of its residual."""

    def __init__(self, loss: Loss, matrices: Sequence[str], num_products: int):
        """Nothing is compiled yet.

        Args:
            loss: `(params, batch, key)` to the training loss.
            matrices: "hessian", "preconditioned_hessian" or both.
            num_products: products for each matrix and probe.
        """
        self._loss, self._matrices, self._steps = loss, matrices, num_products
        self._product: Any = None
        self._starts: dict[str, PyTree] = {}

    def prepare(self, compiled: Compile) -> None:
        """Compiles the product with the Hessian."""
        product = curvature.hessian_product(self._loss)
        self._product = compiled(
            lambda params, batch, key, v: product(params, v, batch, key),
            *("params", "batch", "key", "vector"),
            result="vector",
        )

    def measure(self, step: ProbedStep) -> dict[str, float]:
        """`largest_eigenvalue_of_<matrix>`, its `residual_of_...`, and the threshold.

        A preconditioner that is not defined is logged, and its numbers are left out.
        """
        hessian = lambda v: self._product(step.new, step.batch, step.key, v)
        numbers = {}
        for matrix in self._matrices:
            matvec = hessian
            if matrix == PRECONDITIONED:
                try:
                    found = step.preconditioner()
                except ValueError as error:  # such as a learning rate of zero
                    logging.error("The preconditioned Hessian is not probed: %s", error)
                    continue
                numbers |= threshold(found)
                root = preconditioning.root(found.diagonal)
                matvec = curvature.congruent(hessian, root)
            numbers |= self._largest(matrix, matvec, step.new)
        return numbers

    def _largest(self, matrix, matvec, params):
        start = self._starts.get(matrix)
        if start is None:
            start = curvature.random_like(0, params, "normal")
        try:
            value, residual, vector = largest(matvec, start, self._steps)
        except curvature.NonFiniteError:
            # The next probe begins anew.
            value, residual, vector = math.nan, math.nan, None
        self._starts[matrix] = vector
        return {
            f"largest_eigenvalue_of_{matrix}": value,
            f"residual_of_{matrix}": residual,
        }


def largest(
    matvec: trees.Matvec, start: PyTree, num_products: int
) -> tuple[float, float, PyTree]:
    """The largest Ritz value of a Krylov space, its residual's norm, and its vector.

    Args:
        matvec: product with a symmetric matrix.
        start: the start vector, not zero.
        num_products: Lanczos steps; one vector is held for each, and one more.
    """
    found = curvature.lanczos(matvec, start, num_steps=num_products)
    values, vectors = eigh_tridiagonal(found.alphas, found.betas)
    coefficients = np.zeros(found.basis.size)
    coefficients[: len(values)] = vectors[:, -1]
    residual = found.betas[-1] * abs(vectors[-1, -1])
    return float(values[-1]), float(residual), found.basis.combination(coefficients)


def threshold(found: Preconditioner) -> dict[str, float]:
    """The eigenvalue of the preconditioned Hessian below which steps are stable.

    Empty if the kind of momentum is unknown.
    """
    if found.threshold is None:
        return {}
    rate = 1.0 if found.includes_learning_rate else found.learning_rate
    return (
        {"threshold_of_preconditioned_hessian": found.threshold / rate} if rate else {}
    )
