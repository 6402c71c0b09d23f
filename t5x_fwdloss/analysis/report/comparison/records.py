"""The numbers of finished runs as records: flat dictionaries, one per number."""

from collections.abc import Sequence
from typing import Any

from etils import epath

from t5x_fwdloss.analysis.report.comparison.runs import Run, compared
from t5x_fwdloss.analysis.store import finished_run

COLUMNS = (
    *("run", "path", "step", "measurement", "kind", "matrix", "number", "value"),
    *("error", "error_kind", "interval_low", "interval_high", "unit", "converged"),
    "count",
)


def records(
    folders: epath.PathLike | Sequence[epath.PathLike],
) -> list[dict[str, Any]]:
    """Every number of finished runs, such as for `pandas.DataFrame(records(folder))`.

    A record has the keys `COLUMNS`: the run's label, folder and training step; the
    measurement's name, class and matrix; the number's name, value, error and what kind
    of error it is, confidence interval, unit, whether it converged, and the number of
    samples, steps or products behind it. What a number does not have is None; what is
    unknown is NaN.

    Args:
        folders: the output folder of a run or of a sweep, which is all of its steps
            that have results, or several folders.

    A folder without results, or a damaged one, raises `StorageError`; a folder that is
    given twice raises `ValueError`.
    """
    if isinstance(folders, str) or not isinstance(folders, Sequence):
        folders = [folders]
    return of_runs(compared(finished_run.read_all(folders)))


def of_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The records of runs, in the order of the runs and their measurements."""
    found = []
    for run in runs:
        step = run.finished.document["step"]
        for result in run.results.values():
            shared = (run.label, str(run.finished.path), step, result.name, result.kind)
            matrix = result.settings.get("matrix")
            for name, x in result.numbers.items():
                low, high = x.interval or (None, None)
                own = (name, float(x.value), x.error, x.error_kind, low, high, x.unit)
                values = (*shared, matrix, *own, x.converged, x.count)
                found.append(dict(zip(COLUMNS, values, strict=True)))
    return found
