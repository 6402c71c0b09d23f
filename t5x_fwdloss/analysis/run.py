"""One analysis run: check, measure, report; resumed where it was, whole or not at all.

The order is fixed: everything that can be refused without compiling is refused first;
then the run checks itself; then it measures; then it writes. 'Not converged' is a
result. A NaN or an infinity ends one measurement, not the run, but its exit status.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath
from jaxtyping import PyTree

from t5x_fwdloss.analysis import environment, events, parameters, preflight, report
from t5x_fwdloss.analysis.finite import NonFiniteLossError
from t5x_fwdloss.analysis.folder import RunFolder
from t5x_fwdloss.analysis.measurements.context import Context, Measurement
from t5x_fwdloss.analysis.numbers import MeasurementResult, result_to_json, to_json
from t5x_fwdloss.analysis.objective import Objective
from t5x_fwdloss.analysis.table import print_table
from t5x_fwdloss.curvature import NonFiniteError, trees


@dataclasses.dataclass(frozen=True)
class HostInfo:
    """What the program around the run knows of it.

    Attributes:
        checkpoint: path of the checkpoint that was restored.
        step: its training step.
        mesh: the device mesh, if there is one.
        load_params: path of another checkpoint to its parameters, laid out alike.
        load_second_moment: the second moment in the state of the checkpoint's optimizer,
            a tree like the parameters.
        is_primary: whether this process writes; by default JAX's process 0.
        config_text: the run's configuration, kept as `config.gin`.
        task: name of the task or mixture that the batches come from.
    """

    checkpoint: str = ""
    step: int | None = None
    mesh: Any = None
    load_params: Callable[[str], PyTree] | None = None
    load_second_moment: Callable[[], PyTree] | None = None
    is_primary: bool | None = None
    config_text: str = ""
    task: str = ""

    @property
    def primary(self) -> bool:
        """Whether this process writes."""
        return jax.process_index() == 0 if self.is_primary is None else self.is_primary


def run_analysis(
    objective: Objective,
    params: PyTree,
    *,
    measurements: Sequence[Any],
    output_dir: epath.PathLike,
    seed: int = 0,
    host: HostInfo | None = None,
    memory_budget: int | None = None,
) -> int:
    """Measure, and leave `results.json`, arrays, report, configuration and events.

    Args:
        objective: the loss over the fixed list of batches.
        params: the checkpoint's parameters, on their mesh.
        measurements: what to measure, in order; names must differ.
        output_dir: a new folder, or that of this same run, which then goes on.
        seed: what every random number depends on, with its purpose.
        host: what the program around the run knows.
        memory_budget: bytes a device that linearized products may take; None: half of
            what is free; 0: everything is differentiated anew for each vector.

    Returns:
        The exit status: 0, or 1 where a measurement met a NaN or an infinity.

    Raises:
        ValueError: something cannot work; raised before anything is compiled.
    """
    host = host or HostInfo()
    # Absolute: the saved state of long work, written by Orbax, must have such a path.
    folder = RunFolder(epath.Path(output_dir).resolve(), host.primary)
    context = Context(
        objective=objective,
        params=parameters.widened(params),
        seed=seed,
        load_params=host.load_params,
        state_path=folder.state_path,
        is_primary=host.primary,
        memory_budget=memory_budget,
        load_second_moment=host.load_second_moment,
        vectors_path=folder.vectors_path,
    )
    names = [measurement.name for measurement in measurements]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            "measurements must be a list of at least one, each with its own name: got "
            f"{', '.join(names) or 'none'}."
        )
    for measurement in measurements:
        measurement.validate(context)
        # What the later ones may read.
        count = getattr(measurement, "num_vectors", 0)
        context.vectors = {**context.vectors, measurement.name: count}
    start = time.monotonic()
    folder.open(fingerprint(objective, measurements, seed, host))
    needing = [m.name for m in measurements if getattr(m, "needs_forward_mode", False)]
    forward = preflight.has_forward_mode(
        objective, context.params, "".join(needing[:1])
    )
    kept = {name: folder.finished(name) for name in names}
    checks = []
    if None in kept.values():
        checks = preflight.check_objective(
            objective,
            context.params,
            context.key("preflight"),
            product=context.product("hessian"),
            forward=forward,
        )
    outcomes = [
        kept[measurement.name] or _measure(measurement, context, folder)
        for measurement in measurements
    ]
    document = _document(context, host, outcomes, checks, measurements)
    document["seconds"] = time.monotonic() - start
    return _finish(folder, document, outcomes, host)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A measurement that was stopped by a number that is not finite."""

    name: str
    kind: str
    settings: dict[str, Any]
    reason: str


def fingerprint(
    objective: Objective, measurements: Sequence[Any], seed: int, host: HostInfo
) -> dict[str, Any]:
    """What makes two runs the same run: the mesh and the machine are not in it."""
    return {
        "checkpoint": host.checkpoint,
        "step": host.step,
        "batches": objective.batches_hash,
        "seed": seed,
        "loss": objective.settings,
        "normalizer": {"kind": objective.normalizer_kind, "W": objective.W},
        "dropout_seed": objective.dropout_seed,
        "precision": objective.precision,
        "measurements": [
            {"kind": type(m).__name__, **dataclasses.asdict(m)} for m in measurements
        ],
    }


def _measure(
    measurement: Measurement, context: Context, folder: RunFolder
) -> MeasurementResult | Failure:
    start = time.monotonic()
    try:
        found = measurement.run(context)
    except (NonFiniteLossError, NonFiniteError) as error:
        logging.error("%s was stopped: %s", measurement.name, error)
        return Failure(
            measurement.name,
            type(measurement).__name__,
            dataclasses.asdict(measurement),  # pyright: ignore[reportArgumentType]
            str(error),
        )
    found = dataclasses.replace(found, seconds=time.monotonic() - start)
    folder.keep(found)
    return found


def _document(context, host, outcomes, checks, measurements) -> dict[str, Any]:
    objective = context.objective
    failed = any(isinstance(outcome, Failure) for outcome in outcomes)
    return {
        "status": "failed" if failed else "finished",
        "checkpoint": host.checkpoint,
        "step": host.step,
        "task": host.task,
        "seed": context.seed,
        "loss": objective.settings,
        "normalizer": {
            "kind": objective.normalizer_kind,
            "W": objective.W,
            "unit": objective.normalizer.unit,
            "words": objective.normalizer.words,
        },
        "num_tokens": objective.num_tokens,
        "num_batches": len(objective.batches),
        "batch_shapes": {
            name: list(x.shape) for name, x in objective.batches[0].items()
        },
        "batches_hash": objective.batches_hash,
        "dropout_seed": objective.dropout_seed,
        "matmul_precision": objective.precision,
        "num_parameters": trees.dimension(context.params),
        "parameters_left_out": trees.left_out(context.params),
        "environment": environment.describe(host.mesh),
        "products": context.products,
        "preflight": [to_json(check) for check in checks],
        "measurements": [_entry(outcome) for outcome in outcomes],
        "fingerprint": fingerprint(objective, measurements, context.seed, host),
    }


def _entry(outcome) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return to_json(outcome) | {"status": "failed"}
    return result_to_json(outcome)


def _finish(folder, document, outcomes, host) -> int:
    results = [x for x in outcomes if isinstance(x, MeasurementResult)]
    failures = [x for x in outcomes if isinstance(x, Failure)]
    if host.primary:
        page = report.render(document, results)
        other = {"report.html": page.encode(), "config.gin": host.config_text.encode()}
        events.write(folder.path, results, host.step or 0)
        folder.complete(document, other)
        print_table(document, results, folder.path / "report.html")
    for failure in failures:
        logging.error("%s did not finish: %s", failure.name, failure.reason)
    return 1 if failures else 0
