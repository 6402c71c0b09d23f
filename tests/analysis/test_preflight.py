"""A run checks itself, and a check that fails says which and why."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    LossComparison,
    Objective,
    PreflightError,
    Trace,
)
from t5x_fwdloss.analysis.objective import matrices, preflight
from t5x_fwdloss.analysis.objective.normalization import Normalizer

from . import runs, toy

KEY = jax.random.key(0)


def check_with_hessian(objective, params, **settings):
    product = objective.product("hessian", params, memory_budget=0)
    return preflight.check_objective(
        objective, params, KEY, product=product, **settings
    )


def custom_objective(numerator):
    batch = {"x": np.ones((2, 3), np.float32)}
    return Objective(numerator, [batch], normalizer=Normalizer("sum", 1.0))


def test_every_check_passes_on_a_sound_model():
    checks = check_with_hessian(runs.objective(), toy.parameters())
    assert [check.name for check in checks] == [
        "loss twice",
        "the model's own loss_fn",
        "jvp equals <gradient, v>",
        "u.Av equals v.Au for the Hessian",
        "A.0 equals 0 for the Hessian",
    ]
    # The checks are sharper than their tolerance is wide: nothing passes by chance.
    assert all(check.tolerance < 1e-2 * abs(check.first) for check in checks[:4])


def test_stock_t5x_loss_is_refused_with_the_line_to_change():
    objective = runs.objective(impl="custom_vjp")
    message = r'directional .* set LOSS_IMPL = "custom_jvp" in gin'
    with pytest.raises(PreflightError, match=message) as caught:
        preflight.has_forward_mode(objective, toy.parameters(), "directional")
    assert "Traceback" not in str(caught.value)
    assert not preflight.has_forward_mode(objective, toy.parameters())
    assert not objective.num_traces


def test_one_trace_and_one_compilation_serve_the_loss_its_type_and_its_slope():
    objective, params = runs.objective(), toy.parameters()
    assert preflight.has_forward_mode(objective, params, "directional")
    assert objective.activation_dtype(params) == "float32"
    value = preflight.loss_value(objective, params, forward=True)
    preflight.check_objective(objective, params, KEY, value=value)
    assert objective.num_traces == {"the jvp": 1, "the gradient": 1}
    assert value == pytest.approx(runs.objective().value(params), rel=1e-6)


def test_products_without_forward_mode_are_still_measured():
    objective = runs.objective(impl="custom_vjp")
    checks = check_with_hessian(objective, toy.parameters(), forward=False)
    assert len(checks) == 4


@jax.custom_vjp
def fused_attention(x):
    return jnp.sum(x**2)


fused_attention.defvjp(lambda x: (fused_attention(x), x), lambda x, g: (2 * x * g,))


def test_another_custom_vjp_is_named():
    found = custom_objective(lambda p, b, _: jax.jit(fused_attention)(b["x"] * p["w"]))
    with pytest.raises(PreflightError, match=r"custom_vjp function \(fused_attention"):
        preflight.has_forward_mode(found, {"w": jnp.ones(3)}, "slopes")


def test_a_custom_vjp_that_no_tangent_meets_does_not_matter():
    found = custom_objective(
        lambda p, b, _: jnp.sum(p["w"]) * fused_attention(b["x"] * 2)
    )
    assert preflight.has_forward_mode(found, {"w": jnp.ones(3)}, "slopes")


def test_a_random_loss_is_found_out():
    draws = np.random.default_rng(0)

    def numerator(params, batch, key):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        noise = jax.pure_callback(lambda: np.float32(draws.normal()), shape)
        return jnp.sum((batch["x"] @ params["w"]) ** 2) + noise

    found = custom_objective(numerator)
    with pytest.raises(PreflightError, match="'loss twice' failed: .* loss is random"):
        preflight.check_objective(found, {"w": jnp.ones(3)}, KEY)


def test_a_rule_whose_hessian_is_not_symmetric_is_found_out():
    found = custom_objective(lambda p, *_: jnp.sum(jnp.roll(p["w"], 1) * p["w"] ** 2))
    assert len(check_with_hessian(found, {"w": jnp.arange(1.0, 4.0)})) == 4

    @jax.custom_jvp
    def field(w):
        return jnp.sum(w**3)

    @field.defjvp
    def _(primals, tangents):
        (w,), (w_dot,) = primals, tangents
        return field(w), jnp.vdot(jnp.roll(w, 1) * w**2, w_dot)

    broken = custom_objective(lambda p, *_: field(p["w"]))
    with pytest.raises(
        PreflightError, match=r"'u.Av equals v.Au .*' failed: .* must diff"
    ):
        check_with_hessian(broken, {"w": jnp.arange(1.0, 4.0)})


def test_a_product_that_is_not_zero_for_zero_is_found_out():
    objective, params = runs.objective(), toy.parameters()
    product = objective.product("hessian", params)

    def affine(v):
        if any(x.any() for x in jax.tree.leaves(v)):
            return product(v)
        return jax.tree.map(jnp.ones_like, v)

    with pytest.raises(PreflightError, match="'A.0 equals 0 .*' failed: 4 and 0 must"):
        preflight.check_objective(objective, params, KEY, product=affine)


@pytest.mark.parametrize(("first", "passes"), [(1.5, True), (1.6, False)])
def test_a_check_passes_within_its_tolerance_and_never_for_nan(first, passes):
    assert preflight.Check("x", first, 1.0, 0.5, "").passed == passes
    assert preflight.Check("x", 1.0, first, 0.5, "").passed == passes
    for pair in ((np.nan, first), (first, np.nan), (np.nan, np.nan)):
        assert not preflight.Check("x", *pair, 0.5, "").passed


def test_a_run_checks_the_matrix_it_measures_first_and_linearizes_no_other(
    tmp_path, monkeypatch
):
    asked = []
    linear = Objective.product

    def product(self, matrix, *args, **settings):
        asked.append(matrix)
        return linear(self, matrix, *args, **settings)

    monkeypatch.setattr(Objective, "product", product)
    cases = {
        "fisher": [LossComparison(num_rounds=0), Trace(matrix="fisher", num_probes=2)],
        "hessian": [DirectionalDerivatives(num_points=0)],
        "": [LossComparison(num_rounds=0)],
    }
    for matrix, measurements in cases.items():
        asked.clear()
        path = tmp_path / f"run_{matrix}"
        assert runs.run(path, measurements=measurements) == 0
        assert asked == [matrix] * bool(matrix)
        document = json.loads((path / "results.json").read_text())
        names = [check["name"] for check in document["preflight"]]
        words = f"for {matrices.WORDS.get(matrix)}"
        assert [x for x in names if " for " in x] == [
            f"{what} {words}" for what in ("u.Av equals v.Au", "A.0 equals 0") if matrix
        ]


def test_a_rule_with_another_derivative_backwards_is_found_out(monkeypatch):
    objective = runs.objective()
    true = objective.jvp
    monkeypatch.setattr(
        objective, "jvp", lambda p, v: (true(p, v)[0], 1.01 * true(p, v)[1])
    )
    with pytest.raises(PreflightError, match=r"'jvp equals <gradient, v>' failed"):
        preflight.check_objective(objective, toy.parameters(), KEY)


class Duck:
    """No `LossMixin`: what it trains is only found out by computing it."""

    def __init__(self, extra, factor="AVERAGE_PER_SEQUENCE"):
        self._model = toy.SoftmaxRegression(factor=factor)
        self._compute_logits = self._model._compute_logits
        self.loss_settings = self._model.loss_settings
        self.loss_sum = self._model.loss_sum
        self.extra = extra

    def loss_fn(self, params, batch, dropout_rng):
        total, normalizer = self.loss_sum(params, batch, dropout_rng)
        return total / normalizer * (1 + self.extra), {}


@pytest.mark.parametrize("factor", [None, 7.0, "AVERAGE_PER_SEQUENCE"])
def test_a_model_that_trains_another_loss_is_found_out_by_its_value(factor):
    def check(extra):
        found = Objective.from_model(Duck(extra, factor), toy.batches(4))
        return preflight.check_objective(found, toy.parameters(), KEY)

    assert check(0.0)[1].name == "the model's own loss_fn"
    with pytest.raises(PreflightError, match="own loss_fn' failed: .* another loss"):
        check(1e-4)


def test_a_first_batch_without_counted_tokens_is_not_compared():
    batches = toy.batches(4)
    batches[0]["decoder_loss_weights"][:] = 0.0
    found = Objective.from_model(
        toy.SoftmaxRegression(factor="NUM_REAL_TARGET_TOKENS"), batches
    )
    assert preflight.model_loss(found, toy.parameters()) is None


def test_the_loss_with_dropout_is_compared_under_the_same_masks():
    found = Objective.from_model(
        toy.SoftmaxRegression(factor=7.0), toy.batches(4), dropout_seed=2
    )
    own, measured = preflight.model_loss(found, toy.parameters())
    assert own == pytest.approx(measured, rel=1e-6)
    assert measured == pytest.approx(found.batch_values(toy.parameters())[0])


def test_an_extended_loss_is_refused_before_anything_is_traced():
    class Regularized(toy.SoftmaxRegression):
        def loss_fn(self, params, batch, dropout_rng):
            loss, metrics = super().loss_fn(params, batch, dropout_rng)
            return loss + jnp.sum(params["dense"]["bias"] ** 2), metrics

    with pytest.raises(ValueError, match="must not drop another loss: Regularized has"):
        Objective.from_model(Regularized(), toy.batches(4))


def test_a_group_of_no_parameters_is_refused_before_the_optimizer_is_read(tmp_path):
    def load():
        raise AssertionError("read")

    measurements = [
        Trace(preconditioned=True),
        Trace(name="of_a_group", group="nothing"),
    ]
    host = runs.host(load_preconditioner=load)
    with pytest.raises(ValueError, match="'nothing' matches none of 2"):
        runs.run(tmp_path, measurements=measurements, host=host)
