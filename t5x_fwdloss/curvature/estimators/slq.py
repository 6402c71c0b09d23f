r"""Spectral densities by stochastic Lanczos quadrature (SLQ): the costly part.

$k$ Lanczos steps from a probe $z$ give the $k$-point Gauss quadrature of the measure
that puts the weight $(u_j^T z)^2 / \|z\|^2$ on eigenvalue $\lambda_j$: nodes are the
Ritz values, weights the squared first entries of their vectors. It integrates
polynomials of degree up to $2k - 1$ exactly. The mean over random probes is the spectral
density, normalized to one. Nodes and weights of each probe are kept; smoothing, grid and
band are chosen afterwards (`smoothing`).

References:
  Golub, Welsch 1969; Ubaru, Chen, Saad 2017, Fast estimation of tr f(A) via stochastic
  Lanczos quadrature; Ghorbani, Krishnan, Xiao 2019, section 2.
"""

import collections.abc
import dataclasses

import numpy as np
from jaxtyping import Float, PyTree

from t5x_fwdloss.curvature.estimators import hutchinson
from t5x_fwdloss.curvature.krylov.lanczos import (
    LanczosResult,
    eigh_tridiagonal,
    lanczos,
)
from t5x_fwdloss.curvature.krylov.space import Krylov
from t5x_fwdloss.curvature.vectors import groups, probes, trees


@dataclasses.dataclass(frozen=True)
class SpectralSamples:
    """The quadrature of each probe.

    Attributes:
      nodes: For each probe its nodes, ascending, float64.
      weights: For each probe its weights, positive, with sum one.
      dimension: The number of eigenvalues, for counts and sums.
      num_products: Products with the map.
      num_exhausted: Probes whose Krylov space became invariant: their quadrature is
        exact for every function.
    """

    nodes: list[Float[np.ndarray, " _"]]
    weights: list[Float[np.ndarray, " _"]]
    dimension: int
    num_products: int
    num_exhausted: int

    @property
    def num_probes(self) -> int:
        """The number of probes."""
        return len(self.nodes)


@dataclasses.dataclass
class SlqState:
    """The state of a run, passed to `on_step` and accepted as `state`.

    Attributes:
      nodes: Nodes of the finished probes.
      weights: Their weights.
      num_finished: Products of the finished probes.
      num_exhausted: As in `SpectralSamples`.
      space: The Krylov space of the current probe, if any.
    """

    nodes: list[list[float]] = dataclasses.field(default_factory=list)
    weights: list[list[float]] = dataclasses.field(default_factory=list)
    num_finished: int = 0
    num_exhausted: int = 0
    space: Krylov | None = None

    @property
    def num_products(self) -> int:
        """Products so far."""
        return self.num_finished + (self.space.num_products if self.space else 0)


def slq(
    matvec: trees.Matvec,
    params: PyTree,
    key: probes.Key,
    *,
    num_probes: int = 8,
    num_steps: int = 60,
    kind: str = "rademacher",
    mask: PyTree | None = None,
    basis_on_host: bool = False,
    on_step: collections.abc.Callable[[SlqState], None] | None = None,
    state: SlqState | None = None,
) -> SpectralSamples:
    """The quadratures of `num_probes` random probes, `num_steps` products each.

    A product that holds NaN or Inf raises `NonFiniteError`.

    Args:
      matvec: Product with a symmetric matrix: vector to vector.
      params: The parameters (or any vector), for shapes, paths and shardings.
      key: A seed or key; probe `i` is drawn from `fold_in(key, i)`.
      num_probes: The number of probes.
      num_steps: Lanczos steps for each, at most the dimension.
      kind: The distribution of the probes.
      mask: A parameter group (`groups.group_mask`) that `matvec` is restricted to; the
        density is then that of the group's diagonal block.
      basis_on_host: Whether the basis is kept in pinned host memory.
      on_step: Called with the state after each step.
      state: The state of an earlier run, to resume from.

    Returns:
      Nodes and weights of each probe.

    Raises:
      ValueError: A count is below one.
    """
    if min(num_probes, num_steps) < 1:
        raise ValueError(
            "num_probes and num_steps must be at least 1: got "
            f"{num_probes} and {num_steps}."
        )
    state = SlqState() if state is None else state
    dimension = (
        trees.dimension(params)
        if mask is None
        else groups.group_dimension(params, mask)
    )

    def note(space):
        state.space = space
        if on_step is not None:
            on_step(state)

    while (index := len(state.nodes)) < num_probes:
        probe = probes.random_like(probes.probe_key(key, index), params, kind)
        if mask is not None:
            probe = groups.restrict(probe, mask)
        result = lanczos(
            matvec,
            probe,
            num_steps=min(num_steps, dimension),
            basis_on_host=basis_on_host,
            on_step=note,
            space=state.space,
        )
        nodes, weights = quadrature(result)
        state.nodes.append(nodes.tolist())
        state.weights.append(weights.tolist())
        state.num_finished += len(nodes)
        state.num_exhausted += result.exhausted
        state.space = None
    return SpectralSamples(
        nodes=[np.array(nodes) for nodes in state.nodes],
        weights=[np.array(weights) for weights in state.weights],
        dimension=dimension,
        num_products=state.num_finished,
        num_exhausted=state.num_exhausted,
    )


def quadrature(result: LanczosResult) -> tuple[np.ndarray, np.ndarray]:
    """Ascending nodes and weights (sum one) of a Lanczos run (Golub and Welsch)."""
    nodes, vectors = eigh_tridiagonal(result.alphas, result.betas)
    return nodes, vectors[0] ** 2


def spectral_sum(
    samples: SpectralSamples,
    function: collections.abc.Callable[[np.ndarray], np.ndarray],
    *,
    confidence: float = 0.95,
) -> hutchinson.TraceEstimate:
    r"""The sum $\sum_j f(\lambda_j)$ over all eigenvalues, with its error.

    Args:
      samples: The quadratures.
      function: $f$, on arrays; smooth functions need few steps.
      confidence: The level of the interval.

    Returns:
      The estimate: a trace for $f(x) = x$, a squared Frobenius norm for $x^2$.
    """
    values = [
        samples.dimension * float(weights @ function(nodes))
        for nodes, weights in zip(samples.nodes, samples.weights, strict=True)
    ]
    return hutchinson.summarize(
        np.array(values), num_products=samples.num_products, confidence=confidence
    )
