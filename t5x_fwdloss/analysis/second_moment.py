r"""The second moment of the gradient, out of the saved state of an optimizer.

Adam keeps it whole (`nu`), Adafactor for each leaf whole (`v`) or as means over two sets
of axes (`v_row`, `v_col`). Optax keeps a tree of parameters under each of these names,
T5X's Adafactor these names under each parameter: both are found, wherever the transform
stands in its chain. It is taken as saved: without Adam's correction for the first steps,
which is below a thousandth after some seven thousand of them (decay 0.999).
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np
from flax.core import FrozenDict

from t5x_fwdloss.curvature import factored_second_moment

Axes = tuple[tuple[int, ...], tuple[int, ...]]


def largest_axes(name: str, shape: tuple[int, ...]) -> Axes:
    """The axes that Adafactor's row and column lack by default: the two largest.

    Args:
        name: the parameter.
        shape: its shape, two axes or more.

    Returns:
        The axes that `v_row` lacks, and those that `v_col` lacks.
    """
    del name
    order = np.argsort(shape)
    return (int(order[-1]),), (int(order[-2]),)


def from_state(
    state: Any,
    params: Mapping[str, Any],
    lacking: Callable[[str, tuple[int, ...]], Axes] = largest_axes,
) -> Any:
    """The second moment, a tree like the parameters.

    Args:
        state: the optimizer's state as it is saved: nested dictionaries, or sequences.
        params: the parameters, nested dictionaries.
        lacking: name and shape of a factored parameter to the axes that `v_row` and
            those that `v_col` lack.

    Raises:
        ValueError: the state holds neither Adam's nor Adafactor's second moment.
    """
    flat, shapes = _flat(state), {k: x.shape for k, x in _flat(params).items()}
    found = _by_name(flat, "nu", shapes)
    if found is None:
        parts = [_by_name(flat, field, shapes) for field in ("v", "v_row", "v_col")]
        if None in parts:
            some = ", ".join(sorted(flat)[:3]) or "nothing"
            raise ValueError(
                "The state of the checkpoint's optimizer must hold a second moment "
                f"(Adam's nu, Adafactor's v): it holds {some}"
                f"{', ...' if len(flat) > 3 else ''}."
            )
        found = {}
        for name, shape in shapes.items():
            whole, row, column = (part[name] for part in parts if part is not None)
            found[name] = whole
            if whole.shape != shape:
                row_lacks, column_lacks = lacking(name, shape)
                found[name] = factored_second_moment(
                    row, column, row_lacks=row_lacks, column_lacks=column_lacks
                )
    tree = flax.traverse_util.unflatten_dict(found, sep="/")
    return FrozenDict(tree) if isinstance(params, FrozenDict) else tree


def _flat(tree) -> dict[str, Any]:
    # An optax chain is a sequence of states: their places become names.
    nested = flax.serialization.to_state_dict(tree)
    return flax.traverse_util.flatten_dict(nested, sep="/")


def _by_name(flat, field, names) -> dict[str, Any] | None:
    """The entries of one field for all parameters, from one place in the state."""
    first = next(iter(names))
    for ending in (lambda n: f"{field}/{n}", lambda n: f"{n}/{field}"):
        for key in flat:
            prefix = key.removesuffix(ending(first))
            if prefix == key or not (prefix == "" or prefix.endswith("/")):
                continue
            found = {n: flat.get(prefix + ending(n)) for n in names}
            if all(x is not None for x in found.values()):
                return found
    return None
