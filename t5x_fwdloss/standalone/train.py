"""Trains the standalone model: SeqIO data, an optax optimizer, orbax checkpoints.

    python -m t5x_fwdloss.standalone.train \
      --gin_file=t5x_fwdloss/configs/standalone/train.gin \
      --gin_file=t5x_fwdloss/configs/standalone/tiny.gin \
      --gin.MODEL_DIR="'/tmp/g2p'"

A run that was stopped resumes from its last checkpoint and ends with the same numbers:
the order of the batches depends on a seed alone, a step's dropout key on its number.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from clu import metric_writers

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.objective import finite
from t5x_fwdloss.analysis.objective.finite import NonFiniteLossError
from t5x_fwdloss.analysis.store import files, lock
from t5x_fwdloss.curvature.vectors import probes, trees
from t5x_fwdloss.progress import Progress
from t5x_fwdloss.standalone import checkpoints, data, hugging_face, probing
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.training import chosen, forward_gradient
from t5x_fwdloss.training import probes as training_probes
from t5x_fwdloss.training.largest_eigenvalue import HESSIAN, Matrix

RUN_FILE = "t5x_fwdloss/configs/standalone/train.gin"
REQUIRED_MACROS = {
    "MODEL": "the file of a model",
    "MODEL_DIR": "--gin.MODEL_DIR=\"'/my/model'\"",
}
# Arguments whose macros are not their names in capitals.
MACROS = {
    "total_steps": "TRAIN_STEPS",
    "learning_rate": "LEARNING_RATE_FN",
    "eigenvalue_products": "CURVATURE_EIGENVALUE_PRODUCTS",
    "eigenvalue_matrices": "CURVATURE_EIGENVALUE_MATRICES",
    "noise_pieces": "CURVATURE_NOISE_PIECES",
    "forward_parameters": chosen.PARAMETERS,
    "forward_directions": forward_gradient.DIRECTIONS,
    "forward_distribution": forward_gradient.DISTRIBUTION,
}


def train(
    *,
    model: StandaloneModel,
    optimizer: optax.GradientTransformation,
    dataset: data.DatasetConfig,
    model_dir: settings.Words,
    total_steps: settings.Positive,
    eval_period: settings.Positive,
    num_eval_batches: settings.Positive,
    checkpoint_period: settings.Positive,
    keep_checkpoints: settings.Positive | None = None,
    seed: settings.Seed = 0,
    train_split: settings.Words = "train",
    eval_split: settings.Words = "validation",
    curvature_period: settings.Positive | None = None,
    eigenvalue_products: settings.Count = 0,
    eigenvalue_matrices: Sequence[Matrix] = (HESSIAN,),
    noise_pieces: settings.Several | None = None,
    probe_mixture: settings.Words | None = None,
    learning_rate: probing.LearningRate | None = None,
    initial_checkpoint_path: settings.Path | None = None,
    forward_parameters: settings.Pattern | None = None,
    forward_directions: settings.Positive = 1,
    forward_distribution: forward_gradient.Distribution = "normal",
    config_text: str = "",
) -> dict[str, float]:
    """Trains up to `total_steps`; returns the validation metrics at the end.

    Args:
        model: the network and its loss.
        optimizer: the optimizer, with its learning rate schedule.
        dataset: the data of training and validation.
        model_dir: folder of checkpoints, TensorBoard events and `config.gin`; a run
            that finds checkpoints there resumes from the last.
        total_steps: number of steps, those of earlier runs in `model_dir` included.
        eval_period: steps between two validations; one more comes at the end.
        num_eval_batches: batches of the validation split, always the same.
        checkpoint_period: steps between two checkpoints; one more comes at the end.
        keep_checkpoints: how many of the latest checkpoints to keep; None for all.
        seed: seed of the parameters and of dropout.
        train_split: split to train on.
        eval_split: split to validate on.
        curvature_period: steps from one probe of the curvature along an update to the
            next; None means no probes.
        eigenvalue_products: Lanczos steps of a probe for the largest eigenvalue of each
            matrix; 0 leaves it out.
        eigenvalue_matrices: "hessian", "preconditioned_hessian" or both.
        noise_pieces: equal pieces of a batch whose gradients a probe compares for the
            gradient noise scale; None leaves it out.
        probe_mixture: a task whose first batch of the training split is measured along
            the same updates, without dropout.
        learning_rate: the optimizer's learning rate or schedule, for the sharpness.
        initial_checkpoint_path: a checkpoint whose parameters a new run begins with, at
            step 0; None draws them.
        forward_parameters: trains the parameters whose path matches this regular
            expression alone, by forward gradients; None trains all by reverse mode.
        forward_directions: directions per step of a forward gradient.
        forward_distribution: of a direction's entries, "normal" or "rademacher".
        config_text: the gin configuration, written to `model_dir`.

    Raises:
        ValueError: bad input, named before anything is compiled.
    """
    settings.check_arguments(train, locals(), macros=MACROS)
    checkpoints.check_place(model_dir)
    key = probes.as_key(seed)
    data.check_vocabulary(dataset, model.vocab_size)
    if initial_checkpoint_path is not None:
        hugging_face.check_network(str(initial_checkpoint_path), model.module)
    if curvature_period is not None:
        probing.check(model, optimizer, learning_rate)
        _check_pieces(noise_pieces, dataset.batch_size)
    forward = None
    if forward_parameters is not None:
        training_probes.check_forward_mode(model.loss_settings, forward_gradient.NEEDS)
        moving = chosen.Chosen(forward_parameters)
        forward = Forward(moving, forward_directions, forward_distribution)
    eval_batches = data.fixed_batches(dataset, eval_split, num_eval_batches)
    measured = probing.quantities(
        model,
        eigenvalue_products=eigenvalue_products,
        eigenvalue_matrices=eigenvalue_matrices,
        noise_pieces=noise_pieces,
        mixture=probe_mixture or "",
        batch=_probe_batch(dataset, train_split, probe_mixture, model.vocab_size),
    )
    train_step, eval_step = compiled_steps(model, optimizer, forward)
    folder = files.user_path(model_dir)
    with contextlib.ExitStack() as stack:
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            stack.enter_context(lock.held(folder / ".lock", folder))
        manager = checkpoints.open_manager(model_dir, keep_checkpoints)
        stack.callback(manager.close)
        first = manager.latest_step() or 0
        if first > total_steps:
            raise ValueError(
                "TRAIN_STEPS must be at least the step of the latest checkpoint: got "
                f"{total_steps}, and {model_dir} holds checkpoint_{first}."
            )
        params = jax.jit(model.get_initial_params)(key, eval_batches[0])
        if forward is not None:
            forward.chosen.check(params)
        state = optimizer.init(params if forward is None else forward.pick(params))
        if initial_checkpoint_path is not None and not first:
            path = str(initial_checkpoint_path)
            params = checkpoints.restore_params(path, params)[1]
        if first:
            params = checkpoints.restore_params(model_dir, params)[1]
            state = checkpoints.restore_optimizer(model_dir, state)
            _check_restored(params, state, folder / f"checkpoint_{first}")
            logging.info("Resumes from checkpoint_%d in %s.", first, model_dir)
        batches = data.batches(
            dataset, train_split, shuffle=True, num_epochs=None, skip_batches=first
        )
        files.write_bytes(folder / "config.gin", config_text.encode())
        writer = metric_writers.SummaryWriter(str(folder))
        stack.callback(writer.close)
        update = optimizer.update if forward is None else forward.update(optimizer)
        step_probes = probing.StepProbes(
            learning_rate, update, curvature_period, writer.write_scalars, measured
        )

        def report(step, train_metrics):
            found = mean([eval_step(params, batch) for batch in eval_batches])
            _report(writer, step, {"train": mean(train_metrics), eval_split: found})
            return found

        seen = []
        progress = stack.enter_context(Progress("training", total_steps, done=first))
        for step in range(first + 1, total_steps + 1):
            given = next(batches), jax.random.fold_in(key, step)
            step_probes.before(step, params, *given)
            with step_probes.training():
                params, state, metrics = train_step(params, state, *given)
                loss = _finite_loss(metrics, step)
                step_probes.after(step, params, state)
            seen.append(metrics)
            progress.update(note=f"loss {loss:.3f}")
            last = step == total_steps
            if step % eval_period == 0 and not last:
                report(step, seen)
                seen = []
            if step % checkpoint_period == 0 or last:
                _check_before_saving(params, state, step, manager.latest_step())
                checkpoints.save(manager, step, params, state)
        return report(total_steps, seen)


@dataclasses.dataclass(frozen=True)
class Forward:
    """How a training step estimates its gradient by forward mode.

    Attributes:
        chosen: the parameters that move.
        directions: their number per step.
        distribution: of their entries.
    """

    chosen: chosen.Chosen
    directions: int = 1
    distribution: str = "normal"

    def pick(self, tree: Any) -> Any:
        """The leaves of the parameters that move."""
        return self.chosen.pick(tree)

    def update(self, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
        """The optimizer's update as one of all parameters, of which the others stay."""

        def update(gradient, state, params):
            found, state = optimizer.update(
                self.pick(gradient), state, self.pick(params)
            )
            return chosen.put(found, jax.tree.map(jnp.zeros_like, params)), state

        return update

    def gradient(self, model: StandaloneModel) -> Callable[..., Any]:
        """`(params, batch, key) -> (gradient, metrics)`; the key is that of the step."""

        def loss(part, params, *args):
            return model.loss_fn(chosen.put(part, params), *args)

        estimated = jax.grad(
            forward_gradient.with_forward_gradient(
                loss, self.directions, self.distribution
            ),
            has_aux=True,
        )

        def gradient(params, batch, key):
            own = jax.random.fold_in(key, probes.path_hash("forward gradient"))
            return estimated(self.pick(params), own, params, batch, key)

        return gradient


def compiled_steps(
    model: StandaloneModel,
    optimizer: optax.GradientTransformation,
    forward: Forward | None = None,
):
    """The training step and the evaluation step, compiled when first called.

    Args:
        model: the network and its loss.
        optimizer: sees the parameters that move, with their gradient.
        forward: how the gradient is estimated; None is all of it by reverse mode.

    Returns:
        `train_step(params, state, batch, key) -> (params, state, metrics)`, which
        donates its first two arguments, and `eval_step(params, batch) -> metrics`.
    """
    gradient = jax.grad(model.loss_fn, has_aux=True)
    if forward is not None:
        gradient = forward.gradient(model)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch, key):
        grads, metrics = gradient(params, batch, key)
        moving = params if forward is None else forward.pick(params)
        updates, state = optimizer.update(grads, state, moving)
        moved = optax.apply_updates(moving, updates)
        params = moved if forward is None else chosen.put(moved, params)
        return params, state, metrics

    @jax.jit
    def eval_step(params, batch):
        return model.loss_fn(params, batch, None)[1]

    return train_step, eval_step


def _check_pieces(noise_pieces, batch_size) -> None:
    if noise_pieces is not None and batch_size % noise_pieces:
        raise ValueError(
            "CURVATURE_NOISE_PIECES must divide BATCH_SIZE: got "
            f"{noise_pieces} pieces of {batch_size}."
        )


def _probe_batch(dataset, split, mixture, vocab_size):
    """The first batch of another task, read like the training's; None without a name.

    Raises:
        ValueError: the task does not exist, or does not fit the model or its lengths.
    """
    if mixture is None:
        return None
    other = dataclasses.replace(dataset, mixture_or_task_name=mixture)
    try:
        data.check_vocabulary(other, vocab_size)
        return data.fixed_batches(other, split, 1)[0]
    except ValueError as error:
        raise ValueError(
            "PROBE_MIXTURE must be a task whose first batch the model can read: "
            f"{error}"
        ) from error


def mean(metrics: Sequence[dict]) -> dict[str, float]:
    """The values of clu metrics over several batches, token-weighted if they are."""
    merged = {
        name: functools.reduce(lambda a, b: a.merge(b), [m[name] for m in metrics])
        for name in (metrics[0] if metrics else ())
    }
    return {name: float(metric.compute()) for name, metric in merged.items()}


def _finite_loss(metrics, step) -> float:
    loss = float(metrics["loss"].compute())
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"The training loss must be finite: step {step} gives {loss}; nothing was "
            "saved since the last checkpoint; a lower LEARNING_RATE may help."
        )
    return loss


def _check_before_saving(params, state, step, last_step) -> None:
    # The loss of this step was computed before its update.
    found = _not_finite(params, state)
    if found:
        last = (
            "there is no checkpoint" if last_step is None else f"checkpoint_{last_step}"
        )
        raise NonFiniteLossError(
            f"The parameters and the optimizer's state must be finite: step {step} gives "
            f"{found}; they were not saved, and the last good checkpoint is the newest: "
            f"{last}. A lower LEARNING_RATE may help when the run resumes from there."
        )


def _check_restored(params, state, path) -> None:
    found = _not_finite(params, state)
    if found:
        raise ValueError(
            f"{path} must be finite: it holds {found}. Move it away, and training "
            "resumes from the checkpoint before it."
        )


def _not_finite(params, state) -> str:
    """The first NaN, or infinity in the parameters; '' if there is none."""
    magnitudes = finite.largest_magnitudes(trees.float_part(params))
    found = [(x, name) for name, x in magnitudes.items() if not math.isfinite(x)]
    magnitudes = finite.largest_magnitudes(trees.float_part(state))
    # An optimizer may begin with an infinity, but not with a NaN.
    found += [
        (x, f"the optimizer's {name}")
        for name, x in magnitudes.items()
        if math.isnan(x)
    ]
    return f"{found[0][0]} in {found[0][1]}" if found else ""


def _report(writer, step, found) -> None:
    words = []
    for split, values in found.items():
        writer.write_scalars(step, {f"{split}/{k}": v for k, v in values.items()})
        words += [
            f"{split} {name} {values[key]:.4f}"
            for name, key in (
                ("loss", "loss"),
                ("token accuracy", "accuracy"),
            )
            if key in values
        ]
    writer.flush()
    logging.info("Step %d: %s.", step, ", ".join(words))


if __name__ == "__main__":
    from t5x_fwdloss.command_line import arguments

    arguments.run(train, RUN_FILE, REQUIRED_MACROS)
