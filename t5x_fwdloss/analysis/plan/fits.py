"""Whether a run fits the memory of a device, and the one setting to change if not."""

import dataclasses
from collections.abc import Iterator

import jax

from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.plan import plan
from t5x_fwdloss.analysis.plan.plan import Planned, Row
from t5x_fwdloss.analysis.plan.words import size

# The chunk length to try first: much shorter ones save little more.
CHUNK_LENGTH = 32


def refusal(planned: Planned, rows: list[Row]) -> str | None:
    """Why a run cannot fit, with the sizes and one setting that makes it fit.

    Every suggestion is planned as the run itself was; what it takes is compiled.

    Args:
        planned: the run.
        rows: its rows.

    Returns:
        One sentence; None if it fits, or if the memory of a device is not known.
    """
    limit, worst = planned.device_bytes, largest(rows)
    if limit is None or worst.total <= limit:
        return None
    sentence = (
        f"The run must fit the {size(limit)} of a device: {worst.name} takes "
        f"{size(worst.total)} per device ({size(worst.parameters)} of parameters and "
        f"batches, {size(worst.residuals)} of kept residuals, {size(worst.basis)} of "
        f"basis, {size(worst.temporaries)} of temporaries); "
    )
    # No setting changes what the parameters take.
    changes = _changes(planned, worst) if worst.parameters < limit else ()
    for setting, other in changes:
        most = largest(plan.rows(other)).total
        if most <= limit:
            return f"{sentence}with {setting} it takes {size(most)}."
    return (
        f"{sentence}no single setting is enough: take more devices, more model "
        "partitions, or shorter sequences."
    )


def largest(rows: list[Row]) -> Row:
    """The row with the most bytes."""
    return max(rows, key=lambda row: row.total)


def _changes(planned: Planned, worst: Row) -> Iterator[tuple[str, Planned]]:
    """Runs with one setting changed, those that cost the least time first."""
    assert planned.device_bytes is not None
    if worst.residuals:
        room = planned.device_bytes - (worst.total - worst.residuals)
        for budget in [room] * (room > 0) + [0]:
            other = dataclasses.replace(planned, memory_budget=budget)
            yield f"MEMORY_BUDGET = {budget}", other
    for number, measurement in enumerate(planned.measurements):
        if measurement.name != worst.name:
            continue
        for setting, lighter in measurement.lighter():
            others = list(planned.measurements)
            others[number] = lighter
            yield setting, dataclasses.replace(planned, measurements=others)
    objective = planned.objective
    chosen = objective.loss_settings
    if objective.model is None or chosen is None:
        return
    if chosen.chunk_length is None:
        other = objective.with_loss(chosen.impl, CHUNK_LENGTH)
        if _has_chunks(other, planned.wide):
            yield (
                f"LOSS_CHUNK_LENGTH = {CHUNK_LENGTH}",
                dataclasses.replace(planned, objective=other),
            )
    for factor, other in _microbatches(objective):
        number = objective.num_microbatches * factor
        yield (
            f"NUM_MICROBATCHES = {number}",
            dataclasses.replace(
                planned,
                objective=other,
                num_batches=planned.num_batches * objective.num_microbatches,
            ),
        )


def _has_chunks(objective: Objective, params) -> bool:
    """Whether the network's head can be computed chunk by chunk; traces the loss."""
    try:
        jax.eval_shape(objective.batch_loss, params, *next(objective.pairs()))
    except ValueError:  # `head_capture` rejects the network
        return False
    return True


def _microbatches(objective: Objective) -> Iterator[tuple[int, Objective]]:
    """The objective with its pieces cut further, as far as the mesh divides them."""
    if objective.dropout_seed is not None:
        return
    piece = objective.batches[0]
    length = min(len(x) for x in piece.values())
    factor = 2
    while length % factor == 0 and all(_divides(x, factor) for x in piece.values()):
        other = Objective.from_model(
            objective.model,
            [piece],
            num_microbatches=factor,
            precision=objective.precision,
        )
        yield factor, other
        factor *= 2


def _divides(x, factor) -> bool:
    """Whether the batch's sharding divides a piece of it."""
    try:
        x.sharding.shard_shape((len(x) // factor, *x.shape[1:]))
    except ValueError:
        return False
    return True
