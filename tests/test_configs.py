"""Every gin file parses, from a directory that has nothing to do with this one."""

import importlib.util
import json
import os
import subprocess
import sys


def parse_all(repository, cwd, **env):
    done = subprocess.run(
        [sys.executable, str(repository / "tests" / "parse_gin.py")],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def files_here(repository):
    root = repository / "configs"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.gin"))


def test_every_file_parses(repository, tmp_path):
    report = parse_all(repository, tmp_path)
    assert_parsed(report, repository)


def assert_parsed(report, repository):
    """No file failed, and none was left out but for want of T5X."""
    assert {name: error for name, error in report["errors"].items() if error} == {}
    here = files_here(repository)
    assert report["names"] == here
    if importlib.util.find_spec("t5x"):
        assert list(report["errors"]) == here
    else:
        standalone = [name for name in here if name.startswith("standalone/")]
        assert set(standalone) <= report["errors"].keys()


def test_every_folder_of_configs_is_a_package(repository):
    folders = {path.parent for path in (repository / "configs").rglob("*.gin")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_every_run_file_says_how_it_is_run_and_what_it_needs(repository):
    for path in [
        *(repository / "configs" / "runs").glob("*.gin"),
        *(repository / "configs" / "examples").glob("*.gin"),
    ]:
        text = path.read_text()
        header = text.split("from __gin__")[0]
        if "_script" not in text and "include" not in text:
            continue  # data of the examples, not a run
        assert "python -m" in header, path
        assert "Required to be set" in header, path
        for line in header.splitlines():
            if "--gin_file=t5x_fwdloss/configs/" in line:
                name = line.split("configs/")[1].split()[0]
                assert (repository / "configs" / name).exists(), (path, name)
