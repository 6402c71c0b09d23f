"""Every command that the Makefile offers is one that it has."""

import re
import subprocess


def make(folder, *argv):
    return subprocess.run(
        ["make", "--no-print-directory", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_target_that_is_named_has_a_rule(repository):
    text = (repository / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())
    listed = {line.split()[0] for line in make(repository, "help").stdout.splitlines()}
    assert phony - {"help"} == listed
    for target in phony:
        done = make(repository, "--dry-run", "--always-make", target)
        assert done.returncode == 0, done.stderr
        assert "Nothing to be done" not in done.stdout + done.stderr


def test_clean_removes_what_was_built_and_nothing_else(repository, tmp_path):
    kept = [".venv/__pycache__/a.pyc", "t5x_fwdloss/a.py", "quickstart/model/a"]
    built = [
        "build/a",
        "t5x_fwdloss/__pycache__/a.pyc",
        ".ruff_cache/a",
        "x.egg-info/a",
    ]
    for name in kept + built:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "Makefile").write_text((repository / "Makefile").read_text())
    assert make(tmp_path, "clean").returncode == 0
    assert [(tmp_path / name).exists() for name in kept] == [True] * 3
    assert [(tmp_path / name).exists() for name in built] == [False] * 4
