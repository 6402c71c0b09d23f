"""The work of a measurement, counted in products and vectors, for a plan of the run."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a measurement takes at most, in products with a matrix and in vectors.

    Vectors are trees like the parameters. The numbers follow from settings alone.

    Attributes:
        matrix: the matrix, a name in `matrices.WORDS`.
        num_products: products, counted by single vectors.
        block_size: vectors in one compiled product.
        basis: vectors that are held from one product to the next.
        on_host: how many of them are in host memory.
        working: further vectors on the devices during a product, its argument among
            them where that is not one of the basis; its result is not counted.
        replaced: vectors that a restart computes anew, one parameter array at a time,
            while the old ones are still there.
        rounded_products: further products, if the network multiplies in a type narrower
            than float32.
        num_results: vectors that are held while its rounding is measured.
        gradient: whether it computes the gradient, which the run keeps.
    """

    matrix: str
    num_products: int
    block_size: int = 1
    basis: int = 0
    on_host: int = 0
    working: int = 1
    replaced: int = 0
    rounded_products: int = 0
    num_results: int = 0
    gradient: bool = False


def in_blocks(block_size: int) -> int:
    """The working vectors of a product of several: each is also in the stack."""
    return 1 if block_size == 1 else 2 * block_size
