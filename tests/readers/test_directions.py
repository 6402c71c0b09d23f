"""Loss, slope and curvature along directions are those of the dense matrices."""

import numpy as np
import pytest

from . import cells, dense
from .test_numbers import ROUNDING, saved_vectors


def true_directions(kept, truth):
    """Every direction of the run, not yet of norm one."""
    other = dense.flat(dense.parameters(3))
    found = {
        "gradient": truth.gradient,
        "preconditioned_gradient": cells.preconditioner_root() ** 2 * truth.gradient,
        "random_0": cells.draws("directional_derivatives/random", [0], "normal")[:, 0],
        "checkpoint_0": other - truth.theta,
    }
    vectors = saved_vectors(kept, "eigenpairs-hessian-whole", 3)
    return found | {f"eigenvector_{i}": vectors[:, i] for i in range(3)}


def check_direction(entry, truth, label, direction):
    """Slope, curvature and what follows from them; the slope and curvature."""
    v = direction / np.linalg.norm(direction)
    hessian, gradient = truth.matrices["hessian"], truth.gradient
    slope, curvature = gradient @ v, v @ hessian @ v
    tolerance = ROUNDING * np.linalg.norm(gradient)
    found = entry.number(f"{label}/slope")
    assert found["value"] == pytest.approx(slope, abs=tolerance)
    assert found["unit"] == "nat/token per θ"
    assert 0 <= found["error"] <= tolerance
    curved = ROUNDING * np.linalg.norm(hessian)
    found = entry.number(f"{label}/curvature")
    assert found["value"] == pytest.approx(curvature, abs=curved)
    assert found["unit"] == "nat/token per θ²"
    step = f"{label}/step_to_minimum"
    assert (step in entry.found["results"]) == (curvature > 0)
    if curvature > 0:
        relative = 2 * curved / curvature + 2 * tolerance / abs(slope)
        expected = -slope / curvature
        assert entry.value(step) == pytest.approx(expected, rel=relative)
    return slope, curvature


def test_directional_derivatives(kept, truth):
    entry = kept["directional_derivatives"]
    loss = truth.shares.sum()
    assert entry.value("loss") == pytest.approx(loss, rel=ROUNDING)
    spread = truth.shares.std(ddof=1) * np.sqrt(len(truth.shares))
    found = entry.value("loss_spread_over_batches")
    assert found == pytest.approx(spread, abs=ROUNDING * loss)
    length = np.linalg.norm(truth.gradient)
    assert entry.value("gradient_norm") == pytest.approx(length, rel=ROUNDING)
    np.testing.assert_allclose(
        entry.arrays["batch_losses"], truth.shares, rtol=ROUNDING
    )
    for label, direction in true_directions(kept, truth).items():
        slope, curvature = check_direction(entry, truth, label, direction)
        unit = direction / np.linalg.norm(direction)
        steps = entry.arrays[f"{label}/steps"]
        losses = [dense.loss(truth.theta + t * unit) for t in steps]
        found = entry.arrays[f"{label}/losses"]
        np.testing.assert_allclose(found, losses, rtol=ROUNDING)
        expected = loss + slope * steps + curvature * steps**2 / 2
        found = entry.arrays[f"{label}/model"]
        np.testing.assert_allclose(found, expected, rtol=8 * ROUNDING)
        assert len(steps) == 5
        reach = 0.02 * np.linalg.norm(truth.theta)
        if label == "checkpoint_0":
            distance = np.linalg.norm(direction)
            assert entry.value(f"{label}/distance") == pytest.approx(distance)
            ends = 0.0, distance
        else:
            if curvature > 0:
                reach = min(reach, 2 * abs(slope) / curvature)
            ends = -reach, reach
        assert (steps[0], steps[-1]) == pytest.approx(ends, rel=1e-2, abs=1e-6)


def test_directions_normalized_by_leaf(kept, truth):
    entry = kept["leaf_directions"]
    drawn = cells.draws("leaf_directions/random", [0], "normal")[:, 0]
    for path in dense.leaves(dense.parameters()):
        chosen = dense.group(path)
        length = np.linalg.norm(truth.theta[chosen])
        drawn[chosen] *= length / np.linalg.norm(drawn[chosen])
    check_direction(entry, truth, "random_0", drawn)
