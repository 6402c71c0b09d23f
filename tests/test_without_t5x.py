"""Without T5X the two modules that need it say so, and all others import."""

import subprocess
import sys

import pytest

WITHOUT = "import sys; sys.modules['t5x'] = None; "


def _run(code, tmp_path):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )


@pytest.mark.parametrize("module", ["models", "analyze"])
def test_what_needs_t5x_says_so_at_import(module, tmp_path):
    finished = _run(f"import t5x_fwdloss.{module}", tmp_path)
    assert finished.returncode == 1
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: t5x_fwdloss.models and t5x_fwdloss.analyze need"
    )
    for tested in ("T5X cc342d4", "AirIO 69897df", "JEstimator 326824a", "jax 0.10.2"):
        assert tested in last
    assert "'Installing T5X beside it' in the README" in last


def test_everything_else_imports(tmp_path):
    names = ("losses", "curvature", "analysis", "tasks", "loss_mixin")
    names += ("standalone.train", "standalone.analyze")
    code = "; ".join(f"import t5x_fwdloss.{name}" for name in names)
    finished = _run(code, tmp_path)
    assert finished.returncode == 0, finished.stderr
