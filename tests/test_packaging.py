"""The wheel holds the package and its gin files, and they are found from anywhere."""

import subprocess
import sys
import zipfile

import pytest
from test_configs import assert_parsed, files_here, parse_all


@pytest.fixture(scope="session")
def wheel(repository, tmp_path_factory):
    """The wheel of this tree, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    # A copy, because setuptools builds inside the tree.
    source = folder / "source"
    names = subprocess.run(
        ["git", "-C", repository, "ls-files", "-co", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in names:
        if (repository / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((repository / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "-w", folder, source],
        check=True,
    )
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """The folder that the wheel was installed to."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--quiet", "--target", folder]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, wheel], check=True
    )
    return folder


def test_the_wheel_has_every_module_and_every_gin_file(wheel, repository):
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {f"t5x_fwdloss/configs/{name}" for name in files_here(repository)} <= inside
    modules = (repository / "t5x_fwdloss").rglob("*.py")
    assert {str(path.relative_to(repository)) for path in modules} <= inside
    assert not any(name.startswith(("tests/", "configs/")) for name in inside)


def test_an_installed_wheel_parses_its_gin_files(installed, repository, tmp_path):
    report = parse_all(repository, tmp_path, PYTHONPATH=str(installed))
    assert str(installed) in report["root"]
    assert_parsed(report, repository)
