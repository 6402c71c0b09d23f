"""A Krylov basis stays orthogonal to rounding, and how it is read and kept."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature
from t5x_fwdloss.curvature.krylov import ritz
from t5x_fwdloss.curvature.krylov.space import Krylov

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
SHAPES = {"kernel": (20, 15)}
SPECTRA = {
    # Without reorthogonalization an error grows in one step by about |A| / beta.
    "bulk": np.linspace(-1.0, 3.0, 300),
    "outliers": np.r_[np.random.default_rng(0).normal(size=296), 12, 20, -8, 25.0],
    "far outliers": np.r_[np.random.default_rng(0).normal(size=296), 1e3, 80, -40, 300],
    "decay": 10 * 0.9 ** np.arange(300.0),
    # What a network's Hessian looks like: an error triples in a step.
    "network": np.r_[np.random.default_rng(0).normal(size=296), 3, -2.4, 3.9, 2.7],
}


def check_orthonormal(basis):
    gram = basis.gram()
    lengths = np.diag(gram)
    assert np.abs(gram - np.diag(lengths)).max() <= 8 * EPS
    # A norm is a sum of squares in float32, and a root, and a quotient.
    np.testing.assert_allclose(lengths, 1.0, atol=16 * EPS)


def grown(eigenvalues, num_steps, restart_at=None):
    matrix, _ = problems.symmetric(eigenvalues)
    rng = np.random.default_rng(1)
    start = problems.unflatten(rng.normal(size=300), shapes=SHAPES)
    space = Krylov(curvature.Basis(start))
    space.add_start(start)
    product = problems.matvec_of(matrix)
    for step in range(num_steps):
        if step == restart_at:
            values, vectors, _ = ritz.pairs(space)
            ritz.restart(space, values[-6:], vectors[:, -6:])
        space.expand(product)
    return space


@pytest.mark.parametrize("restart_at", [None, 20])
@pytest.mark.parametrize("eigenvalues", SPECTRA.values(), ids=SPECTRA.keys())
def test_the_basis_stays_orthogonal_to_rounding(eigenvalues, restart_at):
    check_orthonormal(grown(eigenvalues, 60, restart_at).basis)


def test_the_basis_is_read_once_a_step(monkeypatch):
    reads, coefficients = [], curvature.Basis.coefficients

    def counted(basis, w):
        reads.append(basis.size)
        return coefficients(basis, w)

    monkeypatch.setattr(curvature.Basis, "coefficients", counted)
    grown(SPECTRA["bulk"], 30, restart_at=20)
    assert reads == [*range(1, 21), *range(7, 17)]


def test_a_start_block_stays_orthogonal():
    matrix, _ = problems.symmetric(SPECTRA["bulk"])
    rng = np.random.default_rng(1)
    starts = [problems.unflatten(rng.normal(size=300), shapes=SHAPES) for _ in range(2)]
    space = Krylov(curvature.Basis(starts[0]))
    assert all(space.add_start(vector) for vector in starts)
    for _ in range(20):
        space.expand(problems.matvec_of(matrix))
    check_orthonormal(space.basis)


def test_overlaps_of_large_leaves_are_summed_to_rounding():
    rng = np.random.default_rng(0)
    leaf = rng.normal(size=(256, 16384)).astype(np.float32)
    leaf /= np.linalg.norm(leaf)
    vector = {"embedding": jnp.asarray(leaf)}
    basis = curvature.Basis(vector)
    basis.append(vector, 1.0)
    basis.append(vector, 0.5)
    square = float(np.square(leaf.astype(np.float64)).sum())
    expected = [square, square / 2]
    np.testing.assert_allclose(basis.coefficients(vector), expected, rtol=4 * EPS)
    np.testing.assert_allclose(basis.gram()[0], expected, rtol=4 * EPS)


def addresses(vector):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(vector)]


def test_a_row_of_the_basis_keeps_the_memory_of_its_product():
    matrix, _ = problems.symmetric(SPECTRA["bulk"])
    product, seen = problems.matvec_of(matrix), []

    def watched(v):
        w = product(v)
        seen.append(addresses(w))
        return w

    rng = np.random.default_rng(1)
    result = curvature.lanczos(
        watched, problems.unflatten(rng.normal(size=300), shapes=SHAPES), num_steps=25
    )
    assert [addresses(v) for v in result.basis.vectors[1:]] == seen


def test_a_product_of_another_type_is_cast_first():
    matrix, _ = problems.symmetric(SPECTRA["bulk"])
    product = problems.matvec_of(matrix)
    half = lambda v: jax.tree.map(lambda x: x.astype(jnp.bfloat16), product(v))
    rng = np.random.default_rng(1)
    vector = problems.unflatten(rng.normal(size=300), shapes=SHAPES)
    result = curvature.lanczos(half, vector, num_steps=4)
    assert result.basis.row(3)["kernel"].dtype == jnp.float32
    check_orthonormal(result.basis)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_basis_is_rotated_in_its_own_memory_but_for_one_leaf(on_host, monkeypatch):
    rng, shapes = np.random.default_rng(1), {"kernel": (14, 15), "scale": (90,)}
    like = problems.unflatten(np.zeros(300), shapes=shapes)
    basis, rows = curvature.Basis(like, on_host=on_host), rng.normal(size=(7, 300))
    for row in rows:
        basis.append(problems.unflatten(row, shapes=shapes), 1.0)
    rotation = np.zeros((7, 4))
    rotation[:6, :2] = rng.normal(size=(6, 2))
    rotation[6, 2] = 1.0  # a vector kept as it is
    rotation[5, 3] = -2.0
    old = [weakref.ref(leaf) for leaf in jax.tree.leaves(basis.vectors[0])]
    alive = []

    def combination(part, coefficients):
        alive.append(sum(ref() is not None for ref in old))
        return original(part, coefficients)

    original = curvature.Basis.combination
    monkeypatch.setattr(curvature.Basis, "combination", combination)
    basis.rotate(rotation)
    found = np.stack([problems.flatten(basis.row(i)) for i in range(basis.size)])
    np.testing.assert_allclose(found, rotation.T @ rows, rtol=1e-5, atol=1e-5)
    # Three combinations for each leaf; the leaves before it are gone by then.
    assert alive == [2] * 3 + [1] * 3
