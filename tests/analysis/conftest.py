"""One finished run, for the tests that look at what a run leaves behind."""

import pytest

from . import runs


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "analysis"
    assert runs.run(path) == 0
    return path
