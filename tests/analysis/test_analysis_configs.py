"""Every gin file of measurements builds them, and every matrix is a scope."""

import inspect

import gin
import pytest

from t5x_fwdloss import analysis
from t5x_fwdloss.analysis.objective import matrices

NAMES = ("quick", "spectrum", "layers", "landscape", "full")
QUANTITIES = {
    "Eigenpairs": "eigenpairs",
    "Trace": "trace",
    "SpectralDensity": "spectral_density",
    "GroupTraces": "group_traces",
    "Diagonal": "diagonal",
    "NewtonStep": "newton_step",
    "GroupDensities": "group_densities",
}


@gin.configurable
def listed(measurements):
    """What a run would be given."""
    return measurements


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.fixture
def built(repository):
    """Builds the measurements of files of `configs/analysis` and bindings, in order."""

    def build(*bindings, files=()):
        folder = repository / "configs" / "analysis"
        gin.parse_config_files_and_bindings(
            [str(folder / f"{name}.gin") for name in ("measurements", *files)],
            [*bindings, "listed.measurements = %MEASUREMENTS"],
            skip_unknown=False,
        )
        return listed()

    return build


@pytest.mark.parametrize("name", NAMES)
def test_a_config_builds_its_measurements(built, name):
    found = built(files=[name])
    assert len({m.name for m in found}) == len(found) >= 3


def test_settings_reach_the_measurements(built):
    found = {m.name: m for m in built(files=["quick"])}
    assert found["hessian_eigenpairs"].num_largest == 3
    assert found["hessian_eigenpairs"].max_steps == 50
    assert found["hessian_trace"].num_probes == 16


def test_the_list_leaves_no_measurement_out(built):
    public = {
        value
        for value in vars(analysis).values()
        if inspect.isclass(value) and hasattr(value, "validate")
    }
    found = built("MEASUREMENTS = %ALL_MEASUREMENTS")
    assert {type(measurement) for measurement in found} == public
    assert {m.matrix for m in found if hasattr(m, "matrix")} == set(matrices.WORDS)


def test_every_matrix_is_a_scope_of_every_quantity(built):
    cells = [(matrix, name) for matrix in matrices.WORDS for name in QUANTITIES]
    references = ", ".join(f"@{matrix}/{name}()" for matrix, name in cells)
    found = built(f"MEASUREMENTS = [{references}]")
    assert len(found) == 5 * len(QUANTITIES)
    for (matrix, name), measurement in zip(cells, found, strict=True):
        assert type(measurement).__name__ == name
        assert measurement.matrix == matrix
        assert measurement.name == f"{matrix}_{QUANTITIES[name]}"


def test_a_setting_reaches_every_matrix_or_one(built):
    hessian, gauss_newton, fisher = built(
        "MEASUREMENTS = [@Trace(), @gauss_newton/Trace(), @fisher/Trace()]",
        "Trace.num_probes = 64",
        "Trace.name = None",
        "gauss_newton/Trace.num_probes = 8",
        "fisher/Trace.name = 'mine'",
    )
    assert [x.num_probes for x in (hessian, gauss_newton, fisher)] == [64, 8, 64]
    names = [x.name for x in (hessian, gauss_newton, fisher)]
    assert names == ["hessian_trace", "gauss_newton_trace", "mine"]


def test_the_smallest_eigenvalues_are_wanted_of_the_hessian_or_where_asked_for():
    counts = {m: analysis.Eigenpairs(matrix=m).num_smallest for m in matrices.WORDS}
    assert counts == dict.fromkeys(matrices.WORDS, 0) | {"hessian": 2}
    assert analysis.Eigenpairs(matrix="fisher", num_smallest=3).num_smallest == 3


def test_every_file_in_the_folder_is_tested(repository):
    found = {path.stem for path in (repository / "configs" / "analysis").glob("*.gin")}
    assert found == {*NAMES, "measurements"}
