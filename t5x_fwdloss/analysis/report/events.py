"""TensorBoard events: those of a run at its training step, and those of the training."""

import math
from collections.abc import Iterable, Sequence

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


def read(folders: Iterable[epath.Path], prefix: str) -> dict[str, dict[int, float]]:
    """The scalars in the event files of a training run: name to step to value.

    Of a step that was trained twice, by a run that resumed, the later value is kept. A
    file ends where it is damaged: a run that was killed leaves half a record.

    Args:
        folders: are searched in this order; they need not exist.
        prefix: of the tags that are read; the names are the rest of them.
    """
    paths = [
        path
        for folder in folders
        for path in sorted(folder.glob("events.out.tfevents.*"))
    ]
    found: dict[str, dict[int, float]] = {}
    if not paths:
        return found
    import tensorflow as tf  # takes seconds

    for path in paths:
        try:
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.tag.startswith(prefix):
                        of_name = found.setdefault(value.tag.removeprefix(prefix), {})
                        of_name[event.step] = float(tf.make_ndarray(value.tensor))
        except tf.errors.DataLossError:
            continue
    return found
