"""TensorBoard events: every number of a run at its training step."""

import math
from collections.abc import Sequence

from etils import epath

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.store import files


def write(
    path: epath.PathLike, results: Sequence[MeasurementResult], step: int
) -> None:
    """Write one event file into `path`, replacing an earlier one.

    Args:
        path: the output folder.
        results: the measurements; a number is tagged `measurement/number`, its error
            `measurement/number/error`.
        step: the checkpoint's training step, so that a sweep over checkpoints of one
            run draws curves.
    """
    scalars = {}
    for result in results:
        for name, number in result.numbers.items():
            scalars[f"{result.name}/{name}"] = number.value
            if number.error is not None:
                scalars[f"{result.name}/{name}/error"] = number.error
    path = epath.Path(path)
    for earlier in path.glob("events.out.tfevents.*"):
        files.remove(earlier)
    finite = {tag: value for tag, value in scalars.items() if math.isfinite(value)}
    if not finite:
        return
    # Imports TensorFlow, which takes seconds, so only when events are written.
    from clu import metric_writers

    with files.writing(path):
        path.mkdir(parents=True, exist_ok=True)
        writer = metric_writers.SummaryWriter(str(path))
        writer.write_scalars(step, finite)
        writer.close()
