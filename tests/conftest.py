"""Fixtures and hooks of all tests: float64, strict modes, and T5X or no T5X."""

import importlib.util
import os
import pathlib
import tempfile

# Before jax is imported: one CPU device here (tests that want more start processes),
# and compiled programs are kept between runs, the best single speed-up of the suite.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(tempfile.gettempdir()) / "t5x_fwdloss-jax-cache"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import pytest
from xdist import scheduler

MISSING = [
    name
    for name in ("t5x", "airio", "jestimator")
    if importlib.util.find_spec(name) is None
]
# Folders whose files share runs that take minutes.
SHARED_RUNS = ("tests/readers/",)
# What takes longest begins first, so that the processes end together.
FIRST = (*SHARED_RUNS, "tests/t5x_runs/", "tests/analysis/test_two_processes.py")
_counts = {"ran": 0, "skipped": 0}


class ByFile(scheduler.LoadScopeScheduling):
    """One process for the tests of a file, and for a folder that shares its runs.

    (`--dist loadgroup` would do, but its marks have no effect under pytest 9.2.)
    """

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        return next((x for x in SHARED_RUNS if file.startswith(x)), file)


def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # the order below is the one that is meant
    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    for item in items:
        if item.get_closest_marker("t5x") is None:
            continue
        # T5X and what it imports warn of deprecations that are not ours to mend.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if MISSING:
            reason = f"T5X cannot be imported here: {', '.join(MISSING)} not found"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report):
    if "t5x" not in report.keywords:
        return
    if report.when == "call" and not report.skipped:
        _counts["ran"] += 1
    elif report.skipped:
        _counts["skipped"] += 1


def pytest_terminal_summary(terminalreporter):
    reason = f" ({', '.join(MISSING)} not found)" if MISSING else ""
    terminalreporter.write_line(
        f"T5X tests: {_counts['ran']} ran, {_counts['skipped']} skipped{reason}"
    )


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def unchanged_configuration():
    """A test that leaves JAX configured in another way would change the later ones."""
    before = dict(jax.config.values)
    yield
    changed = {
        name: jax.config.values[name]
        for name, value in before.items()
        if jax.config.values[name] != value
    }
    for name in changed:
        jax.config.update(name, before[name])
    assert not changed, f"the test left JAX with {changed}"


@pytest.fixture(scope="session")
def repository():
    return pathlib.Path(__file__).resolve().parent.parent
