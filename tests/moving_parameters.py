"""Random parameters and gradients that optimizers of every kind are tried on."""

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = {
    "encoder": {"kernel": (6, 4), "square": (5, 5), "scale": (4,)},
    "decoder": {"heads": (4, 2, 8), "embedding": (9, 4)},
}


def draw(seed):
    """A random tree, with zeros for a token that was never seen."""
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    # Its second moment is only what epsilon makes of it.
    tree["decoder"]["embedding"] = tree["decoder"]["embedding"].at[3].set(0.0)
    return tree


def wide(tree):
    """The same in float64."""
    return jax.tree.map(
        lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else x,
        tree,
    )
