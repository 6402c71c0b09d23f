"""The gradient noise scale as results.json has it, against its definition in float64."""

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.analysis import GradientNoiseScale, Objective

from . import dense, reading

NUM = 5
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def batches():
    found = dense.batches(NUM)
    for batch in found[1:]:  # alike, so that their mean gradient is not noise alone
        for name, x in batch.items():
            x[0] = found[0][name][0]
    found[3]["decoder_loss_weights"][1] = 0.0  # a sequence without tokens that count
    return found


@pytest.fixture(scope="module")
def exact(batches):
    """Trained parameters, each batch's gradient there, Hessian products, weights.

    Before the training the curvature along the gradient is negative.
    """
    weights = np.array([b["decoder_loss_weights"].sum(dtype=float) for b in batches])
    total = weights.sum()
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        slope = jax.jit(jax.grad(dense.share))

        @jax.jit
        def product(theta, batch, v):
            return jax.jvp(lambda x: slope(x, batch, total), (theta,), (v,))[1]

        def gradients(theta):
            return np.stack([np.asarray(slope(theta, b, total)) for b in batches])

        theta = dense.flat(dense.parameters())
        for _ in range(20):
            g = gradients(theta).sum(axis=0)
            theta = theta - 0.1 * g / (1 + np.linalg.norm(g))
        theta = theta.astype(np.float32).astype(float)  # as the run will have them
        g = gradients(theta)
        hg = [sum(np.asarray(product(theta, b, v)) for b in batches) for v in g]
    _, unravel = ravel_pytree(dense.parameters())
    return unravel(np.float32(theta)), g, np.stack(hg), weights / total


def by_definition(gram, weights, kept, per_batch):
    """Tr A Sigma and G'AG of some of the batches, from `gram`, g_i' A g_j."""
    part = weights[kept].sum()
    w, gram = weights[kept] / part, gram[np.ix_(kept, kept)] / part**2
    count = len(w)
    to_deviations = np.eye(count) - np.outer(w, np.ones(count))
    squares = np.trace(to_deviations @ gram @ to_deviations.T)
    of_batch = count**2 * squares / (count - 1)
    return per_batch * of_batch, gram.sum() - of_batch / count


def expected(gram, weights, per_batch):
    """Value and jackknife error of both estimates and of their ratio."""
    everything = np.arange(len(weights))
    of_all = np.array(by_definition(gram, weights, everything, per_batch))
    without = np.array(
        [
            by_definition(gram, weights, np.delete(everything, i), per_batch)
            for i in everything
        ]
    )
    values = [*of_all, of_all[0] / of_all[1]]
    left = [*without.T, without[:, 0] / without[:, 1]]
    count = len(weights)
    errors = [np.sqrt((count - 1) / count * np.sum((x - x.mean()) ** 2)) for x in left]
    return values, errors


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "microbatches"])
def found(request, tmp_path_factory, batches, exact):
    objective = Objective.from_model(
        dense.model(), batches, num_microbatches=request.param
    )
    return reading.run(
        tmp_path_factory.mktemp("noise") / "run",
        [
            GradientNoiseScale(),
            GradientNoiseScale(name="simple", with_hessian=False),
        ],
        objective=objective,
        params=exact[0],
    )


def test_it_is_that_of_the_definition(found, batches, exact):
    _, g, hg, weights = exact
    per_batch = (NUM * dense.EXAMPLES - 1) / NUM
    counted = sum((b["decoder_loss_weights"] > 0).sum() for b in batches)
    tokens = counted / (NUM * dense.EXAMPLES - 1)
    slope = "(nat/token per θ)²"
    for prefix, scale, image, unit in (
        ("", "simple", g, slope),
        ("hessian_", "hessian", hg, f"{slope} · nat/token per θ²"),
    ):
        values, errors = expected(g @ image.T, weights, per_batch)
        assert values[1] > 0  # or there is no scale to look at
        names = (
            f"{prefix or 'gradient_'}variance",
            f"{prefix}squared_gradient",
            f"{scale}_noise_scale/sequences",
        )
        units = (unit, unit, "sequences")
        entry = found["gradient_noise_scale"]
        for name, value, error, unit_of in zip(
            names, values, errors, units, strict=True
        ):
            number = entry.number(name)
            assert number["value"] == pytest.approx(value, rel=ROUNDING), name
            assert number["error"] == pytest.approx(error, rel=10 * ROUNDING), name
            assert number["unit"] == unit_of
            assert "jackknife" in number["error_kind"]
            assert number["count"] == NUM
        number = entry.number(f"{scale}_noise_scale/tokens")
        assert number["value"] == pytest.approx(tokens * values[2], rel=ROUNDING)
        assert number["error"] == pytest.approx(tokens * errors[2], rel=10 * ROUNDING)
        assert number["unit"] == "tokens"


def test_without_the_hessian_the_rest_is_the_same(found):
    simple, whole = found["simple"], found["gradient_noise_scale"]
    assert len(whole.found["results"]) == 2 * len(simple.found["results"]) == 8
    for name, number in simple.found["results"].items():
        assert number == whole.number(name)
