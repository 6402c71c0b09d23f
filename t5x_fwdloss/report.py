r"""The report of finished runs, rendered again without measuring.

    python -m t5x_fwdloss.report DIR                 # DIR/report.html
    python -m t5x_fwdloss.report DIR DIR [DIR ...]   # comparison.html: side by side
    python -m t5x_fwdloss.report DIR [DIR ...] --format=csv

Each DIR is the output folder of an analysis, or of a sweep, which is all of its steps;
local or in a bucket. Several runs, such as those of other losses, seeds, sizes or steps,
stand side by side in one page, with their differences from the first run against their
errors. `--format=md` writes the tables, `--format=csv` one line per number (in Python:
`analysis.records`), to standard output unless there is an `--output`.

It needs neither T5X nor an accelerator, and verifies the checksums of what it reads. The
status is 1, and nothing is written, where a folder holds no finished run, a file is
damaged, or another version wrote it in another form.
"""

import importlib
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from t5x_fwdloss import analysis
from t5x_fwdloss.analysis.measurements import Measurement
from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.report import page
from t5x_fwdloss.analysis.report.comparison import runs, side_by_side, text
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.analysis.report.terminal import encodable, print_line
from t5x_fwdloss.analysis.store import files, finished_run
from t5x_fwdloss.command_line import exit_status

FORMATS = ("html", "md", "csv")
COMPARISON = "comparison.html"


def report(
    folders: Sequence[str],
    *,
    output_format: str = "html",
    output: str = "",
    modules: Sequence[str] = (),
) -> int:
    """Renders the report of one run, or of several side by side.

    Args:
        folders: the output folders of runs or sweeps; the first run is the others'
            reference.
        output_format: a name in `FORMATS`.
        output: where it is written; '' for `report.html` in the one folder,
            `comparison.html` here for several, standard output for md and csv.
        modules: Python modules with measurements of one's own, for their figures.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: no folder is given, or two are the same.
    """
    if not folders:
        raise ValueError(
            "The output folder of an analysis must be given, or several: got none."
        )
    finished = finished_run.read_all(folders)
    found = runs.compared(finished)
    if output_format == "csv":
        return _written(text.to_csv(found), output)
    if output_format == "md":
        return _written(text.to_markdown(found), output)
    imported = [*map(_imported, modules), analysis]
    if len(found) == 1:
        (run,) = finished
        plots = {x.name: _plots(x, imported) for x in run.results}
        content = page.render(run.document, run.results, plots)
        return _written(content, output or run.path / "report.html")
    # The first run that has a measurement says how to draw it; a class that is not
    # known leaves out a figure only.
    results = {x.name: x for run in reversed(finished) for x in run.results}
    plots = {
        name: _plots(x, imported)
        for name, x in results.items()
        if _class_of(x, imported)
    }
    return _written(side_by_side.render(found, plots), output or COMPARISON)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--import must name a Python module that can be imported: got {name!r}, "
            f"and {error}."
        ) from error


def _plots(result: MeasurementResult, modules: Sequence[ModuleType]) -> Sequence[Plot]:
    """The plots of a measurement, from the class and the settings that were stored.

    Raises:
        ValueError: there is no such class, or it has no such settings.
    """
    cls = _class_of(result, modules)
    if cls is None:
        raise ValueError(
            f"{result.name} must be of a class that is known, to draw its figures: add "
            f"--import=MODULE with the module that defines {result.kind}."
        )
    try:
        inspect.signature(cls).bind(**result.settings)
    except TypeError as error:
        raise ValueError(
            f"{result.name} must have the settings that {result.kind} has in this "
            f"version, to draw its figures: {error}."
        ) from error
    return cls(**result.settings).plots()


def _class_of(result, modules) -> type[Any] | None:
    for module in modules:
        cls = getattr(module, result.kind, None)
        if isinstance(cls, type) and Measurement in cls.__mro__:
            return cls
    return None


def _written(content: str, output: files.epath.PathLike) -> int:
    if not output:
        sys.stdout.write(encodable(content, sys.stdout.encoding))
        return 0
    path = files.user_path(output)
    files.write_bytes(path, content.encode())
    print_line(f"Report: {path}")
    return 0


def attempt(folders: Sequence[str], **options) -> int:
    """Renders the report; an input that is rejected gives one sentence and status 1."""
    return exit_status.exit_status(
        "t5x_fwdloss.report", lambda: lambda: report(folders, **options), report
    )


if __name__ == "__main__":
    from absl import app, flags

    flags.DEFINE_enum("format", "html", FORMATS, "what is written.")
    flags.DEFINE_string("output", "", "the file that is written.")
    flags.DEFINE_multi_string(
        "import", [], "a Python module with measurements of your own; repeat it."
    )

    def main(argv: Sequence[str]) -> int:
        """Reads the flags and renders the report."""
        return attempt(
            argv[1:],
            output_format=flags.FLAGS.format,
            output=flags.FLAGS.output,
            modules=flags.FLAGS["import"].value,
        )

    app.run(main)
