"""Every command and setting in README.md and docs/ is one that its program takes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# Gin files that stand for the reader's own.
OWN = {"my_finetune.gin": "include 't5x_fwdloss/configs/examples/cmudict_train.gin'\n"}
WRONG = """
    python -m t5x_fwdloss.standalone.train \\
      --gin_file=t5x_fwdloss/configs/standalone/train.gin \\
      --gin_file=t5x_fwdloss/configs/standalone/tiny.gin \\
      --gin.MODEL_DIR="'/tmp/g2p'" --gin.NO_SUCH_MACRO=1

    --gin.MEASUREMENTS="[@NoSuchMeasurement()]"

    python -m t5x_fwdloss.report --no_such_flag DIR

    scripts/train_with_loss.sh

With `--gin.Trace.no_such_setting=1` it does nothing.
"""


@pytest.fixture(scope="module")
def errors(repository, tmp_path_factory):
    """The error of each command, by page."""
    folder = tmp_path_factory.mktemp("reader")
    for name, text in OWN.items():
        (folder / name).write_text(text)
    (folder / "wrong.md").write_text(WRONG)
    pages = [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]
    reader = repository / "tests" / "parse_commands.py"
    done = subprocess.run(
        [sys.executable, reader, *pages, folder / "wrong.md"],
        cwd=folder,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {page.name: found[str(page)] for page in [*pages, folder / "wrong.md"]}


def test_commands_are_taken(errors):
    of_pages = {
        command: error
        for page, found in errors.items()
        for command, error in found.items()
        if page != "wrong.md"
    }
    assert len(of_pages) >= 20
    assert not [x for x in of_pages.items() if x[1]], of_pages
    unread = [command for command, error in of_pages.items() if error is None]
    assert bool(unread) == (importlib.util.find_spec("t5x") is None), unread


def test_a_wrong_command_is_not_taken(errors):
    told = list(errors["wrong.md"].values())
    assert "NO_SUCH_MACRO" in told[0]
    assert "NoSuchMeasurement" in told[1]
    assert "no_such_flag" in told[2]
    assert "set MODEL_DIR to" in told[3]
    assert told[4] in ("no run takes it", None)


def test_a_snippet_a_macro_and_a_heading_that_do_not_exist_are_found(
    repository, tmp_path
):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n```python\nx = 1\n```\n<!-- run by tests/test_no_such.py -->\n"
        "```python\ny = 2\n```\n<!-- run by tests/test_commands.py -->\n"
        "```python\nz = 3\n```\nThe macro `NO_SUCH_NAME`, "
        "[here](#a-page) and [there](#another-page).\n"
    )
    done = subprocess.run(
        [sys.executable, repository / "scripts" / "check_readme.py", page],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "is not a doctest: x = 1" in done.stderr
    assert "y = 2" not in done.stderr
    assert "tests/test_no_such.py does not exist" in done.stderr
    assert "z = 3" not in done.stderr
    assert "has NO_SUCH_NAME" in done.stderr
    assert "no heading another-page" in done.stderr
    assert "no heading a-page" not in done.stderr
