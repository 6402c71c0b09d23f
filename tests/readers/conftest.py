"""Two finished runs on the tiny T5, and what is true of it."""

import pytest

from . import cells, dense, reading


@pytest.fixture(scope="session")
def truth():
    return dense.reference()


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """All cells, linearized."""
    return reading.run(tmp_path_factory.mktemp("kept") / "run", cells.kept_run())


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """Some of them, with nothing kept between products."""
    path = tmp_path_factory.mktemp("fresh") / "run"
    return reading.run(path, cells.fresh_run(), memory_budget=0)
