"""Directions and preconditioning against the same on flat or dense arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.vectors import directions, preconditioning

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
KERNEL = "decoder/mlp/wi/kernel"


def params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "decoder": {
            "mlp": {
                "wi": {"kernel": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
            },
            "norm": {"scale": jnp.asarray(rng.normal(size=4), jnp.float32)},
        },
        "token_embedder": {
            "embedding": jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)
        },
    }


def test_a_normalized_vector_has_norm_one_and_its_direction():
    v = params(1)
    unit = curvature.normalized(v)
    flat = problems.flatten(v)
    np.testing.assert_allclose(
        problems.flatten(unit), flat / np.linalg.norm(flat), rtol=8 * EPS
    )
    with pytest.raises(ValueError, match="The gradient must not be zero"):
        curvature.normalized(curvature.zeros_like(v), "gradient")
    bad = curvature.scale(jnp.nan, v)
    with pytest.raises(curvature.NonFiniteError, match="vector of gradient must be"):
        curvature.normalized(bad, "gradient")


def test_leaves_get_the_norms_of_the_parameters():
    v = curvature.leaf_normalized(
        curvature.random_like(0, params(), "normal"), params()
    )
    for mine, theirs in zip(jax.tree.leaves(v), jax.tree.leaves(params()), strict=True):
        np.testing.assert_allclose(
            np.linalg.norm(mine), np.linalg.norm(theirs), rtol=8 * EPS
        )


def test_filters_get_the_norms_of_the_parameters():
    p = params()
    p["decoder"]["mlp"]["wi"]["kernel"] = (
        p["decoder"]["mlp"]["wi"]["kernel"].at[:, 1].set(0.0)
    )
    raw = curvature.random_like(0, p, "normal")
    v = curvature.filter_normalized(raw, p)
    kernel, given = v["decoder"]["mlp"]["wi"]["kernel"], raw["decoder"]["mlp"]["wi"]
    np.testing.assert_allclose(
        np.linalg.norm(kernel, axis=0),
        np.linalg.norm(p["decoder"]["mlp"]["wi"]["kernel"], axis=0),
        rtol=8 * EPS,
    )
    # A filter is only scaled, not turned.
    ratio = np.asarray(kernel)[:, 0] / np.asarray(given["kernel"])[:, 0]
    np.testing.assert_allclose(ratio, ratio[0], rtol=8 * EPS)
    np.testing.assert_array_equal(kernel[:, 1], 0.0)
    np.testing.assert_allclose(
        np.linalg.norm(v["token_embedder"]["embedding"], axis=1),
        np.linalg.norm(p["token_embedder"]["embedding"], axis=1),
        rtol=8 * EPS,
    )
    np.testing.assert_allclose(
        np.linalg.norm(v["decoder"]["norm"]["scale"]),
        np.linalg.norm(p["decoder"]["norm"]["scale"]),
        rtol=8 * EPS,
    )


@pytest.mark.parametrize(
    ("path", "shape", "axis"),
    [
        (KERNEL, (4, 3), 0),
        ("decoder/attention/query/kernel", (4, 2, 3), 0),
        ("token_embedder/embedding", (5, 4), 1),
        ("decoder/relpos_bias/rel_embedding", (2, 32), 0),
        ("decoder/norm/scale", (4,), None),
    ],
)
def test_filters_are_those_of_t5x_parameters(path, shape, axis):
    assert directions.input_axis(path, shape) == axis


def test_differences_are_taken_in_float32():
    start = {"a": jnp.asarray([1.0, 2.0], jnp.bfloat16)}
    end = {"a": jnp.asarray([1.5, 2.25], jnp.float32)}
    found = curvature.difference(end, start)
    assert found["a"].dtype == jnp.float32
    np.testing.assert_array_equal(found["a"], [0.5, 0.25])
    with pytest.raises(ValueError, match="The end point must have the float leaves"):
        curvature.difference({"b": jnp.zeros(2)}, start)


def test_overlaps_are_cosines_and_their_squares():
    _, vectors = problems.symmetric(np.arange(12.0))
    shapes = problems.SHAPES
    basis = [problems.unflatten(vectors[:, i], shapes=shapes) for i in range(3)]
    flat = 3 * vectors[:, 0] - 4 * vectors[:, 2] + 12 * vectors[:, 5]
    cosines, part = curvature.overlaps(problems.unflatten(flat), basis)
    np.testing.assert_allclose(cosines, [3 / 13, 0, -4 / 13], atol=20 * EPS)
    assert part == pytest.approx(25 / 169, abs=20 * EPS)


def test_the_preconditioned_map_has_the_eigenvalues_of_the_product():
    matrix, _ = problems.symmetric(np.arange(12.0) - 3)
    second = np.random.default_rng(0).uniform(0.5, 2, size=12)
    diagonal = problems.unflatten(second)
    root = preconditioning.root(diagonal)
    matvec = curvature.congruent(problems.matvec_of(matrix), root)
    got = problems.dense(matvec, problems.unflatten(np.zeros(12)))
    expected = np.linalg.eigvals(np.diag(second) @ matrix)
    np.testing.assert_allclose(
        np.linalg.eigvalsh(got), np.sort(expected.real), atol=100 * EPS * 9
    )
