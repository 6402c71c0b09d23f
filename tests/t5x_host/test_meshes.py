"""Products and measurements of a T5 on meshes: what is sent, what is held, the numbers.

The products are looked at with every run of the tests. The measurements take minutes for
each mesh: `make test-meshes`.
"""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.t5x
ALL = pytest.param("all", marks=[pytest.mark.meshes, pytest.mark.timeout(3600)])
# Parameters in one dimension only: in two, each use of one gathers it, as in training.
HELD = ["2x4 t5 1", "4x2 t5 1", "1x8 t5 1"]
# Scanned layers with remat, activations and parameters partitioned in other ways.
MORE = ["2x4 scalable_t5 1", "2x4 scalable_t5 2", "4x1 t5 2"]
CASES = {
    "products": ["2x4 t5 1 products"],
    "all": ["1x1 t5 1", *HELD, "1x1 scalable_t5 1", *MORE],
}


@pytest.fixture(scope="module", params=["products", ALL])
def found(request, tmp_path_factory, repository):
    """The JSON of each case."""
    dump, cases = tmp_path_factory.mktemp("programs"), CASES[request.param]
    environment = {
        **os.environ,
        # Partitioning is what is looked at; machine code need not be fast.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 "
        f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
        "PYTHONPATH": os.pathsep.join([str(repository), str(repository / "tests")]),
        # A program from the cache is not compiled, so not dumped.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-m", "t5x_host.mesh_programs", str(dump), *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = map(json.loads, done.stdout.splitlines())
    return dict(zip(cases, lines, strict=True))


def test_no_program_gathers_or_holds_a_partitioned_parameter_whole(found):
    looked_at = [case for case in found if case.split(" products")[0] in HELD]
    assert looked_at
    for case in looked_at:
        phases = found[case]["phases"]
        assert sum(phase["programs"] for phase in phases.values()) > 10
        assert len(found[case]["full"]) > 4
        for name, phase in phases.items():
            assert (case, name, phase["gathered"], phase["held"]) == (
                case,
                name,
                [],
                [],
            )


def test_a_product_sends_about_what_two_gradients_send(found):
    for case, result in found.items():
        if "1x1" in case or "scalable" in case:  # a loop's collectives are written once
            continue
        sent = {name: phase["bytes"] for name, phase in result["phases"].items()}
        gradient = sent["gradient"]
        assert gradient > 0
        # CPU's compiler adds partial sums after they were reduced, not before: 2.4 times
        # where nothing is linearized.
        assert 0.5 * gradient < sent["linearized hessian"] < 2.2 * gradient
        assert 0.5 * gradient < sent["linearized gauss_newton"] < 1.5 * gradient
        assert sent["direct hessian"] < 2.5 * gradient
        assert sent["stacked gauss_newton"] < 2.2 * sent["linearized gauss_newton"]


@pytest.mark.parametrize("found", [ALL], indirect=True)
def test_probes_are_bit_for_bit_and_numbers_those_of_one_device(found):
    for case, result in found.items():
        alone = found[f"1x1 {case.split()[1]} 1"]
        assert result["probe"] == alone["probe"]
        assert set(result["numbers"]) == set(alone["numbers"])
        for name, value in alone["numbers"].items():
            assert result["numbers"][name] == pytest.approx(value, rel=1e-5), (
                case,
                name,
            )
