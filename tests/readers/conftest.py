"""Two finished runs on the tiny T5, and what is true of it."""

import pathlib

import pytest

from . import cells, dense, reading

HERE = pathlib.Path(__file__).parent
# The runs and the dense matrices count to the first test that asks for them.
TIMEOUT = 900


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(scope="session")
def truth():
    return dense.reference()


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """All cells, linearized."""
    return reading.run(tmp_path_factory.mktemp("kept") / "run", cells.kept_run())


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """Every class, with nothing kept between products."""
    path = tmp_path_factory.mktemp("fresh") / "run"
    return reading.run(path, cells.fresh_run(), memory_budget=0)


@pytest.fixture
def run(request):
    """The run that `cells.table` names."""
    return request.getfixturevalue(request.param)
