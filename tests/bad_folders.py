"""Damages results folders of a tiny run, and starts the same run again; by hypothesis.

    python bad_folders.py [NUMBER_OF_EXAMPLES [MEASUREMENT ...]]

The run ends with the numbers of the undamaged one, or with one sentence and status 1.
What ends otherwise raises.
"""

import contextlib
import io
import json
import pathlib
import re
import shutil
import sys
import tempfile

import damage
import hypothesis
from analysis import runs
from analysis.test_killed_anywhere import MEASUREMENTS, DenseContext
from hypothesis import strategies as st
from stops import Killed

from t5x_fwdloss.analysis import Trace, run_analysis
from t5x_fwdloss.analysis.measurements import Context
from t5x_fwdloss.analysis.objective import preflight
from t5x_fwdloss.analysis.report import page
from t5x_fwdloss.command_line.exit_status import exit_status

FIRST = Trace(name="first", num_probes=2, block_size=2)
OBJECTIVE = runs.objective()
# What is drawn and which products are kept are tested elsewhere.
preflight.check_objective = lambda *_, **__: []
page.render = lambda *_: "the page"
Context.product = DenseContext.product


def command(path, name):
    """The run as a command: status, standard error, standard output."""
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        status = exit_status("analyze", lambda: lambda: run(path, name), run_analysis)
    return status, said.getvalue(), shown.getvalue()


def run(path, name):
    """The first measurement and one more."""
    listed = [FIRST, MEASUREMENTS[name]]
    return runs.run(path, objective=OBJECTIVE, measurements=listed, save_seconds=0)


def leave_unfinished(path, name):
    """Kills the run after the second state that the last measurement saved.

    Raises:
        AssertionError: it ended before.
    """
    count, step = [], Context.step

    def killed_at(self, save=None):
        step(self, save)
        if save is not None:
            count.append(1)
            if len(count) == 3:  # the first measurement saves once
                raise Killed

    Context.step = killed_at
    try:
        run(path, name)
    except Killed:
        return
    finally:
        Context.step = step
    raise AssertionError(f"{name} was not killed")


def numbers(shown):
    """The table without its times."""
    return re.sub(r" \([\d.]+ s\)|Report: .*|This run was .*", "", shown).strip()


def made(root, names):
    """Folders of these runs, finished and not, and the tables that they print."""
    tables = {}
    for name in names:
        leave_unfinished(root / f"unfinished_{name}", name)
        status, said, _ = command(root / f"finished_{name}", name)
        assert (status, said) == (0, ""), said
        tables[name] = numbers(command(root / f"finished_{name}", name)[2])
    return tables


def check(root, tables):
    """The law, of one example after the other."""

    @hypothesis.given(data=st.data())
    def answered_by_a_sentence_or_the_same_numbers(data):
        name = data.draw(st.sampled_from(sorted(tables)))
        state = data.draw(st.sampled_from(["finished", "unfinished"]))
        path = root / "here"
        if path.is_symlink() or path.exists():
            damage.remove(path)
        shutil.copytree(root / f"{state}_{name}", path)
        for _ in range(data.draw(st.integers(1, 2))):
            if path.is_dir():
                hypothesis.note(data.draw(damage.of_folder(path, top=True)))
        before = damage.contents_of(path) if path.is_dir() else {}
        status, said, shown = command(path, name)
        hypothesis.note(f"{name} {state}: {said}")
        COUNTS[status] = COUNTS.get(status, 0) + 1
        if status:
            assert status == 1
            assert re.fullmatch(r"analyze: [^\n]{10,600}\n", said), said
            assert not re.search(r"Error\b|expected|subscript|object", said), said
            if state == "finished":
                after = damage.contents_of(path) if path.is_dir() else {}
                assert after == before
        else:
            hypothesis.note(numbers(shown))
            assert numbers(shown) == tables[name]
            assert not {x for x in damage.contents_of(path) if ".part" in x} - {*before}
            assert json.loads((path / "results.json").read_text())

    return answered_by_a_sentence_or_the_same_numbers


COUNTS: dict[int, int] = {}


def main(examples, *names):
    """Makes the folders, damages them, says how runs ended."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        damage.run(check(root, made(root, names or MEASUREMENTS)), examples)
    sys.stdout.write(f"answered {COUNTS}\n")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["30"]))
