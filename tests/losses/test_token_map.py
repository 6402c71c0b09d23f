"""Blocks change nothing: shapes, batching, meshes, and where the loop is not wanted."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.losses.primitives import token_map


@dataclasses.dataclass(frozen=True)
class Weighted:
    """w_i * sum_j z_ij * x_ij, and w_i * x_ij: linear in x."""

    def __call__(self, residuals, linear):
        z, w = residuals
        (x,) = linear
        return [w * jnp.sum(z * x, axis=-1), w[:, None] * x]


@pytest.fixture(params=[2**20, 12, 1], ids=["at once", "blocks", "single tokens"])
def block_elements(request, monkeypatch):
    monkeypatch.setattr(token_map, "BLOCK_ELEMENTS", request.param)
    token_map._compiled.cache_clear()
    yield
    token_map._compiled.cache_clear()


def example(tokens=6, width=4):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(tokens, width), (tokens,), (tokens, width)]
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def evaluate(z, w, x):
    return token_map.token_map(Weighted(), [z, w], [x])


def plain(z, w, x):
    return Weighted()([z, w], [x])


def assert_equal(transform, *args):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        transform(evaluate)(*args),
        transform(plain)(*args),
    )


@pytest.mark.usefixtures("block_elements")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_value_is_that_of_the_program(transform):
    assert_equal(transform, *example())


@pytest.mark.usefixtures("block_elements")
def test_derivatives_of_any_order_are_those_of_the_program():
    args = example()
    push = lambda f: lambda *a: jax.jvp(f, a, a)[1]
    total = lambda f: lambda *a: sum(jnp.sum(jnp.sin(r)) for r in f(*a))
    pull = lambda f: jax.grad(f, argnums=(0, 1, 2))
    assert_equal(lambda f: jax.jit(push(push(push(f)))), *args)
    assert_equal(lambda f: jax.jit(pull(total(f))), *args)
    assert_equal(lambda f: jax.jit(push(pull(total(f)))), *args)
    assert_equal(lambda f: jax.jit(pull(push(total(f)))), *args)


@pytest.mark.usefixtures("block_elements")
@pytest.mark.parametrize("axes", [(0, 0, 0), (None, 0, 1), (1, None, None)], ids=str)
def test_a_mapped_axis_is_mapped_in_every_derivative(axes):
    def spread(arg, axis):
        return arg if axis is None else jnp.stack([arg, 2 * arg, 3 * arg], axis)

    args = [spread(a, axis) for a, axis in zip(example(), axes, strict=True)]
    assert_equal(lambda f: jax.vmap(f, in_axes=axes), *args)
    mapped = lambda f: (
        lambda *a: sum(jnp.sum(jnp.sin(r)) for r in jax.vmap(f, in_axes=axes)(*a))
    )
    pull = lambda f: jax.grad(f, argnums=(0, 1, 2))
    push = lambda f: lambda *a: jax.jvp(f, a, a)[1]
    assert_equal(lambda f: jax.jit(push(pull(mapped(f)))), *args)


def test_an_argument_that_is_not_mapped_is_not_repeated():
    z, w, x = example()
    mapped = jax.vmap(evaluate, in_axes=(None, None, 0))
    equations = jax.make_jaxpr(mapped)(z, w, jnp.stack([x, x])).eqns
    (equation,) = [e for e in equations if e.primitive is token_map.token_map_p]
    assert [v.aval.shape for v in equation.invars] == [(6, 4), (6,), (6, 2, 4)]


@pytest.mark.parametrize(
    ("num_tokens", "num_elements", "size"),
    [
        (6, 2**17, 6),
        (6, 2**18, 3),
        (7, 2**18, 1),
        (4096, 4096 * 32128, 4),
        (1, 2**30, 1),
    ],
)
def test_blocks_are_the_largest_equal_parts_that_fit(num_tokens, num_elements, size):
    assert token_map.block_size(num_tokens, num_elements) == size


ON_A_MESH = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from t5x_fwdloss.losses import compute_weighted_cross_entropy
from t5x_fwdloss.losses.primitives import token_map

token_map.BLOCK_ELEMENTS = 64
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
logits = jax.random.normal(jax.random.key(0), (4, 6, 32))
labels = jax.random.randint(jax.random.key(1), (4, 6), 0, 32)
def derivatives(smoothing, z, y):
    f = lambda z: compute_weighted_cross_entropy(
        z, y, None, smoothing, 0.01, impl="custom_jvp")[0]
    product = lambda v: jax.jvp(jax.grad(f), (z,), (v,))[1]
    stacked = jax.vmap(product)(jnp.stack([z, 2 * z, jnp.sin(z)]))
    return jax.value_and_grad(f)(z), product(z), stacked

sharded = put(logits, "data", None, "model"), put(labels, "data", None)
for smoothing in (0.1, 0.0):
    expected = derivatives(smoothing, logits, labels)
    compiled = jax.jit(derivatives, static_argnums=0).lower(smoothing, *sharded).compile()
    for a, b in zip(jax.tree.leaves(compiled(*sharded)), jax.tree.leaves(expected)):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "while" not in text
    # A device has [2, 6] tokens and 16 classes.
    for whole in ("[2,6,32]", "[12,32]", "[4,6,32]", "[24,32]"):
        assert whole not in text, (smoothing, whole)
"""


def test_a_sharded_vocabulary_and_batch_are_neither_gathered_nor_cut_nor_made_whole():
    finished = subprocess.run(
        [sys.executable, "-c", ON_A_MESH],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
