r"""Parameter groups by regular expression, and maps restricted to one of them.

A group is a mask: a tree of booleans, `None` where the parameters have no float type.
With $P$ the projection that sets all other leaves to zero, the map restricted to the
group is $P A P$: the diagonal block of $A$, seen as a map on whole vectors.

A pattern has to match the *whole* T5X path, as in T5X's own rules, so that
`encoder/layers_1/.*` does not mean layer 10 as well.
"""

import collections.abc
import contextlib
import functools
import math
import re
import signal
import threading

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.curvature.vectors import layout as shardings_lib
from t5x_fwdloss.curvature.vectors import trees

# Matching all paths takes milliseconds, unless a pattern needs exponential time.
SECONDS_TO_MATCH = 5


def group_mask(params: PyTree, pattern: str) -> PyTree:
    """The float leaves whose whole path matches a regular expression.

    Args:
      params: The parameters.
      pattern: A regular expression for paths such as `decoder/layers_0/mlp/wi/kernel`.

    Returns:
      A tree of booleans; `None` for leaves that are not of a float type.

    Raises:
      ValueError: The pattern matches no float leaf. It is also raised where the pattern
        is not a regular expression, or takes more than `SECONDS_TO_MATCH` to match.
    """
    floats = trees.float_part(params)
    paths = trees.leaf_paths(floats)
    flags = matches(pattern, paths)
    if not any(flags):
        raise ValueError(
            f"A group must match the whole path of at least one float parameter: "
            f"{pattern!r} matches none of {len(paths)}, such as {paths[:3]}."
        )
    return jax.tree.unflatten(jax.tree.structure(floats), flags)


def matches(pattern: str, paths: list[str]) -> list[bool]:
    """Whether each whole path matches a regular expression.

    Args:
      pattern: The regular expression.
      paths: Paths of leaves.

    Raises:
      ValueError: The pattern is not a regular expression, or slow to match.
    """
    try:
        compiled = re.compile(pattern)
        with _time_limit(SECONDS_TO_MATCH):
            return [compiled.fullmatch(path) is not None for path in paths]
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"A group must be a regular expression: got {pattern!r} ({error})."
        ) from error
    except TimeoutError as error:
        raise ValueError(
            f"A group must be a regular expression that is quick to match: {pattern!r} "
            f"took longer than {SECONDS_TO_MATCH} s for {len(paths)} paths; leave out "
            "repetitions of repetitions such as (a+)+."
        ) from error


@contextlib.contextmanager
def _time_limit(seconds: int):
    """Raises `TimeoutError` in the block after some time; signals interrupt matching.

    Outside of the main thread, where Python handles no signals, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


def group_masks(
    params: PyTree, patterns: collections.abc.Mapping[str, str]
) -> dict[str, PyTree]:
    """The mask of each named pattern; groups may overlap and need not cover all."""
    return {name: group_mask(params, pattern) for name, pattern in patterns.items()}


def group_dimension(params: PyTree, mask: PyTree) -> int:
    """The number of parameters in a group."""
    leaves, flags = jax.tree.leaves(trees.float_part(params)), jax.tree.leaves(mask)
    pairs = zip(leaves, flags, strict=True)
    return sum(math.prod(leaf.shape) for leaf, flag in pairs if flag)


@functools.partial(jax.jit, static_argnames=("flags", "shardings"))
def _restrict(leaves, *, flags, shardings):
    def one(leaf, keep, sharding):
        if keep:
            return leaf
        return shardings_lib.kept(jnp.zeros_like(leaf), sharding)

    return [one(*group) for group in zip(leaves, flags, shardings, strict=True)]


def restrict(vector: PyTree, mask: PyTree) -> PyTree:
    """The vector with all leaves outside of the group set to zero; shardings kept."""
    leaves, structure = jax.tree.flatten(vector)
    kept = _restrict(
        leaves,
        flags=tuple(jax.tree.leaves(mask)),
        shardings=tuple(shardings_lib.sharding_of(leaf) for leaf in leaves),
    )
    return jax.tree.unflatten(structure, kept)


def restricted(matvec: trees.Matvec, mask: PyTree) -> trees.Matvec:
    """The map $v -> P A P v$ of a host-driven product.

    Args:
      matvec: The product with $A$.
      mask: The group.

    Returns:
      The product with the group's diagonal block.
    """
    return lambda v: restrict(matvec(restrict(v, mask)), mask)
