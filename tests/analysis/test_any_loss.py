"""Any loss of any linen module: its derivatives and a whole run, against dense float64."""

import html
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from t5x_fwdloss import analysis
from t5x_fwdloss.curvature.vectors import trees

FEATURES, CLASSES, SIZE = 4, 3, 6
ROUNDING = 256 * float(np.finfo(np.float64).eps)


class Classifier(nn.Module):
    """Flat images to logits."""

    @nn.compact
    def __call__(self, x):
        hidden = jnp.tanh(nn.Dense(3, name="hidden", param_dtype=x.dtype)(x))
        return nn.Dense(CLASSES, name="logits", param_dtype=x.dtype)(hidden)


def apply(params, batch):
    return Classifier().apply({"params": params}, batch["images"])


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def examples(num=2 * SIZE, dtype=np.float32):
    rng = np.random.default_rng(5)
    return {
        "images": rng.normal(size=(num, FEATURES)).astype(dtype),
        "labels": rng.integers(0, CLASSES, num).astype(np.int32),
        "weights": np.append(rng.uniform(0.5, 2.0, num - 1), 0.0).astype(dtype),
    }


def batches(whole, size=SIZE):
    num = len(whole["images"])
    return [{k: x[i : i + size] for k, x in whole.items()} for i in range(0, num, size)]


def parameters(whole):
    return Classifier().init(jax.random.key(3), whole["images"][:1])["params"]


def logits_of(params, images):
    """The module once more, by hand."""
    hidden = jnp.tanh(images @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["logits"]["kernel"] + params["logits"]["bias"]


def dense(params, whole, weights, loss, hessian_of):
    """Value, gradient, Hessian and Gauss-Newton matrix of one weighted mean.

    Args:
        params: parameters.
        whole: all examples.
        weights: one per example.
        loss: logits and labels to losses.
        hessian_of: logits and label of one example to the loss's Hessian, in NumPy.
    """
    flat, unravel = ravel_pytree(params)
    outputs = lambda x: logits_of(unravel(x), whole["images"])
    total = lambda x: (
        jnp.sum(weights * loss(outputs(x), whole["labels"])) / weights.sum()
    )
    rows = np.asarray(jax.jacrev(outputs)(flat))
    gauss_newton = np.zeros((flat.size, flat.size))
    for z, label, row, weight in zip(
        np.asarray(outputs(flat)), whole["labels"], rows, weights, strict=True
    ):
        gauss_newton += weight * row.T @ hessian_of(z, label) @ row / weights.sum()
    hessian = np.asarray(jax.hessian(total)(flat))
    return float(total(flat)), np.asarray(jax.grad(total)(flat)), hessian, gauss_newton


def of_cross_entropy(z, label):
    p = np.exp(z - z.max())
    p /= p.sum()
    return np.diag(p) - np.outer(p, p)


def log_likelihood(z, labels):
    rows = z - jnp.log(jnp.sum(jnp.exp(z), axis=1, keepdims=True))
    return -rows[jnp.arange(len(labels)), labels]


# A loss that is not convex: its Gauss-Newton matrix has negative eigenvalues.
def wave(z, batch):
    return jnp.sum(jnp.cos(z) + z * batch["labels"][:, None], axis=-1)


def of_wave(z, label):
    return np.diag(-np.cos(z))


LOSSES = {
    "cross entropy": (cross_entropy, log_likelihood, of_cross_entropy),
    "not convex": (wave, lambda z, labels: wave(z, {"labels": labels}), of_wave),
}


def columns(product, params):
    flat, unravel = ravel_pytree(params)
    found = product.stacked(jax.vmap(unravel)(jnp.eye(flat.size)))
    return np.asarray(jax.vmap(lambda x: ravel_pytree(x)[0])(found)).T


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_and_matrices_are_the_dense_ones(name):
    loss, by_hand, hessian_of = LOSSES[name]
    whole = examples(dtype=np.float64)
    params = parameters(whole)
    weights = whole["weights"]
    value, gradient, hessian, gauss_newton = dense(
        params, whole, weights, by_hand, hessian_of
    )
    objective = analysis.Objective.from_loss(
        apply,
        loss,
        batches(whole),
        weights="weights",
        num_microbatches=2,
    )
    assert pytest.approx(weights.sum()) == objective.W
    assert objective.num_tokens == np.count_nonzero(weights)
    assert objective.value(params) == pytest.approx(value, rel=ROUNDING)
    found = objective.gradient(params)
    size = np.abs(gradient).max()
    np.testing.assert_allclose(ravel_pytree(found)[0], gradient, atol=ROUNDING * size)
    _, slope = objective.jvp(params, found)
    assert slope == pytest.approx(gradient @ gradient, rel=ROUNDING)
    for matrix, expected in (("hessian", hessian), ("gauss_newton", gauss_newton)):
        product = objective.product(matrix, params)
        size = np.abs(expected).max()
        np.testing.assert_allclose(
            columns(product, params), expected, atol=ROUNDING * size
        )
    if name == "not convex":
        assert np.linalg.eigvalsh(gauss_newton).min() < -0.1


@pytest.mark.usefixtures("x64")
def test_outputs_may_be_a_tree_and_losses_one_for_each_weight():
    whole = examples(dtype=np.float64)
    whole["parts"] = np.stack([whole["weights"], 2 * whole["weights"]], axis=1)
    params = parameters(whole)

    def two(params, batch):
        logits = apply(params, batch)
        return {"one": logits, "other": 3 * logits[:, 0]}

    def squares(outputs, batch):
        one = 0.5 * jnp.sum(outputs["one"] ** 2, axis=-1)
        return jnp.stack([one, 0.5 * outputs["other"] ** 2], axis=1)

    objective = analysis.Objective.from_loss(
        two, squares, batches(whole), weights="parts"
    )
    # Of weights (w, 2 w), the Hessian in the logits is w (1 + 18 e e^T) / (3 sum of w).
    hessian_of = lambda *_: (np.eye(CLASSES) + 18 * np.diag([1.0, 0, 0])) / 3
    by_hand = lambda z, _: (0.5 * jnp.sum(z**2, axis=1) + 9 * z[:, 0] ** 2) / 3
    value, _, _, expected = dense(params, whole, whole["weights"], by_hand, hessian_of)
    assert objective.value(params) == pytest.approx(value, rel=ROUNDING)
    found = columns(objective.product("gauss_newton", params), params)
    size = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=ROUNDING * size)


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "analysis"
    whole = examples()
    params = parameters(whole)
    measurements = [
        analysis.Eigenpairs(num_largest=2, num_smallest=1),
        analysis.Trace(matrix="gauss_newton", num_probes=4),
        analysis.SpectralDensity(matrix="gauss_newton", num_probes=2, num_steps=30),
    ]
    objective = analysis.Objective.from_loss(apply, cross_entropy, batches(whole))
    assert (
        analysis.run_analysis(
            objective, params, measurements=measurements, output_dir=folder
        )
        == 0
    )
    return folder, whole, params


def test_a_run_of_a_classifier_has_the_dense_numbers(analyzed):
    folder, whole, params = analyzed
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, whole))
        wide[1]["labels"] = whole["labels"]
        value, _, hessian, gauss_newton = dense(
            *wide, np.ones(2 * SIZE), log_likelihood, of_cross_entropy
        )
    document = json.loads((folder / "results.json").read_text())
    assert document["loss_value"] == pytest.approx(value, rel=1e-5)
    assert document["normalizer"]["kind"] == "losses"
    assert document["normalizer"]["W"] == document["num_tokens"] == 2 * SIZE
    by_name = {
        (x["measurement"], x["number"]): x for x in analysis.records(str(folder))
    }
    eigenvalues = np.linalg.eigvalsh(hessian)
    tolerance = 1e-5 * np.abs(eigenvalues).max()
    for name, expected in (
        ("largest_1", eigenvalues[-1]),
        ("largest_2", eigenvalues[-2]),
        ("smallest_1", eigenvalues[0]),
    ):
        found = by_name["hessian_eigenpairs", name]
        assert found["value"] == pytest.approx(expected, abs=tolerance)
        assert found["unit"] == "loss per θ²"
    trace = by_name["gauss_newton_trace", "trace"]
    assert abs(trace["value"] - np.trace(gauss_newton)) <= 5 * trace["error"]
    zero = by_name["gauss_newton_spectral_density", "negative_fraction"]
    assert zero["value"] == pytest.approx(0.0, abs=1e-3)
    dimension = trees.dimension(params)
    assert document["num_parameters"] == dimension == len(gauss_newton)


def test_the_report_speaks_of_losses(analyzed):
    text = html.unescape((analyzed[0] / "report.html").read_text())
    assert f"{2 * SIZE} losses that count" in text
    assert "the sum over all losses, divided by their total weight W = 12" in text
    assert "tokens that count" not in text


def refused(tmp_path, measurement, loss=cross_entropy, **fields):
    whole = examples()
    whole["pixels"] = np.ones_like(whole["images"])
    objective = analysis.Objective.from_loss(apply, loss, batches(whole), **fields)
    analysis.run_analysis(
        objective,
        parameters(whole),
        measurements=[measurement],
        output_dir=tmp_path / "out",
    )


MEAN = lambda logits, batch: cross_entropy(logits, batch).mean()
BAD = {
    "fisher": (
        analysis.Trace(matrix="fisher"),
        {},
        r"the Fisher matrix needs the likelihood of tokens, .*: choose hessian or gauss",
    ),
    "a mean": (
        analysis.Trace(),
        {"loss": MEAN},
        r"one for each example of the batch, \(6,\), .*: got an array of shape \(\)",
    ),
    "other weights": (
        analysis.Trace(),
        {"weights": "pixels"},
        r"shape of the weights pixels, \(6, 4\), .*: got an array of shape \(6,\)",
    ),
    "no weights": (
        analysis.Trace(),
        {"weights": "mask"},
        "a feature of the batches, images, labels, weights, pixels: got 'mask'",
    ),
    "the noise scale": (
        analysis.GradientNoiseScale(),
        {},
        "GradientNoiseScale needs a loss of sequences of tokens",
    ),
    "other losses": (
        analysis.LossComparison(),
        {},
        "needs a model whose loss can be exchanged",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_such_a_loss_cannot_have_is_refused_before_compilation(
    case, tmp_path, monkeypatch
):
    measurement, fields, message = BAD[case]
    compiled = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, *a, **k: compiled.append(1) or compile_(self, *a, **k),
    )
    with pytest.raises(ValueError, match=message):
        refused(tmp_path, measurement, **fields)
    assert not (tmp_path / "out").exists()
    assert not compiled


def test_weights_of_zero_are_refused():
    whole = examples()
    whole["weights"][:] = 0
    with pytest.raises(ValueError, match=r"the sum of the losses' weights .* is 0"):
        analysis.Objective.from_loss(
            apply, cross_entropy, batches(whole), weights="weights"
        )
