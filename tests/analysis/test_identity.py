"""What makes two runs the same run: the bits of the parameters, and the network's loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis.store import checksum, identity

from . import runs, toy


def leaves(**changes):
    rng = np.random.default_rng(0)
    given = {
        "kernel": rng.normal(size=(5, 4)).astype(np.float32),
        "scale": rng.normal(size=3).astype(np.float32),
        "other": rng.normal(size=3).astype(np.float32),
        "count": np.arange(4, dtype=np.int32),
        "half": jnp.asarray(rng.normal(size=6), jnp.bfloat16),
        "flag": np.array([True, False]),
        "empty": np.zeros((0, 2), np.float32),
    }
    return given | changes


def changed(name, index, value):
    x = np.array(leaves()[name])
    x[index] = value
    return {name: x}


def swapped(name, one, other):
    x = np.array(leaves()[name])
    x[one], x[other] = x[other].copy(), x[one].copy()
    return {name: x}


CHANGES = {
    "last bit": changed("kernel", (2, 3), np.nextafter(leaves()["kernel"][2, 3], 9)),
    "sign": changed("kernel", (0, 0), -leaves()["kernel"][0, 0]),
    "two entries swapped": swapped("kernel", (0, 1), (3, 2)),
    "two rows swapped": swapped("kernel", 1, 4),
    "transposed": {"kernel": leaves()["kernel"].T},
    "other shape": {"kernel": leaves()["kernel"].reshape(4, 5)},
    "leaves swapped": {"scale": leaves()["other"], "other": leaves()["scale"]},
    "integer": changed("count", 2, 7),
    "half": changed("half", 1, 0.125),
    "flag": changed("flag", 1, True),
    "dtype": {"count": np.arange(4, dtype=np.uint32)},
    "sign of zero": {"scale": np.array([0.0, -0.0, 0.0], np.float32)},
    "zeros": {"scale": np.zeros(3, np.float32)},
    "nan": changed("other", 0, np.nan),
}


def test_every_change_of_the_parameters_changes_the_checksum():
    sums = {name: checksum.checksum(leaves(**x)) for name, x in CHANGES.items()}
    sums["none"] = checksum.checksum(leaves())
    assert len(set(sums.values())) == len(sums)
    assert sums["none"] == checksum.checksum(jax.tree.map(jnp.asarray, leaves()))


def test_the_checksum_sees_all_of_float64(x64):
    x = np.random.default_rng(0).normal(size=(3, 2))
    moved = np.nextafter(x, 9.0)
    assert checksum.checksum({"x": moved}) != checksum.checksum({"x": x})
    assert checksum.checksum({"x": x.astype(np.float32)}) != checksum.checksum({"x": x})


def test_the_words_are_those_of_a_plain_loop():
    """The mixing of Appleby's MurmurHash3, in Python's integers."""

    def mixed(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    words = x.ravel().view(np.uint32).tolist()
    expected = [
        sum(mixed(w ^ mixed((i + s) % 2**32)) for i, w in enumerate(words)) % 2**32
        for s in (0x9E3779B9, 0x7F4A7C15)
    ]
    assert jax.jit(checksum._word_sums)(x).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "precision", "within", "beyond"),
    [
        ("float32", "highest", 5e-6, 2e-5),
        ("float32", "default", 2e-3, 8e-3),
        ("bfloat16", "highest", 2e-3, 8e-3),
        ("float64", "highest", 5e-11, 2e-10),
    ],
)
def test_the_loss_may_differ_by_rounding(dtype, precision, within, beyond):
    one = {"activation_dtype": dtype, "precision": precision, "loss_value": 2.0}
    for factor, names in ((within, []), (beyond, ["loss_value"])):
        for sign in (-1, 1):
            other = one | {"loss_value": 2.0 * (1 + sign * factor)}
            assert identity.differences(other, one) == names
    assert identity.differences({}, one) == list(one)


def test_what_a_network_adds_is_its_value_and_its_type():
    objective, params = runs.objective(), toy.parameters()
    found = identity.of_network(objective, params, 2.5)
    assert found["loss_value"] == 2.5
    assert found["activation_dtype"] == "float32"
    assert found["parameters"] == checksum.checksum(params)
