r"""An orthonormal basis of vectors, stacked in blocks that are read as one array.

Block $B$ holds `rows_per_block` vectors: each leaf is `[rows, ...]`, sharded like the
parameter, the rows not yet filled are zero. A pass of classical Gram-Schmidt is two
reads of each block, one for the coefficients $c = B w$ and one for $w - B^T c$; the same
vector by vector from the host would read and write $w$ for each. Blocks may live in
host memory: then one block at a time visits the device.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from t5x_fwdloss.curvature import blocks as block_ops
from t5x_fwdloss.curvature import shardings as shardings_lib
from t5x_fwdloss.curvature import trees


class Basis:
    """Vectors stacked in blocks; grows row by row.

    Attributes:
      blocks: The stacked trees, an explicit state that can be saved as it is.
      size: The number of vectors; rows beyond it are zero.
    """

    def __init__(
        self,
        like: PyTree,
        *,
        rows_per_block: int = 4,
        on_host: bool = False,
    ):
        """An empty basis.

        Args:
          like: A vector that gives shapes, types and shardings.
          rows_per_block: Vectors in one block.
          on_host: Whether full blocks are kept in pinned host memory.
        """
        self.rows_per_block = rows_per_block
        self.on_host = on_host
        self.blocks = []
        self.size = 0
        self._like = jax.eval_shape(lambda tree: tree, like)
        self.shardings = tuple(map(shardings_lib.sharding_of, jax.tree.leaves(like)))
        self._stacked = tuple(map(shardings_lib.stacked_sharding, self.shardings))

    def _empty(self, rows):
        leaves, structure = jax.tree.flatten(self._like)
        avals = tuple(((rows, *leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)
        return shardings_lib.zeros(structure, avals, self._stacked)

    def _move(self, block, kind):
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind(kind)),
            block,
        )

    def _fetch(self, number):
        block = self.blocks[number]
        if self.on_host and number < len(self.blocks) - 1:
            return self._move(block, jax.local_devices()[0].default_memory().kind)
        return block

    def append(self, w: PyTree, factor: float, *, donate: bool = False) -> PyTree:
        """Appends the vector `factor * w` and returns it; may reuse the memory of `w`."""
        number, row = divmod(self.size, self.rows_per_block)
        if number == len(self.blocks):
            if self.on_host and self.blocks:
                self.blocks[-1] = self._move(self.blocks[-1], "pinned_host")
            self.blocks.append(self._empty(self.rows_per_block))
        write = block_ops.write_own_row if donate else block_ops.write_row
        self.blocks[number], v = write(
            self.blocks[number],
            row,
            w,
            factor,
            shardings=self.shardings,
            stacked=self._stacked,
        )
        self.size += 1
        return v

    def row(self, index: int) -> PyTree:
        """Vector number `index`."""
        number, row = divmod(index, self.rows_per_block)
        return block_ops.read_row(self._fetch(number), row, shardings=self.shardings)

    def coefficients(self, w: PyTree) -> Float[np.ndarray, " size"]:
        """The inner products of `w` with all vectors, float64 on the host; one read."""
        parts = [
            block_ops.measure(self._fetch(i), w, shardings=self.shardings)
            for i in range(len(self.blocks))
        ]
        parts = [np.asarray(part, np.float64) for part in parts]
        return np.concatenate([*parts, np.zeros(0)])[: self.size]

    def subtract(self, w: PyTree, coefficients: np.ndarray) -> PyTree:
        """`w` minus the vector with the given coefficients; one read, `w` is donated."""
        padded = np.zeros(len(self.blocks) * self.rows_per_block)
        padded[: self.size] = coefficients
        dtype = trees.widest_dtype(*jax.tree.leaves(w))
        for number, part in enumerate(padded.reshape(len(self.blocks), -1)):
            w = block_ops.subtract(
                w,
                self._fetch(number),
                jnp.asarray(part, dtype),
                shardings=self.shardings,
            )
        return w

    def combination(self, coefficients: np.ndarray) -> PyTree:
        """The vector with the given coefficients, `[size]`."""
        stacked = self._rotate(np.asarray(coefficients)[:, None])
        return block_ops.read_row(stacked, 0, shardings=self.shardings)

    def _rotate(self, rotation):
        """Stacked vectors, the columns of `rotation` `[size, n]`."""
        padded = np.zeros((len(self.blocks) * self.rows_per_block, rotation.shape[1]))
        padded[: self.size] = rotation
        total = self._empty(rotation.shape[1])
        for number in range(len(self.blocks)):
            rows = slice(
                number * self.rows_per_block, (number + 1) * self.rows_per_block
            )
            total = block_ops.add_rotated(
                total,
                jnp.asarray(
                    padded[rows].T, trees.widest_dtype(*jax.tree.leaves(total))
                ),
                self._fetch(number),
                shardings=self._stacked,
            )
        return total

    def rotated(self, rotation: np.ndarray) -> "Basis":
        """The basis of the columns of `rotation`, `[size, n]`; this one stays as it is."""
        columns = rotation.shape[1]
        blocks = []
        for start in range(0, columns, self.rows_per_block):
            part = np.zeros((self.size, self.rows_per_block))
            width = min(self.rows_per_block, columns - start)
            part[:, :width] = rotation[:, start : start + width]
            block = self._rotate(part)
            last = start + self.rows_per_block >= columns
            blocks.append(
                self._move(block, "pinned_host") if self.on_host and not last else block
            )
        result = copy.copy(self)
        result.blocks = blocks
        result.size = columns
        return result

    def metadata(self) -> dict:
        """What `from_saved` needs beside the blocks, plain numbers that JSON holds."""
        return {
            "size": self.size,
            "rows_per_block": self.rows_per_block,
            "on_host": self.on_host,
        }

    @classmethod
    def from_saved(cls, like: PyTree, blocks: list[PyTree], metadata: dict) -> "Basis":
        """The basis that `blocks` and `metadata` were taken from, to the bit."""
        options = dict(metadata)
        size = options.pop("size")
        found = cls(like, **options)
        found.restore(blocks, size)
        return found

    def restore(self, blocks: list[PyTree], size: int) -> None:
        """Takes over saved blocks, put where this basis keeps its own.

        Args:
          blocks: Stacked trees of arrays, on any device or on the host.
          size: The number of vectors in them.

        Raises:
          ValueError: The blocks are not those of a basis like this one.
        """
        rows = [self.rows_per_block, *jax.tree.leaves(self._like)[0].shape]
        for block in blocks:
            if list(jax.tree.leaves(block)[0].shape) != rows:
                raise ValueError(
                    f"A saved block's first leaf must have the shape {rows}: got "
                    f"{list(jax.tree.leaves(block)[0].shape)}."
                )
        self.blocks = [self._place(block) for block in blocks]
        if self.on_host:
            full = [self._move(block, "pinned_host") for block in self.blocks[:-1]]
            self.blocks = full + self.blocks[-1:]
        self.size = size

    def _place(self, block):
        leaves = [
            jnp.array(leaf)
            if sharding is None
            else jax.device_put(leaf, sharding, may_alias=False)
            for leaf, sharding in zip(
                jax.tree.leaves(block), self._stacked, strict=True
            )
        ]
        return jax.tree.unflatten(jax.tree.structure(self._like), leaves)

    def gram(self) -> Float[np.ndarray, "size size"]:
        """The inner products of all pairs of vectors, float64 on the host."""
        rows = []
        for i in range(len(self.blocks)):
            left = self._fetch(i)
            rows.append(
                [
                    np.asarray(
                        block_ops.gram(left, self._fetch(j), shardings=self.shardings),
                        np.float64,
                    )
                    for j in range(len(self.blocks))
                ]
            )
        if not rows:
            return np.zeros((0, 0))
        return np.block(rows)[: self.size, : self.size]

    def local_step(
        self,
        w: PyTree,
        v: PyTree,
        previous: PyTree | None,
        coefficient: float,
        overlap: float = 0.0,
    ) -> tuple[PyTree, Array, Array]:
        """Three-term recurrence: `w - c previous - <v, w> v`, that product, the norm.

        The memory of `previous` is reused. `overlap` is its rest of a product with `v`.
        """
        step = block_ops.last_local_step
        if previous is None:
            step, previous, coefficient = block_ops.local_step, v, 0.0
        return step(w, v, previous, coefficient, overlap, shardings=self.shardings)
