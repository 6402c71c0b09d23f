r"""How far a network's rounding moves a number: the number is computed again, K times.

A network that multiplies matrices in bfloat16 rounds its parameters, activations and
tangents, and its results differ from those of exact arithmetic by an amount that
neither a residual nor a standard error contains. At the parameters

$$ \theta_k = \theta \odot (1 + u\, \xi_k), \qquad \xi_k \sim U[-1, 1], $$

with $u$ the unit roundoff of that type, everything is rounded anew, and no parameter
changes by more than a rounding error. With $x$ the number and $x_k$ the same at
$\theta_k$, the error is $c \sqrt{\frac1K \sum_k (x_k - x)^2}$. With $K = 3$ and
$c = 2.5$ it covers 99 % of the time if x and the $x_k$ scatter alike, and is then about
four times as large as the actual deviation. It needs no network of higher precision,
and one or two products for each $x_k$.

An effect of rounding that is common to all draws does not show in their scatter. Where
it matters, at the ends of a spectrum, $x$ is a whole product instead and the error is
the norm of its change, with $c = 1.5$ (see `measurements/of_matrix/eigenpairs.py`).

References:
  Parker 1997, Monte Carlo arithmetic: exploiting randomness in floating-point
  arithmetic (random perturbations of the size of a rounding error).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import erf
from jaxtyping import PyTree

from t5x_fwdloss.analysis.numbers import WITHOUT_ERROR, Number
from t5x_fwdloss.curvature.vectors import probes, trees
from t5x_fwdloss.curvature.vectors.trees import Matvec

NUM_DRAWS = 3
FACTOR = 2.5
# For the norm of a change: the sum of many entries scatters little from draw to draw.
NORM_FACTOR = 1.5
SCALE = 1.37


class Rounding:
    """The rounding of a network whose products are of a type narrower than float32.

    Attributes:
        dtype: that type; where it is not narrower than float32, all errors are zero.
        matters: whether it is narrower than float32.
    """

    def __init__(self, dtype: str, params: PyTree, key: jax.Array, setting: str = ""):
        """Draws nothing yet.

        Args:
            dtype: the narrowest type of an operand of a matrix product.
            params: the parameters, float32 or wider.
            key: the key of the perturbations.
            setting: the gin binding that removes the rounding, if it is known.
        """
        self.dtype = dtype
        self.matters = jnp.finfo(dtype).bits < 32
        self._params, self._key, self._setting = params, key, setting

    @property
    def notes(self) -> tuple[str, ...]:
        """The note for a measurement's reader; none where rounding does not matter."""
        if not self.matters:
            return ()
        remedy = self._setting or "an activation dtype of float32"
        return (
            f"The network multiplies in {self.dtype}: the errors include its "
            f"rounding, measured by {NUM_DRAWS} computations at parameters that "
            f"differ by less than {self.dtype} resolves. {remedy} removes it, with the "
            "same checkpoint.",
        )

    def errors(
        self,
        at: Callable[[PyTree | None], PyTree],
        base: PyTree | None = None,
        factor: float = FACTOR,
    ) -> PyTree | None:
        """The effect of rounding on each number or entry; None, at no cost, in float32.

        Args:
            at: a tree of numbers or vectors at given parameters; None: as reported, at
                those of the checkpoint.
            base: `at(None)`, if it is known.
            factor: $c$.
        """
        if not self.matters:
            return None
        base = at(None) if base is None else base
        total = None
        for params in self._draws():
            total = _add_square(total, base, at(params))
        return _root(total, factor**2 / NUM_DRAWS)

    def include(
        self,
        numbers: Mapping[str, Number],
        at: Callable[[PyTree | None], dict[str, float]],
        base: dict[str, float] | None = None,
    ) -> dict[str, Number]:
        """The numbers, with the rounding in the errors of those that `at` names.

        Args:
            numbers: the numbers as reported.
            at: for some of them, or more, an estimate at given parameters, as for
                `errors`; it may cost less than the number itself.
            base: `at(None)`, if it is known.
        """
        errors = self.errors(at, base) or {}
        return dict(numbers) | {
            name: with_rounding(numbers[name], float(error), self.dtype)
            for name, error in errors.items()
            if name in numbers
        }

    def of_product(self, product: Matvec, v: PyTree) -> float:
        r"""The relative norm of a product's rounding error; 0, at no cost, in float32.

        A linear map has $A (a v) / a = A v$; with $a = 1.37$, not a power of two, the
        tangent is rounded differently. Residuals do not fall below it.

        Args:
            product: the product with one vector.
            v: a vector.
        """
        if not self.matters:
            return 0.0
        plain = product(v)
        scaled = trees.scale(1 / SCALE, product(trees.scale(SCALE, v)))
        length = float(trees.norm(plain))
        return float(trees.norm(trees.axpy(-1.0, plain, scaled))) / (length or 1.0)

    def _draws(self) -> Iterator[PyTree]:
        """The parameters at which everything is rounded anew, one after the other."""
        roundoff = float(jnp.finfo(self.dtype).eps) / 2
        for number in range(NUM_DRAWS):
            noise = probes.random_like(
                probes.probe_key(self._key, number), self._params, "normal"
            )
            yield trees.merge(
                _perturbed(trees.float_part(self._params), noise, roundoff),
                self._params,
            )


@functools.partial(jax.jit, donate_argnames="noise")
def _perturbed(params, noise, roundoff):
    return jax.tree.map(
        # The error function makes a normal number uniform between -1 and 1.
        lambda x, z: x * (1 + jnp.asarray(roundoff, x.dtype) * erf(z * math.sqrt(0.5))),
        params,
        noise,
    )


@jax.jit
def _add_square(total, base, other):
    squares = jax.tree.map(lambda x, y: jnp.square(x - y), base, other)
    return squares if total is None else jax.tree.map(jnp.add, total, squares)


@jax.jit
def _root(total, factor):
    return jax.tree.map(lambda t: jnp.sqrt(factor * t), total)


def setting_of(model: Any) -> str:
    """The gin binding that makes a model's network compute in float32.

    Args:
        model: a model with a Flax module as `module`, whose activation dtype is a field
            `dtype` of its own or of its `config`, as in T5X's networks.

    Returns:
        The flag for the command line, under the name that a gin file which imports the
        network's Python module gives it; empty if there is no such field.
    """
    module = getattr(model, "module", None)
    file = type(module).__module__.rpartition(".")[2]
    for owner in (getattr(module, "config", None), module):
        if getattr(owner, "dtype", None) is not None:
            return f"--gin.{file}.{type(owner).__name__}.dtype=\"'float32'\""
    return ""


def with_rounding(number: Number, error: float, dtype: str) -> Number:
    """The number with the network's rounding error added to its own.

    Both are added up, not in quadrature: the rounding is not drawn anew with each
    sample or step. An interval grows by the rounding on both sides.

    Args:
        number: the number.
        error: the rounding error, in the number's unit; 0: none.
        dtype: the type that the network multiplies in.
    """
    if error == 0.0:
        return number
    interval = number.interval
    return dataclasses.replace(
        number,
        error=(number.error or 0.0) + error,
        error_kind=kind_with_rounding(number.error_kind, dtype),
        interval=interval and (interval[0] - error, interval[1] + error),
    )


def kind_with_rounding(kind: str, dtype: str) -> str:
    """The meaning of an error that includes the rounding in a type."""
    named = f"rounding in {dtype}"
    return named if kind in WITHOUT_ERROR else f"{kind}, plus {named}"
