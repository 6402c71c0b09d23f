"""The forward gradient by closed forms, and its statistics against the true gradient."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from standalone import subjects

from t5x_fwdloss.curvature.vectors import probes, trees
from t5x_fwdloss.training.forward_gradient import (
    random_direction,
    with_forward_gradient,
)

TINY = {
    "vocab_size": 16,
    "emb_dim": 4,
    "head_dim": 2,
    "mlp_dim": 4,
}
SETTINGS = {"loss_impl": "custom_jvp", "loss_normalizing_factor": 10.0, "z_loss": 1e-3}
KEY = jax.random.fold_in(probes.as_key(3), 5)
SAMPLES = 20_000


def subject():
    """Loss with metrics, parameters and batch of a tiny T5."""
    model = subjects.model(SETTINGS, **TINY)
    batch = {k: x[:1, :10] for k, x in subjects.packed_batch(16).items()}
    params = jax.jit(model.get_initial_params)(jax.random.key(0), batch)
    return (lambda params, batch: model.loss_fn(params, batch, None)), params, batch


def two_layers():
    """Loss with an auxiliary result, parameters and batch, in float64."""
    draw = np.random.default_rng(0).normal
    params = {"first": {"kernel": draw(size=(3, 4))}, "last": draw(size=4)}

    def loss(params, batch):
        hidden = jnp.tanh(batch @ params["first"]["kernel"])
        return jnp.mean((hidden @ params["last"]) ** 2), {"hidden": hidden}

    return loss, jax.tree.map(jnp.asarray, params), jnp.asarray(draw(size=(5, 3)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("count", "distribution"), [(1, "rademacher"), (3, "normal")])
def test_it_is_the_mean_over_the_directions_by_the_true_gradient(count, distribution):
    loss, params, batch = two_layers()
    reverse = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, aux), true = reverse(params, batch)
    expected = jax.tree.map(jnp.zeros_like, params)
    for number in range(count):
        v = probes.random_like(jax.random.fold_in(KEY, number), params, distribution)
        expected = trees.axpy(trees.inner(true, v) / count, v, expected)
    ours = with_forward_gradient(loss, count, distribution)
    step = jax.jit(jax.value_and_grad(ours, has_aux=True))
    (got_value, got_aux), got = step(params, KEY, batch)
    assert float(got_value) == pytest.approx(float(value), rel=1e-12)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    for one, other in zip(jax.tree.leaves(got_aux), jax.tree.leaves(aux), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    # Half of the loss has half of the gradient, as under loss scaling.
    half = jax.jit(jax.grad(lambda *x: 0.5 * ours(*x)[0]))(params, KEY, batch)
    leaves = [jax.tree.leaves(tree)[0] for tree in (half, got)]
    np.testing.assert_allclose(leaves[0], 0.5 * leaves[1], rtol=1e-12)


@pytest.fixture(scope="module")
def sampled():
    """The true gradient of a tiny T5, and 20,000 estimates of one direction each.

    Returns:
        The true gradient, the mean of the estimates, `[samples, leaves]` inner products
        with the true gradient, and `[samples]` squared distances from it.
    """
    loss, params, batch = subject()
    true = jax.jit(jax.grad(lambda *x: loss(*x)[0]))(params, batch)
    ours = jax.grad(with_forward_gradient(loss), has_aux=True)

    def one(step):
        found, _ = ours(params, jax.random.fold_in(probes.as_key(0), step), batch)
        error = trees.axpy(-1.0, true, found)
        return found, trees.leaf_inners(found, true), trees.inner(error, error)

    @jax.jit
    def block(mean, steps):
        found, along, distances = jax.vmap(one)(steps)
        add = lambda total, x: total + jnp.sum(x, axis=0) / SAMPLES
        return jax.tree.map(add, mean, found), (along, distances)

    zero = jax.tree.map(jnp.zeros_like, params)
    steps = jnp.arange(SAMPLES).reshape(-1, 100)
    mean, (along, distances) = jax.lax.scan(block, zero, steps)
    leaves = along.shape[-1]
    # The counts are large: sums of squares in float64.
    along = np.reshape(np.float64(along), (-1, leaves))
    return true, mean, along, np.float64(distances).ravel()


def test_it_is_unbiased_in_every_block(sampled):
    true, mean, along, _ = sampled
    squares = np.float64(trees.leaf_inners(true, true))
    error = along.std(0) / math.sqrt(SAMPLES)
    assert len(squares) > 20
    # The largest of some 30 normal numbers is seldom above 3.5.
    assert np.all(np.abs(along.mean(0) - squares) < 3.5 * error)
    whole, of_whole = along.sum(1), squares.sum()
    assert whole.mean() == pytest.approx(of_whole, abs=3 * whole.std() / SAMPLES**0.5)
    assert 3 * whole.std() / SAMPLES**0.5 < 0.05 * of_whole
    # In the other directions: the mean's error is what the variance leaves of it.
    for leaf, other in zip(jax.tree.leaves(true), jax.tree.leaves(mean), strict=True):
        variance = (leaf.size * of_whole + np.sum(np.square(leaf))) / SAMPLES
        found = np.sum(np.square(other - leaf))
        assert found == pytest.approx(variance, rel=5 * math.sqrt(2 / leaf.size))


def test_its_variance_is_d_plus_one_times_the_squared_gradient(sampled):
    true, _, _, distances = sampled
    ratios = distances / float(trees.inner(true, true))
    d, error = trees.dimension(true), ratios.std() / math.sqrt(SAMPLES)
    assert d > 300
    assert ratios.mean() == pytest.approx(d + 1, abs=3 * error)
    assert error < 0.02 * d


def test_signs_have_d_minus_one_and_k_directions_a_kth():
    # Of a linear loss in 3 dimensions all 8 directions can be counted.
    true = jnp.array([2.0, -1.0, 0.5])
    loss = lambda params, slope: (params @ slope, {})
    found = []
    for count in (1, 4):
        ours = jax.grad(with_forward_gradient(loss, count, "rademacher"), has_aux=True)
        keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(jnp.arange(SAMPLES))
        estimates = jax.vmap(lambda key, ours=ours: ours(jnp.zeros(3), key, true)[0])
        errors = np.sum(np.square(estimates(keys) - true), axis=1)
        found.append(errors.mean() / float(true @ true))
    assert found == pytest.approx([2.0, 0.5], rel=0.03)


def test_directions_depend_on_key_number_and_path_alone():
    params = {"a": {"scale": jnp.ones(4)}, "b": {"kernel": jnp.ones((2, 3))}}
    drawn = random_direction(KEY, 2, params, "normal")
    alone = random_direction(KEY, 2, {"b": params["b"]}, "normal")
    np.testing.assert_array_equal(drawn["b"]["kernel"], alone["b"]["kernel"])
    inside = jax.jit(lambda n: random_direction(KEY, n, params, "normal"))(2)
    np.testing.assert_array_equal(drawn["a"]["scale"], inside["a"]["scale"])
    for key, number in ((KEY, 3), (jax.random.fold_in(KEY, 1), 2)):
        other = random_direction(key, number, params, "normal")
        assert not np.any(other["b"]["kernel"] == drawn["b"]["kernel"])
    moved = {"a": {"scale": jnp.ones((2, 3))}}
    other = random_direction(KEY, 2, moved, "normal")["a"]["scale"]
    assert not np.any(other == drawn["b"]["kernel"])


# On all devices there are: the directions of a step, in the layout of the parameters.
SHARDED = """
import sys, zlib
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from t5x_fwdloss.curvature.vectors import probes
from t5x_fwdloss.training.forward_gradient import random_direction
mesh = jax.make_mesh((jax.device_count(),), ("data",))
place = NamedSharding(mesh, PartitionSpec("data"))
params = jax.device_put({"a": {"kernel": jnp.ones((8, 6))}, "b": jnp.ones(16)}, place)
key = jax.random.fold_in(probes.as_key(3), 5)
draw = jax.jit(
    lambda key, params: random_direction(key, 1, params, "normal"), out_shardings=place
)
found = draw(key, params)
sums = [zlib.crc32(np.asarray(x).tobytes()) for x in jax.tree.leaves(found)]
sys.stdout.write(f"{jax.device_count()} {sums}")
"""


def test_directions_are_the_same_bits_on_one_device_and_on_eight():
    said = []
    for count in (1, 8):
        flags = f"--xla_force_host_platform_device_count={count}"
        done = subprocess.run(
            [sys.executable, "-c", SHARDED],
            env={**os.environ, "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout.split(" ", 1))
    assert [devices for devices, _ in said] == ["1", "8"]
    assert said[0][1] == said[1][1]


def test_parameters_of_half_precision_keep_their_type():
    loss = lambda x: (jnp.sum(x.astype(jnp.float32) ** 2), {})
    params = jnp.arange(1, 5, dtype=jnp.bfloat16)
    got, _ = jax.grad(with_forward_gradient(loss), has_aux=True)(params, KEY)
    assert got.dtype == jnp.bfloat16
    v = np.float32(random_direction(KEY, 0, params, "normal"))
    np.testing.assert_allclose(
        np.float32(got), 2 * np.float32(params) @ v * v, rtol=0.02
    )


@pytest.mark.parametrize("count", [0, -1])
def test_a_number_of_directions_below_one_is_refused(count):
    sentence = "FORWARD_GRADIENT_DIRECTIONS must be a whole number of at least 1: got"
    with pytest.raises(ValueError, match=sentence):
        with_forward_gradient(lambda x: (x, {}), count)


def test_another_distribution_is_refused():
    sentence = (
        "FORWARD_GRADIENT_DISTRIBUTION must be one of .*'normal'.*: got 'uniform'"
    )
    with pytest.raises(ValueError, match=sentence):
        with_forward_gradient(lambda x: (x, {}), 1, "uniform")
