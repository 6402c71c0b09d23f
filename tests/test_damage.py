"""Damaged folders and checkpoints are answered by a sentence, or by the same numbers."""

import re
import subprocess
import sys

import pytest

PROGRAMS = {
    "results": ("bad_folders.py", "15", "eigenpairs", "hutchinson"),
    "checkpoints": ("bad_checkpoints.py", "20"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_damage_ends_with_a_sentence_or_the_same_numbers(repository, tmp_path, program):
    name, *arguments = program
    done = subprocess.run(
        [sys.executable, str(repository / "tests" / name), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert re.search("answered {.*0: .*1: |answered {.*1: .*0: ", last), last
