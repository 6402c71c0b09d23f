"""Every gin file of measurements builds them, and `full` leaves none out."""

import dataclasses
import inspect

import gin
import pytest

from t5x_fwdloss.analysis import measurements

NAMES = ("quick", "spectrum", "layers", "full")
PARENTS = ("Context", "Measurement")


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


def parsed(repository, name):
    path = repository / "configs" / "analysis" / f"{name}.gin"
    gin.parse_config_files_and_bindings([str(path)], [], skip_unknown=False)
    return gin.query_parameter("MEASUREMENTS/macro.value")


@pytest.mark.parametrize("name", NAMES)
def test_a_config_builds_its_measurements(repository, name):
    built = [reference() for reference in map(_evaluated, parsed(repository, name))]
    assert len({m.name for m in built}) == len(built)
    for measurement in built:
        # What a run records: the class's own name and every setting.
        assert hasattr(measurements, type(measurement).__name__)
        assert set(dataclasses.asdict(measurement)) >= {"name"}


def test_settings_reach_the_measurements(repository):
    built = {
        m.name: m for m in (f() for f in map(_evaluated, parsed(repository, "quick")))
    }
    assert built["hessian_eigenpairs"].num_largest == 3
    assert built["hessian_eigenpairs"].save_every == 10
    assert built["hessian_trace"].num_probes == 16


def test_full_leaves_no_measurement_out(repository):
    listed = {
        reference.selector.split(".")[-1] for reference in parsed(repository, "full")
    }
    public = {
        name
        for name, value in vars(measurements).items()
        if inspect.isclass(value) and name not in PARENTS
    }
    assert listed == public


def test_every_file_in_the_folder_is_tested(repository):
    found = {path.stem for path in (repository / "configs" / "analysis").glob("*.gin")}
    assert found == set(NAMES)


def _evaluated(reference):
    return reference.scoped_configurable_fn
