"""TensorBoard events: of a run or a sweep at training steps, and of the training."""

import math
from collections.abc import Iterable, Mapping, Sequence

from etils import epath

from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.store import files


def scalars(results: Sequence[MeasurementResult]) -> dict[str, float]:
    """The numbers, tagged `measurement/number`, errors `measurement/number/error`."""
    found = {}
    for result in results:
        for name, number in result.numbers.items():
            found[f"{result.name}/{name}"] = number.value
            if number.error is not None:
                found[f"{result.name}/{name}/error"] = number.error
    return found


def write(path: epath.PathLike, of_steps: Mapping[int, Mapping[str, float]]) -> None:
    """Write one event file into `path`; an earlier one is removed once it is whole.

    Args:
        path: the output folder.
        of_steps: training step to tags and values; those that are not finite are left
            out.
    """
    path = epath.Path(path)
    finite = {
        step: {tag: value for tag, value in found.items() if math.isfinite(value)}
        for step, found in of_steps.items()
    }
    with files.writing(path):
        before = list(path.glob("events.out.tfevents.*"))
    if any(finite.values()):
        # Imports TensorFlow, which takes seconds, so only when events are written.
        from clu import metric_writers

        with files.writing(path):
            path.mkdir(parents=True, exist_ok=True)
            writer = metric_writers.SummaryWriter(str(path))
            for step, found in finite.items():
                writer.write_scalars(step, found)
            writer.close()
    for earlier in before:
        files.remove(earlier)


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
