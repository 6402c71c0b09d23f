r"""An orthonormal basis that grows vector by vector and is read a few vectors at a time.

A pass of classical Gram-Schmidt reads each basis vector twice, once for $c = V^T w$ and
once for $w - V c$, and `w` once for `ROWS` of them; one vector at a time would read,
and write, `w` for each. An appended vector keeps the memory it was computed in. Basis
vectors may stay in host memory, a few at a time on the device.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from t5x_fwdloss.curvature.krylov import rows as row_ops
from t5x_fwdloss.curvature.vectors import freed_memory, in_flight, trees
from t5x_fwdloss.curvature.vectors import layout as shardings_lib

# Basis vectors that one compiled function reads.
ROWS = 4
# Basis vectors always kept on the device: the recurrence reads them next.
ON_DEVICE = 2


@dataclasses.dataclass
class Basis:
    """Vectors that do not change once appended.

    Attributes:
      like: A vector that gives shapes, types and shardings; only these are kept.
      on_host: Whether all but the newest vectors are kept in pinned host memory.
      vectors: The basis vectors, trees like the parameters.
    """

    like: PyTree
    on_host: bool = False
    vectors: list[PyTree] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        """Drops the arrays of `like`, and moves vectors to the host with `on_host`."""
        self.like = shardings_lib.described(self.like)
        self.shardings = tuple(
            map(shardings_lib.sharding_of, jax.tree.leaves(self.like))
        )
        if self.on_host:
            for old in range(self.size - ON_DEVICE):
                self.vectors[old] = _move(self.vectors[old], "pinned_host")

    @property
    def size(self) -> int:
        """The number of vectors."""
        return len(self.vectors)

    def append(self, w: PyTree, factor: float, *, donate: bool = False) -> PyTree:
        """Appends the vector `factor * w` and returns it; may reuse the memory of `w`."""
        scale = row_ops.scale_in_place if donate else row_ops.scaled
        return self._add(scale(factor, w, shardings=self.shardings))

    def _add(self, v):
        self.vectors.append(v)
        if self.on_host and self.size > ON_DEVICE:
            old = self.size - ON_DEVICE - 1
            self.vectors[old] = _move(self.vectors[old], "pinned_host")
        return v

    def row(self, index: int) -> PyTree:
        """Vector number `index`; its memory must not be donated."""
        if self.on_host and index < self.size - ON_DEVICE:
            kind = jax.local_devices()[0].default_memory().kind
            return _move(self.vectors[index], kind)
        return self.vectors[index]

    def _rows(self, first, count):
        return tuple(self.row(i) for i in range(first, min(first + count, self.size)))

    def coefficients(self, w: PyTree) -> Float[np.ndarray, " size"]:
        """The inner products of `w` with all vectors, float64 on the host; one read."""
        whole = self.size - self.size % ROWS
        # One by one at the end: no remainder is worth a compilation of its own.
        groups = [self._rows(first, ROWS) for first in range(0, whole, ROWS)]
        groups += [self._rows(index, 1) for index in range(whole, self.size)]
        parts = [
            in_flight.limited(i, row_ops.measure(rows, w, shardings=self.shardings))
            for i, rows in enumerate(groups)
        ]
        parts = [np.asarray(part, np.float64) for part in parts]
        return np.concatenate([*parts, np.zeros(0)])

    def subtract(self, w: PyTree, coefficients: np.ndarray) -> PyTree:
        """`w` minus the vector with the given coefficients; one read, `w` is donated."""
        dtype = trees.widest_dtype(*jax.tree.leaves(w))
        for number, first in enumerate(range(0, self.size, ROWS)):
            part = np.asarray(coefficients[first : first + ROWS], np.float64)
            if not part.any():
                continue
            rows = self._rows(first, ROWS)
            rows += rows[:1] * (ROWS - len(rows))  # one shape: the rest times zero
            c = jnp.asarray(np.r_[part, np.zeros(ROWS - len(part))], dtype)
            w = row_ops.subtract(w, rows, c, shardings=self.shardings)
            in_flight.limited(number, w)
        return w

    def combination(self, coefficients: np.ndarray) -> PyTree:
        """The vector with the given coefficients, `[size]`."""
        leaves, structure = jax.tree.flatten(self.like)
        avals = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        zero = shardings_lib.zeros(structure, avals, self.shardings)
        return self.subtract(zero, -np.asarray(coefficients, np.float64))

    def rotate(self, rotation: np.ndarray) -> None:
        """Replaces the vectors by the columns of `rotation`, `[size, n]`, leaf by leaf.

        So old and new vectors are in memory together for one leaf only.

        Args:
          rotation: The coefficients of the new vectors in the old ones.
        """
        likes, structure = jax.tree.flatten(self.like)
        old = [jax.tree.leaves(vector) for vector in self.vectors]
        new: list[list[Array]] = [[] for _ in rotation.T]
        self.vectors = []
        for number, like in enumerate(likes):
            part = Basis(like, self.on_host, [leaves[number] for leaves in old])
            for leaves in old:
                leaves[number] = None
            for leaves, leaf in zip(new, part._columns(rotation), strict=True):
                leaves.append(leaf)
            del part
        self.vectors = [jax.tree.unflatten(structure, leaves) for leaves in new]
        freed_memory.give_back()

    def _columns(self, rotation):
        """The vectors with the coefficients of each column, once they are computed."""
        result = Basis(self.like, self.on_host)
        for column in rotation.T:
            (used,) = np.nonzero(column)
            kept = len(used) == 1 and column[used[0]] == 1.0
            result._add(self.row(int(used[0])) if kept else self.combination(column))
        # Until then the old vectors are in use, and their memory with them.
        return jax.block_until_ready(result.vectors)

    def gram(self) -> Float[np.ndarray, "size size"]:
        """The inner products of all pairs of vectors, float64 on the host."""
        rows = [self.coefficients(self.row(i)) for i in range(self.size)]
        return np.array(rows).reshape(self.size, self.size)

    def local_step(
        self,
        w: PyTree,
        v: PyTree,
        previous: PyTree | None,
        coefficient: float,
    ) -> tuple[PyTree, Array, Array]:
        """Three-term recurrence: `w - c previous - <v, w> v`, that product, the norm.

        The memory of `w` is reused, unless `w` shares it with `v` or does not have the
        types and shardings of the basis.
        """
        if previous is None:
            previous, coefficient = v, 0.0
        if self._needs_copy(w, v):
            w = row_ops.cast(w, v, shardings=self.shardings)
        return row_ops.local_step(w, v, previous, coefficient, shardings=self.shardings)

    def _needs_copy(self, w, v):
        triples = zip(
            jax.tree.leaves(w), jax.tree.leaves(v), self.shardings, strict=True
        )
        return not all(
            isinstance(one, jax.Array)
            and one is not other
            and one.dtype == other.dtype
            and (sharding is None or one.sharding.is_equivalent_to(sharding, one.ndim))
            for one, other, sharding in triples
        )


def _move(vector, kind):
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(kind)), vector
    )
