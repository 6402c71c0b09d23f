"""Parameter groups against blocks of dense matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.vectors import groups

from . import problems

MATRIX, _ = problems.symmetric(np.arange(1.0, 13.0))
# Entries of the leaves in flat order: bias 0-2, wo 3-5, wi 6-11.
DECODER = np.r_[np.ones(6), np.zeros(6)]


def params():
    return problems.unflatten(np.ones(problems.SIZE))


def test_a_pattern_has_to_match_the_whole_path():
    tree = {"layers_1": {"wi": jnp.zeros(2)}, "layers_10": {"wi": jnp.zeros(3)}}
    mask = curvature.group_mask(tree, "layers_1/.*")
    assert mask == {"layers_1": {"wi": True}, "layers_10": {"wi": False}}
    assert groups.group_dimension(tree, mask) == 2
    with pytest.raises(ValueError, match="'layers_1' matches none of 2, such as"):
        curvature.group_mask(tree, "layers_1")


def test_integer_leaves_are_in_no_group():
    tree = {"a": jnp.zeros(2), "n": jnp.zeros(2, jnp.int32)}
    mask = curvature.group_mask(tree, ".*")
    assert mask == {"a": True, "n": None}
    with pytest.raises(ValueError, match="matches none of 1"):
        curvature.group_mask(tree, "n")


def test_a_broken_pattern_is_named():
    with pytest.raises(ValueError, match=r"must be a regular expression: got '\('"):
        curvature.group_mask(params(), "(")


def test_restricted_maps_are_the_diagonal_block():
    mask = curvature.group_mask(params(), "decoder/.*")
    block = curvature.restricted(problems.matvec_of(MATRIX), mask)
    expected = np.diag(DECODER) @ MATRIX @ np.diag(DECODER)
    np.testing.assert_allclose(problems.dense(block, params()), expected, atol=1e-5)


def test_nan_outside_of_the_group_does_not_come_in():
    mask = curvature.group_mask(params(), "decoder/.*")
    bad = params()
    bad["encoder"]["layers_0"]["wi"]["kernel"] *= jnp.nan
    np.testing.assert_array_equal(
        problems.flatten(curvature.restrict(bad, mask)), DECODER
    )


def test_eigenpairs_of_a_group_are_those_of_the_block():
    mask = curvature.group_mask(params(), "decoder/.*")
    start = curvature.restrict(curvature.random_like(0, params()), mask)
    result = curvature.eigenpairs(
        curvature.restricted(problems.matvec_of(MATRIX), mask),
        start,
        num_largest=3,
        num_smallest=3,
        dimension=groups.group_dimension(params(), mask),
        tolerance=1e-5,
    )
    expected = np.linalg.eigvalsh(MATRIX[:6, :6])
    np.testing.assert_allclose(
        np.sort(result.eigenvalues), expected, atol=1e-5 * expected.max()
    )
    for vector in result.eigenvectors:
        np.testing.assert_array_equal(problems.flatten(vector)[6:], 0.0)


def test_fresh_directions_of_a_group_stay_in_the_group():
    # The block is the identity: after one step the space is invariant.
    mask = curvature.group_mask(params(), "decoder/.*")
    start = curvature.restrict(curvature.random_like(0, params()), mask)
    fresh = lambda i: curvature.restrict(curvature.random_like(i + 1, params()), mask)
    result = curvature.eigenpairs(
        curvature.restricted(lambda v: v, mask),
        start,
        num_largest=6,
        num_smallest=0,
        dimension=6,
        fresh=fresh,
    )
    np.testing.assert_allclose(result.eigenvalues, 1.0, rtol=1e-6)
