"""What a script shows of its log lines: its own, and errors of others."""

import logging
import pathlib

import pytest

from t5x_fwdloss import progress

PACKAGE = pathlib.Path(progress.__file__).parent
ORBAX = ".venv/lib/python3.11/site-packages/orbax/checkpoint/checkpointer.py"


@pytest.mark.parametrize(
    ("path", "level", "shown"),
    [
        (PACKAGE / "progress.py", "INFO", True),
        (PACKAGE / "standalone" / "train.py", "WARNING", True),
        # In the environment of a clone, which has the package's name.
        (PACKAGE.parent / ORBAX, "INFO", False),
        (f"/home/me/t5x_fwdloss/{ORBAX}", "WARNING", False),
        (f"/home/me/t5x_fwdloss/{ORBAX}", "ERROR", True),
    ],
)
def test_lines_of_other_packages_are_left_out_wherever_they_lie(path, level, shown):
    level = logging.getLevelName(level)
    record = logging.LogRecord("absl", level, str(path), 1, "", (), None)
    assert progress._ours_or_error(record) == shown
