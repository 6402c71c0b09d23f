"""What one set of probes tells, in cases where it is exact, and by its own error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss import curvature

from . import problems

EPS = float(jnp.finfo(jnp.float32).eps)
EIGENVALUES = np.array([-4, -2.5, -1, -0.1, 0, 0.2, 0.7, 1, 2, 3, 5, 9.0])
MATRIX, _ = problems.symmetric(EIGENVALUES)


def params():
    return problems.unflatten(np.zeros(problems.SIZE))


def masks():
    return curvature.group_masks(
        params(), {"decoder": "decoder/.*", "encoder": "encoder/.*", "bias": ".*/bias"}
    )


def test_trace_samples_are_those_of_hutchinson():
    product = problems.matvec_of(MATRIX)
    estimates = curvature.probe_estimates(product, params(), 3, num_probes=6)
    plain = curvature.hutchinson_trace(product, params(), 3, num_probes=6)
    np.testing.assert_allclose(
        estimates.trace.samples, plain.samples, atol=100 * EPS * 9
    )


@pytest.mark.usefixtures("x64")
def test_a_diagonal_matrix_is_exact_in_every_group():
    diagonal = EIGENVALUES
    estimates = curvature.probe_estimates(
        problems.matvec_of(np.diag(diagonal)),
        params(),
        0,
        num_probes=3,
        groups=masks(),
        diagonal=True,
    )
    groups = {name: found.mean for name, found in estimates.groups.items()}
    assert groups == pytest.approx(
        {
            "decoder": diagonal[:6].sum(),
            "encoder": diagonal[6:].sum(),
            "bias": diagonal[:3].sum(),
        }
    )
    np.testing.assert_allclose(problems.flatten(estimates.diagonal), diagonal)
    np.testing.assert_allclose(
        problems.flatten(estimates.diagonal_error), 0.0, atol=1e-14
    )
    assert estimates.frobenius_norm == pytest.approx(np.linalg.norm(diagonal))
    assert estimates.trace.mean == pytest.approx(diagonal.sum())


@pytest.mark.usefixtures("x64")
def test_every_estimate_is_the_mean_of_its_formula():
    product = problems.matvec_of(MATRIX)
    estimates = curvature.probe_estimates(
        product, params(), 7, num_probes=5, groups=masks(), diagonal=True
    )
    z = np.stack(
        [
            problems.flatten(curvature.random_like(curvature.probe_key(7, i), params()))
            for i in range(5)
        ]
    )
    az = z @ MATRIX
    np.testing.assert_allclose(
        problems.flatten(estimates.diagonal), (z * az).mean(axis=0), atol=1e-12
    )
    np.testing.assert_allclose(
        problems.flatten(estimates.diagonal_error),
        (z * az).std(axis=0, ddof=1) / np.sqrt(5),
        atol=1e-12,
    )
    np.testing.assert_allclose(
        estimates.groups["bias"].samples, (z * az)[:, :3].sum(axis=1), atol=1e-12
    )
    np.testing.assert_allclose(
        estimates.square_norm.samples, (az**2).sum(axis=1), rtol=1e-12
    )
    assert estimates.frobenius_norm**2 == pytest.approx((az**2).sum(axis=1).mean())


def test_groups_that_cover_all_add_up_to_the_trace():
    estimates = curvature.probe_estimates(
        problems.matvec_of(MATRIX), params(), 0, num_probes=20, groups=masks()
    )
    both = estimates.groups["decoder"].samples + estimates.groups["encoder"].samples
    np.testing.assert_allclose(both, estimates.trace.samples, rtol=1e-12)


def test_estimates_lie_within_their_errors():
    estimates = curvature.probe_estimates(
        jax.jit(jax.vmap(problems.matvec_of(MATRIX))),
        params(),
        0,
        num_probes=400,
        block_size=100,
        groups=masks(),
        diagonal=True,
    )
    truth = {"decoder": np.trace(MATRIX[:6, :6]), "bias": np.trace(MATRIX[:3, :3])}
    for name, value in truth.items():
        found = estimates.groups[name]
        assert abs(found.mean - value) < 5 * found.standard_error
        assert found.standard_error < 1
    deviation = problems.flatten(estimates.diagonal) - np.diag(MATRIX)
    error = problems.flatten(estimates.diagonal_error)
    assert (np.abs(deviation) < 5 * error).all()
    truth = np.linalg.norm(MATRIX)
    assert abs(estimates.frobenius_norm - truth) < 5 * estimates.frobenius_error
    assert estimates.frobenius_error < 0.05 * truth


def test_a_run_goes_on_from_its_saved_state_to_the_bit():
    product = problems.matvec_of(MATRIX)
    saved = {}

    def save(state):
        if len(state.square_norms) == 4:
            saved["state"] = problems.packed(state)

    options = {"num_probes": 9, "groups": masks(), "diagonal": True}
    whole = curvature.probe_estimates(product, params(), 1, on_step=save, **options)
    state = problems.unpacked(curvature.ProbeState, saved["state"], params())
    again = curvature.probe_estimates(product, params(), 1, state=state, **options)
    np.testing.assert_array_equal(whole.trace.samples, again.trace.samples)
    np.testing.assert_array_equal(
        problems.flatten(whole.diagonal), problems.flatten(again.diagonal)
    )
    np.testing.assert_array_equal(
        problems.flatten(whole.diagonal_error),
        problems.flatten(again.diagonal_error),
    )


def test_it_stops_at_the_relative_error_and_names_nan():
    shifted = MATRIX + 6 * np.eye(12)
    estimates = curvature.probe_estimates(
        problems.matvec_of(shifted), params(), 0, num_probes=500, relative_error=0.05
    )
    assert estimates.trace.converged
    assert 8 <= estimates.trace.num_probes < 500
    with pytest.raises(curvature.NonFiniteError, match="Hutchinson probe 0 must be"):
        curvature.probe_estimates(
            lambda v: curvature.scale(jnp.nan, v), params(), 0, num_probes=2
        )
