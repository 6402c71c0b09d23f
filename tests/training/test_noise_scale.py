"""The gradient noise scale while training: its definition, its averages, its pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis.measurements import noise_scale as of_analysis
from t5x_fwdloss.training import noise_scale
from t5x_fwdloss.training.quantity import ProbedStep

pytestmark = pytest.mark.usefixtures("x64")
PIECES, SEQUENCES, LENGTH = 4, 12, 5


def piece_loss(params, batch, key, number, num_pieces):
    """The mean over the batch of <x, params>, of one piece."""
    del key
    size = SEQUENCES // num_pieces
    rows = jax.lax.dynamic_slice_in_dim(batch["rows"], number * size, size)
    return (rows @ params).sum() / SEQUENCES


def batch_of(seed, *, mean=1.0):
    """Rows, each the gradient of one sequence, and weights of 3 tokens a sequence."""
    draw = np.random.default_rng(seed)
    mask = np.arange(LENGTH) < 3
    return {
        "rows": jnp.asarray(draw.normal(size=(SEQUENCES, 6)) + mean),
        "decoder_loss_weights": jnp.asarray(np.tile(mask, (SEQUENCES, 1))),
    }


def step(batch):
    return ProbedStep(jnp.ones(6), jnp.zeros(6), batch, None, 0.1, lambda: None)


def prepared():
    found = noise_scale.NoiseScale(piece_loss, PIECES)
    found.prepare(lambda function, *_: jax.jit(function))
    return found


def definition(batch):
    """The paper's two estimates, from batch sizes b and B."""
    rows = np.asarray(batch["rows"])
    small, big = SEQUENCES // PIECES, SEQUENCES
    pieces = rows.reshape(PIECES, small, -1).mean(axis=1)
    of_small = np.mean(np.sum(pieces**2, axis=1))
    of_big = np.sum(rows.mean(axis=0) ** 2)
    square = (big * of_big - small * of_small) / (big - small)
    variance = (of_small - of_big) / (1 / small - 1 / big)
    return variance, square


def test_one_probe_gives_the_estimates_of_two_batch_sizes():
    batch = batch_of(0)
    variance, square = definition(batch)
    assert prepared().measure(step(batch)) == pytest.approx(
        {
            "gradient_variance": variance,
            "squared_gradient": square,
            "noise_scale_in_sequences": variance / square,
            "noise_scale_in_tokens": 3 * variance / square,
        },
        rel=1e-11,
    )


def test_a_sequence_of_padding_does_not_count():
    batch = batch_of(0)
    mask = batch["decoder_loss_weights"] & (jnp.arange(SEQUENCES) > 0)[:, None]
    full, found = (
        prepared().measure(step(x))
        for x in (batch, batch | {"decoder_loss_weights": mask})
    )
    variance = full["gradient_variance"] * (SEQUENCES - 1) / SEQUENCES
    assert found["gradient_variance"] == pytest.approx(variance)
    tokens = found["noise_scale_in_tokens"]
    assert tokens == pytest.approx(3 * found["noise_scale_in_sequences"])


def test_the_scale_is_the_ratio_of_running_averages():
    quantity, found = prepared(), []
    for seed in range(3):
        found.append(quantity.measure(step(batch_of(seed))))
    parts = np.array([definition(batch_of(seed)) for seed in range(3)])
    kept = noise_scale.KEPT
    variance, square = np.array([kept**2, kept, 1.0]) @ parts
    assert found[-1]["noise_scale_in_sequences"] == pytest.approx(variance / square)
    assert found[-1]["gradient_variance"] == pytest.approx(parts[-1, 0])
    assert kept == 0.9


def test_without_a_gradient_that_stands_out_there_is_no_scale():
    seed = next(s for s in range(100) if definition(batch_of(s, mean=0.0))[1] < 0)
    found = prepared().measure(step(batch_of(seed, mean=0.0)))
    assert set(found) == {"gradient_variance", "squared_gradient"}
    assert found["squared_gradient"] < 0


def test_a_nan_does_not_enter_the_averages():
    quantity, batch = prepared(), batch_of(0)
    spoiled = {**batch, "rows": batch["rows"] * np.nan}
    assert np.isnan(quantity.measure(step(spoiled))["gradient_variance"])
    assert quantity.measure(step(batch)) == prepared().measure(step(batch))


def test_estimates_are_those_of_the_analysis_for_equal_batches():
    draw = np.random.default_rng(2)
    gradients = draw.normal(size=(PIECES, 6)) + 0.5  # of the pieces' parts of the loss
    whole = gradients.sum(axis=0)
    found = noise_scale.estimates(
        np.sum(gradients**2), whole @ whole, PIECES, float(SEQUENCES)
    )
    weights = np.full(PIECES, 1 / PIECES)
    apart = gradients - whole / PIECES
    rows = np.array([[e @ e, 0.0, e @ whole, whole @ whole] for e in apart])
    expected = of_analysis.estimates(weights, rows, SEQUENCES / PIECES)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
