"""The table of laws: every transformation of a loss equals that of the textbook formula.

A loss is a function of one pytree `x` that returns two scalars, the loss and its z-loss
part. A law is a transformation of such a function at `x` along `v` and `u`. A loss
keeps a law if the transformed loss equals the transformed oracle (`tests/oracles.py`,
float64) within `tolerance`. `FORBIDDEN` lists the laws that must raise instead.
"""

import jax
import jax.numpy as jnp
import numpy as np

COTANGENT = (1.5, -0.75)  # of the loss and of its z-loss part
COPIES = 2  # how many scaled copies of x go through vmap and scan


def _first(f):
    return lambda x: f(x)[0]


def _inner(a, b):
    products = jax.tree.map(lambda p, q: jnp.sum(p * q.astype(p.dtype)), a, b)
    return sum(jax.tree.leaves(products))


def _push(f, v):
    return lambda x: jax.jvp(f, (x,), (v,))[1]


def _pull(f):
    def pull(x):
        outputs, transpose = jax.vjp(f, x)
        cotangent = zip(COTANGENT, outputs, strict=True)
        return transpose(tuple(jnp.asarray(c, y.dtype) for c, y in cotangent))[0]

    return pull


def _scaled(x, scale):
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(scale, leaf.dtype), x)


def _over_copies(f):
    scales = 1.0 + jnp.arange(COPIES) / 4
    return lambda x: jax.vmap(lambda scale: f(_scaled(x, scale)))(scales)


def _through_scan(f):
    """The sum over copies, accumulated in a scan whose body is f."""

    def total(x):
        def body(carry, scale):
            outputs = f(_scaled(x, scale))
            return tuple(c + y for c, y in zip(carry, outputs, strict=True)), None

        zeros = tuple(jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(f, x))
        return jax.lax.scan(body, zeros, 1.0 + jnp.arange(COPIES) / 4)[0]

    return total


FORWARD = {
    "jvp": lambda f, x, v, _: _push(f, v)(x),
    "linearize": lambda f, x, v, _: jax.linearize(f, x)[1](v),
    "jacfwd": lambda f, x, *_: jax.jacfwd(f)(x),
    "grad(jvp)": lambda f, x, v, _: jax.grad(_push(_first(f), v))(x),
    "jvp(jvp)": lambda f, x, v, u: _push(_push(f, v), u)(x),
    "jvp in vmap": lambda f, x, v, _: _over_copies(_push(f, v))(x),
    "jvp of vmap": lambda f, x, v, _: _push(_over_copies(f), v)(x),
    "jvp of scan": lambda f, x, v, _: _push(_through_scan(f), v)(x),
    "jvp of remat": lambda f, x, v, _: _push(jax.checkpoint(f), v)(x),
    "grad(jvp) of scan of remat": lambda f, x, v, _: jax.grad(
        _push(_first(_through_scan(jax.checkpoint(f))), v)
    )(x),
}
REVERSE = {
    "value": lambda f, x, *_: f(x),
    "grad": lambda f, x, *_: jax.grad(_first(f))(x),
    "vjp": lambda f, x, *_: _pull(f)(x),
    "jacrev": lambda f, x, *_: jax.jacrev(_first(f))(x),
    "jvp(grad)": lambda f, x, v, _: _push(jax.grad(_first(f)), v)(x),
    "grad(grad)": lambda f, x, v, _: jax.grad(
        lambda x: _inner(jax.grad(_first(f))(x), v)
    )(x),
    "linearize(grad)": lambda f, x, v, _: jax.linearize(jax.grad(_first(f)), x)[1](v),
    "jvp(jvp(grad))": lambda f, x, v, u: _push(_push(jax.grad(_first(f)), v), u)(x),
    "vmap": lambda f, x, *_: _over_copies(f)(x),
    "grad in vmap": lambda f, x, *_: _over_copies(jax.grad(_first(f)))(x),
    "scan": lambda f, x, *_: _through_scan(f)(x),
    "vjp of scan": lambda f, x, *_: _pull(_through_scan(f))(x),
    "vjp of remat": lambda f, x, *_: _pull(jax.checkpoint(f))(x),
    "jvp(grad) of scan of remat": lambda f, x, v, _: _push(
        jax.grad(_first(_through_scan(jax.checkpoint(f)))), v
    )(x),
}
LAWS = {**REVERSE, **FORWARD}
FIRST_ORDER = ("value", "grad", "vjp", "jvp")
COMPOSED = ("jvp(jvp)", "grad(grad)", "jvp of vmap", "vjp of scan", "vjp of remat")
ESSENTIAL = ("value", "grad", "vjp", "jvp(grad)", "jvp", "grad(jvp)")
# What a custom_vjp cannot do. The words depend on the composition, and on which of jax's
# two implementations of custom_vjp runs (the flag jax_custom_vjp3 chooses).
FORBIDDEN = dict.fromkeys(
    ("jvp", "linearize", "jacfwd", "grad(jvp)", "jvp(jvp)"),
    (
        (TypeError, NotImplementedError),
        r"forward-mode autodiff \(jvp\)|custom_lin|lineari[zs]e",
    ),
)


def tolerance(dtype, scale=1.0) -> float:
    """The one tolerance: a few dozen rounding errors of `dtype` at the given scale."""
    return 32 * float(jnp.finfo(dtype).eps) * scale


def scale_of(*trees) -> float:
    """The largest finite magnitude, at least one; classes masked with -1e10 aside."""
    leaves = [np.abs(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(trees)]
    kept = [leaf[np.isfinite(leaf) & (leaf < 1e9)] for leaf in leaves]
    return max([1.0, *(leaf.max() for leaf in kept if leaf.size)])


def draw_like(x, key):
    """A standard normal direction with the shapes and dtypes of `x`."""
    leaves, treedef = jax.tree.flatten(x)
    keys = jax.random.split(key, len(leaves))
    drawn = [
        jax.random.normal(k, leaf.shape, jnp.float64).astype(leaf.dtype)
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return treedef.unflatten(drawn)


def transform(f, names, x, v, u):
    """The results of the named laws, as a dict."""
    return {name: LAWS[name](f, x, v, u) for name in names}


def assert_close(actual, expected, scale, dtype, message=""):
    """Compares arrays computed in `dtype`; each may be stored in a narrower one.

    The absolute part covers the rounding of the computation, at the scale of what went
    into it; the relative part a result that was rounded to its own dtype at the end.
    """
    np.testing.assert_allclose(
        np.asarray(actual, np.float64),
        np.asarray(expected, np.float64),
        rtol=4 * float(jnp.finfo(actual.dtype).eps),
        atol=tolerance(dtype, scale),
        err_msg=message,
    )


def assert_laws_hold(actual, expected, x, dtype):
    """Compares two results of `transform`, law by law."""
    for name in actual:
        scale = scale_of(x) * scale_of(expected[name])
        jax.tree.map(
            lambda a, e, name=name, scale=scale: assert_close(
                a, e, scale, dtype, f"law: {name}"
            ),
            actual[name],
            expected[name],
        )
