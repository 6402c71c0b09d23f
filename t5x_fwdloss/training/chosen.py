"""The parameters that move, by a regular expression: a tree of theirs, and back."""

from typing import Any

from flax import traverse_util
from flax.core import FrozenDict, freeze, unfreeze

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.curvature.vectors import groups

PARAMETERS = "FORWARD_GRADIENT_PARAMETERS"
Tree = Any  # nested dictionaries, frozen or not


class Chosen:
    """The leaves of nested dictionaries whose whole path matches a pattern."""

    def __init__(self, pattern: str):
        """Nothing is matched yet.

        Args:
            pattern: a regular expression for paths such as `decoder/decoder_norm/scale`;
                another string raises `ValueError`.
        """
        settings.check(PARAMETERS, pattern, settings.Pattern)
        self.pattern = pattern

    def check(self, params: Tree) -> None:
        """Passes if the pattern chooses some parameters.

        Args:
            params: all parameters, or their shapes.

        Raises:
            ValueError: it matches none, or takes too long to match.
        """
        try:
            groups.group_mask(params, self.pattern)
        except ValueError as error:
            raise ValueError(f"{PARAMETERS} chooses what moves: {error}") from error

    def pick(self, tree: Tree) -> Tree:
        """The chosen leaves, in nested dictionaries that hold nothing else."""
        flat = traverse_util.flatten_dict(unfreeze(tree))
        paths = list(flat)
        flags = groups.matches(self.pattern, ["/".join(path) for path in paths])
        kept = {p: flat[p] for p, flag in zip(paths, flags, strict=True) if flag}
        return _like(traverse_util.unflatten_dict(kept), tree)


def put(part: Tree, tree: Tree) -> Tree:
    """The tree with the leaves of `part` in the place of its own."""
    flat = traverse_util.flatten_dict(unfreeze(tree))
    flat |= traverse_util.flatten_dict(unfreeze(part))
    return _like(traverse_util.unflatten_dict(flat), tree)


def _like(found, tree):
    return freeze(found) if isinstance(tree, FrozenDict) else found
