"""One checkpoint or a sweep over several, as `CHECKPOINT_STEPS` says: for both hosts."""

from collections.abc import Sequence
from typing import Any

from t5x_fwdloss.analysis import optimizer as optimizer_lib
from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.run import run_analysis
from t5x_fwdloss.analysis.sweep import steps as checkpoint_steps
from t5x_fwdloss.analysis.sweep.sweep import Load, run_sweep


def run_one_or_all(
    objective: Objective,
    load: Load,
    *,
    path: Any,
    steps: checkpoint_steps.CheckpointSteps | None,
    learning_rate: optimizer_lib.LearningRate | None,
    follow_until: int | None,
    measurements: Sequence[Any],
    **settings: Any,
) -> int:
    """The exit status of `run_analysis` or of `run_sweep`.

    Args:
        objective: the loss over the fixed list of batches.
        load: restores a checkpoint.
        path: the checkpoint, or the model folder of a sweep.
        steps: the steps of a sweep; None: one checkpoint.
        learning_rate: as of `run_sweep`.
        follow_until: as of `run_sweep`.
        measurements: what to measure, in order.
        **settings: as of both.
    """
    settings["measurements"] = measurements
    if steps is None:
        params, host = load(path)
        return run_analysis(objective, params, host=host, **settings)
    return run_sweep(
        objective,
        load,
        model_dir=path,
        steps=steps,
        learning_rate=learning_rate,
        follow_until=follow_until,
        **settings,
    )
