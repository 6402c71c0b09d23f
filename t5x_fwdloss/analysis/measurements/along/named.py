"""The directions that measurements know by name, as vectors.

    gradient                           the gradient of the objective
    preconditioned_gradient            the gradient as the checkpoint's optimizer scales it
                                       at its step: minus the update of a small step,
                                       without learning rate and momentum
    random, random:1, ...              seeded Gaussian directions; the first is number 0
    eigenvector:<measurement>:<place>  one that an earlier measurement saved, from 0 on,
                                       the largest eigenvalue's first
    checkpoint:<path>                  another checkpoint's parameters minus these

None of them has norm one yet.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.context import Context, Measurement
from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.curvature import apply_diagonal, filter_normalized, leaf_normalized
from t5x_fwdloss.curvature.vectors import groups, probes, trees

NORMALIZATIONS = {
    "vector": lambda vector, _: vector,
    "leaf": leaf_normalized,
    "filter": filter_normalized,
}
WORDS = (
    "'gradient', 'preconditioned_gradient', 'random:<number>', "
    "'eigenvector:<measurement>:<place>' or 'checkpoint:<path>'"
)
_PATTERNS = {
    "gradient": "",
    "preconditioned_gradient": "",
    "random": r"(?::(?P<number>\d{1,9}))?",
    "eigenvector": r":(?P<source>[^:]+):(?P<number>\d{1,9})",
    "checkpoint": r":(?P<source>.*\S.*)",
}


@dataclasses.dataclass(frozen=True)
class Direction:
    """A direction by name.

    Attributes:
        kind: 'gradient', 'preconditioned_gradient', 'random', 'eigenvector' or
            'checkpoint'.
        source: the measurement that saves eigenvectors, or the checkpoint's path.
        number: the number of a random direction or of an eigenvector.
    """

    kind: str
    source: str = ""
    number: int = 0


def parse(setting: str, text: str) -> Direction:
    """The direction that a string names.

    Args:
        setting: name of the setting that it belongs to.
        text: the string.

    Raises:
        ValueError: there is no such direction.
    """
    for kind, pattern in _PATTERNS.items():
        found = re.fullmatch(kind + pattern, text)
        if found:
            parts = found.groupdict()
            number = int(parts.get("number") or 0)
            return Direction(kind, parts.get("source") or "", number)
    raise ValueError(f"{setting} must be {WORDS}: got {text!r}.")


def check_source(setting: str, name: str, earlier: Sequence[Measurement]) -> int:
    """How many eigenvectors an earlier measurement saves, at most.

    Args:
        setting: the setting that names it.
        name: the measurement's name.
        earlier: the measurements before the one that reads them.

    Raises:
        ValueError: there is none of this name that saves any.
    """
    counts = {x.name: x.num_vectors for x in earlier if x.num_vectors}
    if name not in counts:
        raise ValueError(
            f"{setting} must name a measurement before it with save_eigenvectors=True: "
            f"got {name!r}."
        )
    return counts[name]


def check_place(
    setting: str, direction: Direction, earlier: Sequence[Measurement]
) -> None:
    """Pass if an earlier measurement saves as many eigenvectors as a direction needs.

    Args:
        setting: the setting that names it.
        direction: an eigenvector.
        earlier: the measurements before the one that reads it.

    Raises:
        ValueError: there is no such measurement, or it saves fewer.
    """
    count = check_source(setting, direction.source, earlier)
    if direction.number >= count:
        raise ValueError(
            f"{setting} must name an eigenvector of {direction.source}, from 0 to "
            f"{count - 1}: got {direction.number}."
        )


def label(direction: Direction, all_of_them: Sequence[Direction]) -> str:
    """The name of a direction in the results, unique among those of a measurement."""
    if direction.kind == "random":
        return f"random_{direction.number}"
    if direction.kind == "eigenvector":
        return f"{direction.source}_eigenvector_{direction.number}"
    if direction.kind == "checkpoint":
        others = [x for x in all_of_them if x.kind == "checkpoint"]
        return f"checkpoint_{others.index(direction)}"
    return direction.kind


def check_loaded(
    directions: Iterable[Direction], context: Context, settings: Mapping[str, str]
) -> None:
    """Pass if what directions need loads, fits and is finite.

    That is the state of the checkpoint's optimizer, and other checkpoints.

    Args:
        directions: the directions.
        context: the run.
        settings: for 'preconditioned_gradient' and for 'checkpoint' the setting that
            names it.

    Raises:
        ValueError: it does not, or the run cannot load it.
    """
    for direction in directions:
        if direction.kind == "preconditioned_gradient":
            context.check_preconditioner(settings[direction.kind])
        if direction.kind != "checkpoint":
            continue
        path = direction.source
        if context.load_params is None:
            raise ValueError(
                f"{settings[direction.kind]} needs a run that can load other "
                f"checkpoints: got {path} and no loader."
            )
        if not np.isfinite(float(trees.norm(difference(context, path)))):
            raise ValueError(
                f"the parameters of the checkpoint {path} must be finite: they hold NaN "
                "or Inf."
            )


def vector(
    direction: Direction,
    context: Context,
    owner: str,
    normalization: str = "vector",
    *,
    ignore_vectors: bool = False,
) -> PyTree | None:
    """The direction as a vector; None for an eigenvector that was not found.

    Args:
        direction: the direction.
        context: the run.
        owner: the measurement's name: random directions depend on it.
        normalization: that of random directions, in `NORMALIZATIONS`.
        ignore_vectors: whether random directions are zero on parameters without a
            second axis: scales and biases, also where layers are stacked.
    """
    if direction.kind == "gradient":
        return context.gradient()
    if direction.kind == "preconditioned_gradient":
        return apply_diagonal(context.preconditioner().diagonal, context.gradient())
    if direction.kind == "random":
        key = probes.probe_key(context.key(f"{owner}/random"), direction.number)
        probe = probes.random_like(key, context.params, "normal")
        if ignore_vectors:
            probe = groups.restrict(probe, _with_second_axis(context.params))
        return NORMALIZATIONS[normalization](probe, context.params)
    if direction.kind == "eigenvector":
        return context.saved_vector(direction.source, direction.number)
    return difference(context, direction.source)


def difference(context: Context, path: str) -> PyTree:
    """The parameters of another checkpoint minus these."""
    assert context.load_params is not None
    other = parameters.widened(context.load_params(path))
    here, there = (trees.float_part(p) for p in (context.params, other))
    trees.check_like(there, here, f"checkpoint {path}")
    there = jax.tree.map(
        lambda x, y: jax.device_put(x, y.sharding).astype(y.dtype), there, here
    )
    return trees.axpy(-1.0, here, there)


def _with_second_axis(params: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf.ndim > 1 and trees.leaf_path(path[-1:]) not in ("scale", "bias")
        ),
        trees.float_part(params),
    )


def moved(
    params: PyTree, coefficients: Sequence[float], directions: Sequence[PyTree]
) -> PyTree:
    """The parameters, moved along directions by multiples of them."""
    point = trees.float_part(params)
    for coefficient, direction in zip(coefficients, directions, strict=True):
        point = trees.axpy(coefficient, direction, point)
    return trees.merge(point, params)
