"""One analysis run: check, measure, report; resumed where it stopped, whole or not at all.

The order is fixed: everything that can be rejected without compiling is rejected first;
then the run checks itself; then it measures; then it writes. Non-convergence is a
result. A NaN or an infinity ends one measurement, not the run, but shows in its exit
status. Where the same run has finished before, its folder is left as it is.
"""

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging
from jaxtyping import PyTree

from t5x_fwdloss import progress
from t5x_fwdloss.analysis import measurement_list, preemption
from t5x_fwdloss.analysis import settings as settings_lib
from t5x_fwdloss.analysis.measurements.context import (
    SAVE_SECONDS,
    Context,
    Measurement,
)
from t5x_fwdloss.analysis.numbers import (
    Failure,
    MeasurementResult,
    result_from_json,
    result_to_json,
    to_json,
)
from t5x_fwdloss.analysis.objective import matrices, parameters, preflight
from t5x_fwdloss.analysis.objective.finite import (
    NegativeCurvatureError,
    NonFiniteLossError,
    check_finite,
    largest_magnitudes,
)
from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.analysis.plan import start as plan
from t5x_fwdloss.analysis.report import (
    environment,
    events,
    model_facts,
    page,
    training,
)
from t5x_fwdloss.analysis.report.terminal import print_line, print_table
from t5x_fwdloss.analysis.store import files, finished_run, identity
from t5x_fwdloss.analysis.store.checksum import checksum
from t5x_fwdloss.analysis.store.folder import RunFolder
from t5x_fwdloss.curvature import NonFiniteError
from t5x_fwdloss.curvature.vectors import trees


@dataclasses.dataclass(frozen=True)
class HostInfo:
    """The host's information about the run.

    Attributes:
        checkpoint: path of the checkpoint that was restored.
        step: its training step.
        mesh: the device mesh, if there is one.
        load_params: path of another checkpoint to its parameters, laid out alike.
        load_preconditioner: loads the preconditioner of the checkpoint's optimizer.
        is_primary: whether this process writes; by default JAX's process 0.
        config_text: the run's configuration, kept as `config.gin`.
        task: name of the task or mixture that the batches come from.
        optimizer: the name of the optimizer that trained the checkpoint.
    """

    checkpoint: str = ""
    step: int | None = None
    mesh: Any = None
    load_params: Callable[[str], PyTree] | None = None
    load_preconditioner: Callable[[], Preconditioner] | None = None
    is_primary: bool | None = None
    config_text: str = ""
    task: str = ""
    optimizer: str = ""

    @property
    def primary(self) -> bool:
        """Whether this process writes."""
        return jax.process_index() == 0 if self.is_primary is None else self.is_primary


def run_analysis(
    objective: Objective,
    params: PyTree,
    *,
    measurements: Sequence[Any],
    output_dir: settings_lib.Path,
    seed: settings_lib.Seed = 0,
    host: HostInfo | None = None,
    memory_budget: settings_lib.Bytes | None = None,
    fold: bool = True,
    save_seconds: settings_lib.Count = SAVE_SECONDS,
    eigenvectors_dir: settings_lib.Path | None = None,
    device_memory: settings_lib.Bytes | None = None,
) -> int:
    """Measure, and leave `results.json`, arrays, report, configuration and events.

    Args:
        objective: the loss over the fixed list of batches.
        params: the checkpoint's parameters, on their mesh.
        measurements: what to measure, in order; names must differ.
        output_dir: a new or empty folder, or that of this same run, which then resumes;
            if it has finished, nothing is measured and nothing written.
        seed: seed of every random number, together with its purpose.
        host: the host's information about the run.
        memory_budget: bytes per device that linearized products may take; None: half of
            the free memory; 0: everything is differentiated anew for each vector.
        fold: whether to rewrite linearized products to read less memory.
        save_seconds: seconds between two saved states of a measurement; a killed run
            resumes from the last, one that SIGTERM stops where it was.
        eigenvectors_dir: a folder for the eigenvectors that a measurement finds and does
            not save itself; None: they are dropped.
        device_memory: bytes of a device: a measurement that takes more is rejected once
            the first products are compiled; None: they are not known.

    Invalid input raises `ValueError`, if possible before anything is compiled.

    Returns:
        The exit status: 0, 1 where a measurement met a NaN, an infinity, or a negative
        product with a matrix that is positive semidefinite, or 143 where SIGTERM stopped
        the run, in this process or another: the same call resumes it.
    """
    measurement_list.check("measurements", measurements)
    settings_lib.check_arguments(run_analysis, locals())
    measurement_list.check_groups(measurements, params)
    host = host or HostInfo()
    names = [measurement.name for measurement in measurements]
    # Absolute: the saved state of long work, written by Orbax, must have such a path.
    folder = RunFolder(files.user_path(output_dir), host.primary)
    others = _OtherCheckpoints(host.load_params)
    context = Context(
        objective=objective,
        params=parameters.placed(parameters.widened(params)),
        seed=seed,
        load_params=host.load_params and others.load,
        state_path=folder.state_path,
        is_primary=host.primary,
        memory_budget=memory_budget,
        fold=fold,
        save_seconds=save_seconds,
        load_preconditioner=host.load_preconditioner,
        vectors_path=folder.vectors_path,
        eigenvectors_dir=(
            None if eigenvectors_dir is None else files.user_path(eigenvectors_dir)
        ),
    )
    for measurement in measurements:
        measurement.validate(context)
        # Later measurements may read these.
        context.vectors = {
            **context.vectors,
            measurement.name: measurement.num_vectors,
        }
    fingerprint = identity.of_settings(
        objective,
        measurements,
        seed=seed,
        checkpoint=host.checkpoint,
        step=host.step,
        other_checkpoints=others.checksums,
    )
    fingerprint |= identity.of_preconditioner(context.loaded_preconditioner)
    folder.check(fingerprint)
    _check_parameters(context)
    needing = [m.name for m in measurements if m.needs_forward_mode]
    forward = preflight.has_forward_mode(
        objective, context.params, "".join(needing[:1])
    )
    loss_value = preflight.loss_value(objective, context.params, forward=forward)
    fingerprint |= identity.of_network(objective, context.params, loss_value)
    folder.check(fingerprint)
    document = folder.document()
    if document is not None:
        return _finished_before(folder, document, names)
    with preemption.listening(), folder.claimed(fingerprint):
        try:
            model = model_facts.describe(objective.model, params)
            return _run(
                folder,
                context,
                host,
                measurements,
                fingerprint,
                forward,
                model,
                device_memory,
            )
        except preemption.Preempted:
            logging.error(
                "Stopped by SIGTERM: what was measured is saved in %s; start the same "
                "command again to resume.",
                folder.path,
            )
            return preemption.STATUS


def _run(
    folder, context, host, measurements, fingerprint, forward, model, device_memory
) -> int:
    start = time.monotonic()
    context.step()
    labels_outside = _num_labels_outside(context)
    kept = {m.name: folder.finished(m.name) for m in measurements}
    checks = []
    pending = [m for m in measurements if kept[m.name] is None]
    if pending:
        matrix = next(filter(None, (m.first_matrix for m in pending)), None)
        with progress.stage(
            "Compiling and checking the loss and its derivatives",
            is_primary=host.primary,
        ):
            timed = plan.Timed(context.product(matrix)) if matrix else None
            checks = preflight.check_objective(
                context.objective,
                context.params,
                context.key("preflight"),
                value=fingerprint["loss_value"],
                matrix=matrices.WORDS.get(matrix or "", ""),
                product=timed,
                forward=forward,
            )
        if matrix and timed:
            plan.announce(context, pending, matrix, timed, device_memory)
        timed = None  # it would hold the residuals beside those of the next matrix
    outcomes = [
        kept[measurement.name] or _measure(measurement, context, folder)
        for measurement in measurements
    ]
    checks = checks + context.checks
    document = _document(context, host, outcomes, checks, fingerprint)
    document["model"] = model
    document["num_labels_outside_vocabulary"] = labels_outside
    document["seconds"] = time.monotonic() - start
    plots = {m.name: m.plots() for m in measurements}
    return _finish(folder, document, outcomes, plots, host)


def _finished_before(folder, document, names) -> int:
    results = [folder.finished(name) for name in names]
    folder.clear()
    if folder.is_primary:
        print_table(document, results, folder.path / "report.html")
        when = document.get("finished_at", "a day that it does not say")
        print_line(f"This run was finished on {when}: nothing measured.")
    return 0


class _OtherCheckpoints:
    """The loader of other checkpoints, which notes what was in them."""

    def __init__(self, load):
        self._load = load
        self.checksums: dict[str, str] = {}

    def load(self, path):
        params = self._load(path)
        self.checksums[path] = checksum(parameters.widened(params))
        return params


def _check_parameters(context) -> None:
    largest = largest_magnitudes(trees.float_part(context.params))
    check_finite("every parameter", [("the checkpoint", largest)])


def _num_labels_outside(context) -> int | None:
    found = context.objective.num_labels_outside(context.params)
    if found and context.is_primary:
        logging.warning(
            "%d of %d labels that count are outside of the network's vocabulary: the "
            "loss has no target for them.",
            found,
            context.objective.num_tokens,
        )
    return found


def _measure(
    measurement: Measurement, context: Context, folder: RunFolder
) -> MeasurementResult | Failure:
    start = time.monotonic()
    context.step()
    try:
        found = measurement.run(context)
    except (NonFiniteLossError, NonFiniteError, NegativeCurvatureError) as error:
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


def _document(context, host, outcomes, checks, fingerprint) -> dict[str, Any]:
    objective = context.objective
    failed = any(isinstance(outcome, Failure) for outcome in outcomes)
    return {
        "schema_version": finished_run.SCHEMA_VERSION,
        "status": "failed" if failed else "finished",
        "finished_at": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "checkpoint": host.checkpoint,
        "step": host.step,
        "task": host.task,
        "seed": context.seed,
        "loss": objective.loss_record,
        "normalizer": {
            "kind": objective.normalizer.kind,
            "W": objective.W,
            "unit": objective.normalizer.unit,
            "words": objective.normalizer.words,
        },
        "num_tokens": objective.num_tokens,
        "num_batches": len(objective.batches) // objective.num_microbatches,
        "batch_shapes": {
            name: [len(x) * objective.num_microbatches, *x.shape[1:]]
            for name, x in objective.batches[0].items()
        },
        "batches_hash": objective.batches_hash,
        "dropout_seed": objective.dropout_seed,
        "matmul_precision": objective.precision,
        "activation_dtype": fingerprint["activation_dtype"],
        "parameters_checksum": fingerprint["parameters"],
        "loss_value": fingerprint["loss_value"],
        "optimizer": host.optimizer,
        "num_parameters": trees.dimension(context.params),
        "parameters_left_out": trees.left_out(context.params),
        "environment": environment.describe(host.mesh),
        "products": context.products,
        "preflight": [to_json(check) for check in checks],
        "measurements": [_entry(outcome) for outcome in outcomes],
        "fingerprint": fingerprint,
    }


def _entry(outcome) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        matrix = outcome.settings.get("matrix")
        return to_json(outcome) | {"matrix": matrix, "status": "failed"}
    return result_to_json(outcome)


def _finish(folder, document, outcomes, plots, host) -> int:
    results = [x for x in outcomes if isinstance(x, MeasurementResult)]
    failures = [x for x in outcomes if isinstance(x, Failure)]
    if host.primary:
        document["training"] = training.record(host.checkpoint)
        # As the files hold it, so that the report can be rendered again from them.
        document = to_json(document)
        results = [result_from_json(result_to_json(x), x.arrays) for x in results]
        text = page.render(document, results, plots)
        other = {"report.html": text.encode(), "config.gin": host.config_text.encode()}
        events.write(folder.path, {host.step or 0: events.scalars(results)})
        folder.complete(document, other)
        print_table(document, results, folder.path / "report.html")
    for failure in failures:
        logging.error("%s did not finish: %s", failure.name, failure.reason)
    return 1 if failures else 0
