"""Values and gradients are T5X's: its golden numbers, and where it is installed, itself."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest

from t5x_fwdloss import losses

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DATA = REPOSITORY / "tests" / "data"
GOLDEN = np.load(DATA / "golden_losses.npz")
CASES = json.loads(str(GOLDEN["settings"]))
METRICS = json.loads((DATA / "golden_metrics.json").read_text())
NETWORKS = ("untied", "tied", "decoder_only")


@pytest.fixture(scope="module")
def make_golden():
    path = REPOSITORY / "scripts" / "make_golden.py"
    spec = importlib.util.spec_from_file_location("make_golden", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored(case, kind):
    prefix = f"{case}/{kind}/"
    return {k.removeprefix(prefix): GOLDEN[k] for k in GOLDEN if k.startswith(prefix)}


def assert_t5x_agrees(expected, actual, case, impl):
    """Compares the outputs of `loss_outputs`: T5X's, and ours by one implementation."""
    settings, arrays = CASES[case], stored(case, "inputs")
    # T5X reduces bfloat16 logits in bfloat16; our own rules do it in float32.
    is_low = settings.get("dtype") == "bfloat16"
    dtype = jnp.bfloat16 if is_low and impl != "custom_vjp" else jnp.float32
    size = laws.scale_of(arrays["logits"]) if not is_low else 1.0
    for name in ("primal", "loss", "z_loss", "weight_sum"):
        scale = size * laws.scale_of(expected[name])
        np.testing.assert_allclose(
            actual[name],
            expected[name],
            rtol=4 * float(jnp.finfo(dtype).eps),
            atol=laws.tolerance(jnp.float32, scale),
            err_msg=name,
        )
    gradient, expected_gradient = actual["gradient"], expected["gradient"]
    if impl != "custom_vjp":
        # T5X takes target rows for distributions; where they are not, ours is true.
        with jax.enable_x64(True):
            rows = np.asarray(
                oracles.target_rows(
                    arrays["targets"].astype(np.int32),
                    gradient.shape[-1],
                    settings.get("label_smoothing", 0.0),
                )
            )
        is_distribution = np.abs(rows.sum(-1, keepdims=True) - 1) < 1e-6
        gradient = np.where(is_distribution, gradient, 0)
        expected_gradient = np.where(is_distribution, expected_gradient, 0)
    atol = laws.tolerance(jnp.float32, laws.scale_of(expected_gradient))
    if is_low:
        atol = 2 * float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("impl", losses.IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_the_golden_ones(make_golden, case, impl):
    arrays = stored(case, "inputs")
    actual = make_golden.loss_outputs(losses, CASES[case], arrays, impl=impl)
    assert_t5x_agrees(stored(case, "outputs"), actual, case, impl)


def test_golden_numbers_say_what_made_them():
    for text in (str(GOLDEN["versions"]), json.dumps(METRICS["versions"])):
        assert json.loads(text)["t5x_commit"] == "cc342d4"
        assert len(json.loads(text)["t5x_losses_sha256"]) == 64


@pytest.mark.parametrize("impl", losses.IMPLEMENTATIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_losses_of_golden_logits_are_those_of_t5x_models(make_golden, network, impl):
    data = np.load(DATA / f"golden_network_{network}.npz")
    batch = {k.removeprefix("batch/"): jnp.asarray(data[k]) for k in data if "ch/" in k}
    settings = METRICS["settings"]
    for name, result in METRICS["results"][network].items():
        factor, weights = losses.get_loss_normalizing_factor_and_weights(
            make_golden.decode_factor(settings["factors"][name]), batch
        )
        loss, z_loss, _ = losses.compute_weighted_cross_entropy(
            jnp.asarray(data["logits"]),
            batch["decoder_target_tokens"],
            weights,
            settings["label_smoothing"],
            settings["z_loss"],
            factor,
            impl=impl,
        )
        tolerance = laws.tolerance(jnp.float32)
        np.testing.assert_allclose(loss, result["loss"], rtol=tolerance)
        expected = result["metrics"]["z_loss"]["total"]
        np.testing.assert_allclose(z_loss, expected, rtol=tolerance)


@pytest.mark.t5x
@pytest.mark.parametrize("impl", losses.IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_installed_t5x(make_golden, case, impl):
    from t5x import losses as t5x_losses

    arrays = stored(case, "inputs")
    expected = make_golden.loss_outputs(t5x_losses, CASES[case], arrays)
    actual = make_golden.loss_outputs(losses, CASES[case], arrays, impl=impl)
    assert_t5x_agrees(expected, actual, case, impl)
    # Sums of fractions over a packed segment are added up in another order.
    if impl == "custom_vjp" and case != "packed_weights":
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.t5x
@pytest.mark.parametrize("factor", [None, 7, 2.5, np.float32(3.0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_custom_vjp_is_t5x_to_the_last_bit_when_jitted(factor, dtype):
    from t5x import losses as t5x_losses

    keys = jax.random.split(jax.random.key(0), 2)
    logits = (3 * jax.random.normal(keys[0], (4, 8, 101))).astype(dtype)
    targets = jax.random.randint(keys[1], (4, 8), -2, 103)
    weights = (targets > 20).astype(jnp.float32)

    def results(module, **options):
        def f(logits):
            return module.compute_weighted_cross_entropy(
                logits, targets, weights, 0.1, 1e-2, factor, **options
            )

        loss_and_gradient = jax.value_and_grad(lambda logits: f(logits)[0])
        return jax.jit(f)(logits), jax.jit(loss_and_gradient)(logits)

    ours = results(losses, impl="custom_vjp")
    jax.tree.map(np.testing.assert_array_equal, ours, results(t5x_losses))
