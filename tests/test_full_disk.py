"""A disk that fills, and one that is read-only: real ones, in memory."""

import re
import subprocess
import sys

import pytest

PRIVATE = ["unshare", "--map-root-user", "--mount"]


@pytest.fixture
def disk(tmp_path):
    try:
        tried = subprocess.run(
            [*PRIVATE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        pytest.skip(f"a disk cannot be mounted here: {error}")
    if tried.returncode:
        pytest.skip(f"a disk cannot be mounted here: {tried.stderr.strip()}")
    return tmp_path


@pytest.mark.timeout(600)
def test_a_full_disk_is_said_and_the_run_resumed(disk, repository):
    program = [sys.executable, str(repository / "tests" / "full_disk.py"), str(disk)]
    done = subprocess.run(
        [*PRIVATE, *program, "6"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"(\w+ stopped \d+ times\n){2}", done.stdout), done.stdout
    assert "Traceback" not in done.stderr
