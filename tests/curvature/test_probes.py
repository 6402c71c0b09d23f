"""Probe vectors: the law of their entries, and what the numbers depend on."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.vectors import probes

from . import problems


def params():
    return problems.unflatten(np.zeros(problems.SIZE))


def test_a_leaf_is_drawn_from_seed_and_path():
    v = curvature.random_like(5, params(), "normal")
    path = "encoder/layers_0/wi/kernel"
    key = jax.random.fold_in(jax.random.key(5), np.uint32(zlib.crc32(path.encode())))
    np.testing.assert_array_equal(
        v["encoder"]["layers_0"]["wi"]["kernel"],
        jax.random.normal(key, (2, 3), jnp.float32),
    )


def test_other_leaves_do_not_change_the_numbers():
    alone = {"encoder": params()["encoder"]}
    np.testing.assert_array_equal(
        curvature.random_like(5, alone)["encoder"]["layers_0"]["wi"]["kernel"],
        curvature.random_like(5, params())["encoder"]["layers_0"]["wi"]["kernel"],
    )


def test_leaves_of_one_shape_differ():
    tree = {"a": jnp.zeros(64), "b": jnp.zeros(64)}
    v = curvature.random_like(0, tree)
    assert not np.array_equal(v["a"], v["b"])


@pytest.mark.parametrize(("kind", "kurtosis"), [("rademacher", 1.0), ("normal", 3.0)])
def test_moments_are_those_of_the_law(kind, kurtosis):
    x = np.asarray(curvature.random_like(1, {"a": jnp.zeros(40_000)}, kind)["a"])
    # Standard errors at n = 40000: 1/200 for the mean, at most sqrt(96)/200 for x^4.
    assert abs(x.mean()) < 5 / 200
    assert abs((x**2).mean() - 1) < 5 * np.sqrt(2) / 200
    assert abs((x**4).mean() - kurtosis) < 5 * np.sqrt(96) / 200


def test_seed_typed_key_and_raw_key_agree():
    by_seed = problems.flatten(curvature.random_like(7, params()))
    typed = curvature.random_like(jax.random.key(7), params())
    raw = curvature.random_like(jax.random.PRNGKey(7), params())
    np.testing.assert_array_equal(by_seed, problems.flatten(typed))
    np.testing.assert_array_equal(by_seed, problems.flatten(raw))


def test_numbers_do_not_depend_on_the_threefry_setting():
    with jax.threefry_partitionable(False):
        other = problems.flatten(curvature.random_like(7, params(), "normal"))
    here = problems.flatten(curvature.random_like(7, params(), "normal"))
    np.testing.assert_array_equal(here, other)


def test_stacked_probes_are_the_single_ones():
    stacked = curvature.random_stack(3, [4, 0, 9], params(), "normal")
    for i, vector in zip([4, 0, 9], curvature.unstack(stacked), strict=True):
        single = curvature.random_like(probes.probe_key(3, i), params(), "normal")
        np.testing.assert_array_equal(
            problems.flatten(vector), problems.flatten(single)
        )


def test_bfloat16_gets_float32_and_integers_nothing():
    tree = {"a": jnp.zeros(3, jnp.bfloat16), "n": jnp.zeros(3, jnp.int32)}
    v = curvature.random_like(0, tree)
    assert v["a"].dtype == jnp.float32
    assert v["n"] is None


def test_other_generators_are_refused():
    with pytest.raises(ValueError, match="must be a threefry2x32 key: got .*rbg"):
        curvature.random_like(jax.random.key(0, impl="unsafe_rbg"), params())
    with pytest.raises(ValueError, match=r"uint32 of shape \(2,\): got uint32 of .*4"):
        curvature.random_like(jnp.zeros(4, jnp.uint32), params())


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="kind must be one of .*: got 'sphere'"):
        curvature.random_like(0, params(), "sphere")


SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**40, 2**63 - 1]


@pytest.mark.parametrize("wide", [False, True])
def test_every_bit_of_a_seed_counts(wide):
    with jax.enable_x64(wide):
        words = [jax.random.key_data(probes.as_key(seed)).tolist() for seed in SEEDS]
    assert words == [[seed >> 32, seed % 2**32] for seed in SEEDS]
    # As before for the seeds that JAX takes in full.
    for seed in SEEDS[:5]:
        known = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
        assert known.tolist() == [0, seed]


@pytest.mark.parametrize("seed", [-1, 2**63, 10**23])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=rf"at least 0 and below 2\*\*63: got {seed}"):
        curvature.random_like(seed, params())
