"""Rewritten linear programs: the same numbers, fewer constants, no constant transposed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.curvature.products import folding

BATCH, LENGTH, WIDTH, HEADS = 3, 4, 8, 2


def gated_mlp(params, x):
    hidden = jax.nn.gelu(x @ params["wi_0"]) * (x @ params["wi_1"])
    return x + hidden @ params["wo"]


def rms_norm(params, x):
    return (
        params["scale"][None, None]
        * x
        * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    )


def attention(params, x):
    heads = lambda name: (x @ params[name]).reshape(BATCH, LENGTH, HEADS, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key"))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads("value"))
    return x + mixed.reshape(BATCH, LENGTH, -1) @ params["out"]


def scanned(params, x):
    body = lambda x, w: (jnp.tanh(x @ w) + x, None)
    return jax.lax.scan(body, x, params["layers"])[0]


def rematerialized(params, x):
    return jax.checkpoint(gated_mlp)(params, x)


def unusual(params, x):
    """Operations that are no product or sum, selections, types, unused and copied inputs."""
    masked = jnp.where(x > 0, x @ params["wi_0"], -(x @ params["wi_1"]))
    sliced = jnp.concatenate([masked[:, :2], masked[:, 2:] * 2.0], axis=1)
    summed = jnp.cumsum(sliced, axis=1) - jnp.max(sliced, axis=-1, keepdims=True)
    return (
        summed.astype(jnp.float64).astype(x.dtype) / 3.0 + params["scale"][None, None]
    )


NETWORKS = {
    "gated mlp": gated_mlp,
    "norm": rms_norm,
    "attention": attention,
    "scan": scanned,
    "remat": rematerialized,
    "unusual": unusual,
    "all": lambda p, x: attention(p, rms_norm(p, gated_mlp(p, x))),
}


def parameters():
    rng = np.random.default_rng(0)
    square = ("wi_0", "wi_1", "wo", "query", "key", "value", "out")
    shapes = dict.fromkeys(square, (WIDTH, WIDTH)) | {
        "scale": (WIDTH,),
        "layers": (2, WIDTH, WIDTH),
    }
    draw = lambda shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]))
    return {name: draw(shape) for name, shape in shapes.items()}


def inputs():
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, LENGTH, WIDTH)))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def tree_allclose(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
def test_a_folded_gradient_is_the_hessians_product(network):
    params, x = parameters(), inputs()
    loss = lambda params: jnp.sum(jnp.sin(network(params, x)))
    v = jax.tree.map(lambda p: jnp.cos(17.0 * p), params)

    def folded():
        _, linear = jax.linearize(jax.grad(loss), params)
        return folding.fold((linear, params))

    program = jax.jit(folded)()
    _, expected = jax.jvp(jax.grad(loss), (params,), (v,))
    tree_allclose(jax.jit(lambda f, v: f(v))(program, v), expected)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
def test_a_jacobian_and_its_transpose_share_their_constants(network):
    params, x = parameters(), inputs()
    function = lambda params: network(params, x)
    v = jax.tree.map(lambda p: jnp.cos(17.0 * p), params)
    u = jnp.sin(23.0 * x)

    def folded():
        z, jacobian = jax.linearize(function, params)
        transpose = jax.linear_transpose(jacobian, params)
        return folding.fold((jacobian, params), (lambda bar: transpose(bar)[0], z))

    program = jax.jit(folded)()
    _, forward = jax.jvp(function, (params,), (v,))
    (backward,) = jax.vjp(function, params)[1](u)
    tree_allclose(program(v), forward)
    tree_allclose(program(u, 1), backward)
    kept = [np.asarray(c).tobytes() for c in program.constants]
    # A weight is read by both. (Of an activation, both may read different products.)
    for weight in jax.tree.leaves(params):
        assert kept.count(np.asarray(weight).tobytes()) <= 1
    shapes = {weight.shape for weight in jax.tree.leaves(params)}
    unused = [c for c in program.constants if c.shape in shapes and not np.any(c)]
    assert not unused


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
def test_constants_take_at_most_half_as_much_memory_again(network):
    params, x = parameters(), inputs()
    loss = lambda params: jnp.sum(jnp.sin(network(params, x)))

    def both():
        _, linear = jax.linearize(jax.grad(loss), params)
        return linear, folding.fold((linear, params))

    plain, folded = (
        sum(c.nbytes for c in jax.tree.leaves(program)) for program in jax.jit(both)()
    )
    # More where an activation is read in two layouts, less where factors were folded.
    assert folded <= 1.5 * plain


def test_an_elementwise_chain_has_one_coefficient_for_each_operand():
    x = inputs()

    def folded():
        # Six factors of the chain rule; one coefficient, since the map is elementwise.
        chain = lambda x: jnp.exp(jnp.sin(x) ** 2) * jnp.tanh(x)
        _, linear = jax.linearize(chain, x)
        return folding.fold((linear, x))

    program = jax.jit(folded)()
    assert [c.shape for c in program.constants] == [x.shape]


def test_a_weights_gradient_reads_its_constant_as_it_lies():
    params, x = parameters(), inputs()

    def folded():
        # The transpose of w -> x w: contracts the constant's batch and length.
        transpose = jax.linear_transpose(lambda w: x @ w, params["wo"])
        return folding.fold((lambda bar: transpose(bar)[0], x))

    program = jax.jit(folded)()
    assert [c.shape for c in program.constants] == [(WIDTH, BATCH, LENGTH)]
    text = jax.jit(lambda f, u: f(u)).lower(program, x).as_text()
    transposed = re.findall(r"stablehlo.transpose .*: \(tensor<(.*?)xf64>\)", text)
    assert set(transposed) <= {f"{WIDTH}x{WIDTH}"}  # only what has the weight's size
    tree_allclose(program(x), jnp.einsum("bld,ble->de", x, x))


def test_a_result_may_be_an_argument_a_constant_multiple_or_zero():
    x = inputs()

    def folded():
        return folding.fold((lambda v: (v, 2.0 * v, jnp.zeros_like(v), v + v), x))

    program = jax.jit(folded)()
    tree_allclose(program(x), (x, 2.0 * x, jnp.zeros_like(x), 2.0 * x))


def chained(v, *factors):
    for factor in factors:
        v = v * factor
    return v


# v, and functions of it whose coefficients leave the range of float16 when multiplied
# out or added there, though no step of the function does.
NARROW = {
    "product above the range": (0.015, lambda v, a: chained(v, 300 * a, 250 * a)),
    "product below the range": (4e3, lambda v, a: chained(v, 1e-3 * a, 5e-5 * a)),
    "numbers above the range": (0.015, lambda v, _: chained(v, 300.0, 250.0)),
    "there and back": (0.25, lambda v, a: chained(v, 2e4 * a, 1e-4 * a, 6e4 * a)),
    "sum above the range": (0.25, lambda v, a: v * (6e4 * a) + v * (5e4 * a)),
    "number and array": (0.015, lambda v, a: chained(v, 300.0, 250 * a)),
    "seven roundings": (
        1.0,
        lambda v, a: chained(v, *[(1.01 + i / 9) * a for i in range(7)]),
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_coefficients_of_a_narrow_type_are_multiplied_out_in_float32(name, dtype):
    size, function = NARROW[name]
    v = jnp.asarray(size * np.array([1.0, -0.75, 0.5]), dtype)
    ones = jnp.ones(3, dtype)

    def folded():
        return folding.fold((lambda v: function(v, ones), v))

    found = jax.jit(folded)()(v)
    # The coefficients as the type holds them, multiplied in float64.
    rounded = lambda x: np.asarray(jnp.asarray(x, dtype), np.float64)
    expected = function(np.asarray(v, np.float64), Rounded(rounded))
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64),
        np.asarray(expected, np.float64),
        rtol=float(jnp.finfo(dtype).eps),
    )


class Rounded:
    """Ones that a coefficient is multiplied with: it is rounded as an array would be."""

    def __init__(self, rounded):
        self._rounded = rounded

    def __rmul__(self, coefficient):
        """The coefficient alone, rounded."""
        return self._rounded(coefficient)
