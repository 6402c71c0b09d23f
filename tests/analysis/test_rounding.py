"""In bfloat16 every number carries the rounding of its network; float32 is the oracle."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from t5x_fwdloss.analysis import (
    Diagonal,
    DirectionalDerivatives,
    Eigenpairs,
    GroupTraces,
    HostInfo,
    NewtonStep,
    Objective,
    SpectralDensity,
    Trace,
    run_analysis,
)
from t5x_fwdloss.analysis.measurements.rounding import (
    FACTOR,
    Rounding,
    setting_of,
    with_rounding,
)
from t5x_fwdloss.analysis.numbers import EXACT, STANDARD_ERROR, Number
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct
from t5x_fwdloss.curvature.vectors import trees
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import Transformer

from . import tiny_t5

SIZES = dataclasses.replace(
    tiny_t5.SIZES, vocab_size=384, emb_dim=16, head_dim=8, mlp_dim=32
)
SEEDS = 20
# Two of one label, if signs are exchanged for others.
GROUPS = {"encoder": "encoder/.*", "a/b": "encoder/.*", "a.b": "decoder/.*"}
FLAG = "--gin.network.T5Config.dtype=\"'float32'\""


def model(dtype):
    network = Transformer(dataclasses.replace(SIZES, dtype=dtype))
    return StandaloneModel(network, loss_impl="custom_jvp", z_loss=1e-4)


def measurements():
    few = {"num_probes": 4, "block_size": 2}
    return [
        DirectionalDerivatives(num_random=SEEDS, num_points=0),
        Eigenpairs(num_largest=3, num_smallest=1, max_steps=60),
        Eigenpairs(name="early", num_largest=1, num_smallest=0, max_steps=3),
        Trace(**few, relative_error=1e-6),
        SpectralDensity(num_probes=2, num_steps=8),
        GroupTraces(groups=GROUPS, **few),
        Diagonal(**few),
        NewtonStep(matrix="gauss_newton", damping=2.0, groups={}),
    ]


def run(dtype, folder):
    batches = tiny_t5.batches(num=1)
    params = model(dtype).get_initial_params(jax.random.key(0), batches[0])
    status = run_analysis(
        Objective.from_model(model(dtype), batches),
        params,
        measurements=measurements(),
        output_dir=folder,
        host=HostInfo(checkpoint="/models/tiny", step=1),
        memory_budget=0,  # fewer programs to compile
    )
    assert status == 0
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("bfloat16"), tmp_path_factory.mktemp("float32")


@pytest.fixture(scope="module")
def narrow(folders):
    return run("bfloat16", folders[0])


@pytest.fixture(scope="module")
def wide(folders):
    """The same in float32: no product may be taken for the sake of its rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(MatrixProduct, "at")
        return run("float32", folders[1])


def numbers(document, name):
    (found,) = [x for x in document["measurements"] if x["name"] == name]
    return found["results"]


def deviations(narrow, wide, measurement, names):
    """By how much bfloat16 and float32 differ, and the error that was reported."""
    here, there = (numbers(document, measurement) for document in (narrow, wide))
    pairs = [(here[name], there[name]) for name in names]
    return np.asarray([(abs(x["value"] - y["value"]), x["error"]) for x, y in pairs]).T


@pytest.mark.parametrize("quantity", ["slope", "curvature"])
def test_nineteen_of_twenty_lie_within_the_error(narrow, wide, quantity):
    names = [f"random_{i}/{quantity}" for i in range(SEEDS)]
    change, error = deviations(narrow, wide, "directional_derivatives", names)
    assert (change <= error).sum() >= 19
    assert 1 < np.median(error / change) < 12  # an error, and not any bound
    kinds = {numbers(narrow, "directional_derivatives")[n]["error_kind"] for n in names}
    assert all(kind.endswith("rounding in bfloat16") for kind in kinds)


ALSO = [
    ("directional_derivatives", "loss"),
    ("directional_derivatives", "gradient_norm"),
    ("directional_derivatives", "gradient/slope"),
    ("directional_derivatives", "gradient/curvature"),
    ("directional_derivatives", "gradient/step_to_minimum"),
    ("hessian_trace", "trace"),
    ("hessian_trace", "mean_eigenvalue"),
    ("hessian_spectral_density", "trace"),
    ("hessian_spectral_density", "frobenius_norm"),
    ("hessian_group_traces", "trace"),
    ("hessian_group_traces", "frobenius_norm"),
    ("hessian_group_traces", "encoder/trace"),
    ("hessian_group_traces", "encoder/mean_eigenvalue"),
    ("hessian_group_traces", "a/b/trace"),
    ("hessian_group_traces", "a.b/trace"),
    ("hessian_diagonal", "trace"),
    ("hessian_diagonal", "token_embedder.embedding/largest"),
    ("hessian_diagonal", "token_embedder.embedding/smallest"),
    ("gauss_newton_newton_step", "predicted_decrease"),
    ("gauss_newton_newton_step", "true_decrease"),
    ("gauss_newton_newton_step", "decrease_ratio"),
]


@pytest.mark.parametrize(("measurement", "name"), ALSO)
def test_every_number_has_the_rounding_in_its_error(narrow, wide, measurement, name):
    ((change,), (error,)) = deviations(narrow, wide, measurement, [name])
    here, there = (numbers(d, measurement)[name] for d in (narrow, wide))
    assert here["error_kind"].endswith("rounding in bfloat16")
    assert "rounding in" not in there["error_kind"]
    rounding = error - (there["error"] or 0.0)
    # The part that the sampling has moves, too, but by little.
    assert change <= rounding
    assert error < 0.5 * abs(here["value"]) + 3 * (error - rounding)
    if here["interval"] is not None:
        assert here["interval"][1] - here["interval"][0] > 2 * change


def test_every_entry_of_a_diagonal_has_its_own_rounding(narrow, wide, folders):
    mean_errors = []
    for folder in folders:
        arrays = np.load(folder / "hessian_diagonal.npz")
        errors = [arrays[name] for name in arrays if name.endswith("/error")]
        mean_errors.append(np.mean(np.concatenate([x.reshape(-1) for x in errors])))
    assert 1.03 < mean_errors[0] / mean_errors[1] < 2


def test_an_eigenvalue_has_residual_and_rounding_in_its_error(narrow, wide, folders):
    names = ["largest_1", "largest_2", "largest_3", "smallest_1"]
    change, error = deviations(narrow, wide, "hessian_eigenpairs", names)
    arrays = np.load(folders[0] / "hessian_eigenpairs.npz")
    values, rounding = np.abs(arrays["eigenvalues"]), error - arrays["residuals"]
    assert (change <= rounding).all()
    assert (2**-9 * values < rounding).all()
    assert (rounding < 0.1 * values).all()
    # The change relative to the pairs' sizes, which is one for all of them.
    line = np.polyval(np.polyfit(values, rounding, 1), values)
    np.testing.assert_allclose(rounding, line, rtol=1e-4)
    assert rounding.min() < 0.9 * rounding.max()
    found = numbers(narrow, "hessian_eigenpairs")
    assert all("plus rounding in bfloat16" in found[n]["error_kind"] for n in names)


def test_a_residual_is_not_counted_as_rounding(narrow, folders):
    number = numbers(narrow, "early")["largest_1"]
    residual = np.load(folders[0] / "early.npz")["residuals"][0]
    assert residual > 0.1 * number["value"]
    assert 0 < number["error"] - residual < 0.5 * residual


def test_the_steps_end_where_the_rounding_begins(narrow, wide):
    names = ["largest_1", "largest_2", "largest_3", "smallest_1"]
    for document in (narrow, wide):
        found = numbers(document, "hessian_eigenpairs")
        assert all(found[name]["converged"] for name in names)
        assert found["num_products"]["value"] < 60


def test_the_zero_of_a_density_is_as_wide_as_the_rounding(narrow, wide):
    levels = []
    for document in (narrow, wide):
        found = numbers(document, "hessian_spectral_density")
        levels.append(found["zero_level"]["value"] / found["largest_node"]["value"])
    assert levels[1] < 1e-4
    assert 2**-9 < levels[0] < 0.1


def test_more_probes_do_not_make_up_for_rounding(narrow):
    assert not numbers(narrow, "hessian_trace")["trace"]["converged"]


def test_the_type_is_recorded_and_its_remedy_named(narrow, wide, folders):
    assert (narrow["activation_dtype"], wide["activation_dtype"]) == (
        "bfloat16",
        "float32",
    )
    assert (
        "<dt>Activations</dt><dd>bfloat16</dd>"
        in (folders[0] / "report.html").read_text()
    )
    for found in narrow["measurements"]:
        assert any(FLAG in note for note in found["notes"]), found["name"]
    assert not any(FLAG in note for x in wide["measurements"] for note in x["notes"])


def test_a_network_without_a_field_for_it_has_no_binding():
    assert setting_of(model("bfloat16")) == FLAG
    assert setting_of(None) == ""
    assert setting_of(object()) == ""


PARSE = """
import sys
import gin
gin.parse_config("from __gin__ import dynamic_registration\\nfrom {0} import network\\n"
                 "network.Transformer.config = @network.T5Config()\\n"
                 "network.T5Config.vocab_size = 8\\nnetwork.T5Config.dtype = 'bfloat16'")
import {0}.network as network
from types import SimpleNamespace
from t5x_fwdloss.analysis.measurements.rounding import setting_of
build = lambda: gin.get_configurable(network.Transformer)()
flag = setting_of(SimpleNamespace(module=build()))
gin.parse_config(flag.removeprefix("--gin.").replace('"', ""))
print(flag, build().config.dtype)
"""


@pytest.mark.parametrize(
    "package",
    [
        "t5x_fwdloss.standalone",
        pytest.param("t5x.examples.t5", marks=pytest.mark.t5x),
    ],
)
def test_the_binding_that_is_named_makes_the_network_one_of_float32(package):
    done = subprocess.run(
        [sys.executable, "-c", PARSE.format(package)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [FLAG, "float32"], done.stderr[-2000:]


def test_the_error_is_that_of_a_change_by_half_an_epsilon():
    # The sum of n ones changes by u sqrt(n / 3) in one draw.
    params = {"w": np.ones(10_000, np.float32)}
    params = jax.tree.map(jax.numpy.asarray, params)
    for dtype, roundoff in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        rounding = Rounding(dtype, params, jax.random.key(0, impl="threefry2x32"))
        at = lambda p: {"sum": trees.inner((params if p is None else p), params)}
        error = rounding.errors(at)["sum"]
        size = FACTOR * roundoff / np.sqrt(3)
        assert 0.2 < float(error) / (size * 100) < 2  # of three draws
        entries = rounding.errors(lambda p: params if p is None else p)["w"]
        assert np.sqrt(np.mean(entries**2)) == pytest.approx(size, rel=0.05)
        assert 0.9 < entries.max() / (FACTOR * roundoff) <= 1 + 1e-3
    for dtype in ("float32", "float64"):
        rounding = Rounding(dtype, params, jax.random.key(0, impl="threefry2x32"))
        assert rounding.errors(lambda _: pytest.fail("a product was taken")) is None
        assert rounding.notes == ()


def test_rounding_adds_to_an_error_and_to_both_ends_of_an_interval():
    plain = Number(3.0, "1")
    assert plain.error_kind == EXACT
    assert with_rounding(plain, 0.5, "bfloat16") == Number(
        3.0, "1", 0.5, "rounding in bfloat16"
    )
    sampled = Number(3.0, "1", 0.25, STANDARD_ERROR, interval=(2.0, 4.5))
    assert with_rounding(sampled, 0.5, "bfloat16") == Number(
        3.0,
        "1",
        0.75,
        f"{STANDARD_ERROR}, plus rounding in bfloat16",
        interval=(1.5, 5.0),
    )
    assert with_rounding(sampled, 0.0, "bfloat16") == sampled
