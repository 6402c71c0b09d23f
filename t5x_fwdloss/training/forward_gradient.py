r"""The forward gradient: an unbiased estimate of a gradient without a reverse pass.

For a random direction $v$ with $E[v v^T] = I$,

$$\hat g = \langle \nabla L, v \rangle v, \qquad E[\hat g] = \nabla L,$$

and one jvp gives the slope $\langle \nabla L, v \rangle$ exactly, without keeping
activations. The mean of $K$ such estimates has the variance

$$E \|\hat g - \nabla L\|^2 = (d + 1) \|\nabla L\|^2 / K$$

for normal $v$ in $d$ dimensions, and $(d - 1) \|\nabla L\|^2 / K$ for random signs: so it
is for few parameters.

References:
  Baydin et al. 2022, arXiv 2202.08587, Gradients without backpropagation.
  Malladi et al. 2023, arXiv 2305.17333 (MeZO): drawing a direction anew instead of
    keeping it; there the slope is a difference of two losses.
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.curvature.vectors import probes, trees

Loss = Callable[..., tuple[Any, Any]]
Place = Callable[[PyTree], PyTree]
Distribution = Annotated[str, settings.one_of(*probes.KINDS)]
# The names that a user binds.
DIRECTIONS = "FORWARD_GRADIENT_DIRECTIONS"
DISTRIBUTION = "FORWARD_GRADIENT_DISTRIBUTION"
# The beginning of a sentence about a loss that has no forward mode.
NEEDS = "A forward gradient needs a loss that has forward mode:"


def with_forward_gradient(
    loss: Loss,
    num_directions: int = 1,
    distribution: str = "normal",
    place: Place = lambda vector: vector,
) -> Callable[..., tuple[Any, Any]]:
    """The function `(params, key, *args) -> (loss, aux)` with an estimate for a gradient.

    `jax.grad(..., has_aux=True)` of it, or `jax.value_and_grad`, gives the mean of
    forward gradients over directions that depend on the key and the paths of the
    parameters alone, and nothing is differentiated in reverse. The gradient of `aux` is
    taken as zero. It has no forward mode of its own.

    Memory does not grow with the number of directions, which are drawn one after another
    and once more for the sum: only the slopes are kept.

    Args:
        loss: `(params, *args)` to the loss and auxiliary results; it needs forward mode.
            Every float leaf of the parameters moves: close over the others.
        num_directions: K; each costs a jvp of the loss.
        distribution: of a direction's entries, "normal" or "rademacher".
        place: lays out a direction like the parameters on a mesh.

    A number of directions below 1 or another distribution raises `ValueError`.
    """
    settings.check(DIRECTIONS, num_directions, settings.Positive)
    settings.check(DISTRIBUTION, distribution, Distribution)
    numbers = lambda: jnp.arange(num_directions)

    def direction(params, key, number):
        return place(random_direction(key, number, params, distribution))

    @jax.custom_vjp
    def estimated(params, key, args):
        del key
        return loss(params, *args)

    def forward(params, key, args):
        def along(_, number):
            # Or the compiler would compute the loss once for all directions, before the
            # loop, and keep its activations.
            number, at, given = jax.lax.optimization_barrier((number, params, args))
            value, slope, aux = jax.jvp(
                lambda moved: loss(moved, *given),
                (at,),
                (direction(at, key, number),),
                has_aux=True,
            )
            return (value, aux), slope

        # The loss is the same beside every direction: the last one is kept.
        like = jax.eval_shape(lambda: loss(params, *args))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        found, slopes = jax.lax.scan(along, nothing, numbers())
        return found, (params, key, slopes)

    def backward(kept, cotangents):
        params, key, slopes = kept
        weights = cotangents[0] * slopes / num_directions

        def summed(key, path, leaf):
            def add(total, number):
                one = _entries(key, number, path, leaf, distribution)
                return total + weights[number].astype(total.dtype) * one, None

            return jax.lax.scan(add, jnp.zeros_like(leaf), numbers())[0]

        return place(_leaf_by_leaf(summed, key, params)), None, None

    estimated.defvjp(forward, backward)
    return lambda params, key, *args: estimated(params, key, args)


def random_direction(
    key: jax.Array, number: Any, params: PyTree, distribution: str
) -> PyTree:
    """Direction `number` of a step, inside of a traced function.

    Its entries depend on key, number and paths alone, not on the mesh nor on which other
    parameters move.

    Args:
        key: that of the step.
        number: of the direction, from 0.
        params: the parameters that move.
        distribution: a name in `probes.KINDS`.
    """
    draw = lambda key, path, leaf: _entries(key, number, path, leaf, distribution)
    return _leaf_by_leaf(draw, key, params)


def _entries(key, number, path, leaf, distribution):
    own = jax.random.fold_in(probes.as_key(key), number)
    drawn = probes.random_like(own, {path: leaf}, distribution)[path]
    return drawn.astype(leaf.dtype)


def _leaf_by_leaf(make, key, params):
    """`make(key, path, leaf)` of every leaf, one after another.

    The generator's memory is several times a leaf's where the compiler does not fuse it,
    as on CPUs: it must not draw all leaves at one time.
    """
    leaves, structure = jax.tree.flatten(params)
    made = []
    for path, leaf in zip(trees.leaf_paths(params), leaves, strict=True):
        if made:
            key, made[-1] = jax.lax.optimization_barrier((key, made[-1]))
        made.append(make(key, path, leaf))
    return jax.tree.unflatten(structure, made)
