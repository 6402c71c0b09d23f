"""Analyzes a checkpoint with the standalone model, on machines without T5X.

    python -m t5x_fwdloss.standalone.analyze \
      --gin_file=t5x_fwdloss/configs/standalone/analyze.gin \
      --gin_file=t5x_fwdloss/configs/standalone/tiny.gin \
      --gin.CHECKPOINT_PATH="'/tmp/g2p'" --gin.ANALYSIS_OUTPUT_DIR="'/tmp/g2p_analysis'"

Restores the parameters, takes a fixed list of batches, and hands both to
`t5x_fwdloss.analysis`, which does the rest.
"""

import sys

if __name__ == "__main__":  # the imports take seconds, in which nothing else is said
    sys.stderr.write("t5x_fwdloss.standalone.analyze: importing JAX and TensorFlow\n")

import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax
import seqio

from t5x_fwdloss import analysis, progress
from t5x_fwdloss.analysis import measurement_list, settings
from t5x_fwdloss.analysis import optimizer as optimizer_lib
from t5x_fwdloss.analysis.objective import parameters
from t5x_fwdloss.analysis.plan.compiled import device_memory
from t5x_fwdloss.analysis.plan.plan import Planned
from t5x_fwdloss.analysis.plan.show import show
from t5x_fwdloss.analysis.sweep import steps as steps_lib
from t5x_fwdloss.command_line import compilation_cache, initialization
from t5x_fwdloss.command_line.batch_of_ones import batch_of_ones
from t5x_fwdloss.loss_mixin import check_no_other_loss
from t5x_fwdloss.standalone import checkpoints, data, hugging_face
from t5x_fwdloss.standalone.model import StandaloneModel

RUN_FILE = "t5x_fwdloss/configs/standalone/analyze.gin"
REQUIRED_MACROS = {
    "MODEL": "the file of a model, such as t5x_fwdloss/configs/standalone/tiny.gin",
    "CHECKPOINT_PATH": "--gin.CHECKPOINT_PATH=\"'/my/model'\"",
    "ANALYSIS_OUTPUT_DIR": "--gin.ANALYSIS_OUTPUT_DIR=\"'/my/analysis'\"",
    "MIXTURE_OR_TASK_NAME": "--gin.MIXTURE_OR_TASK_NAME=\"'cmudict_g2p'\"",
    "TASK_FEATURE_LENGTHS": '--gin.TASK_FEATURE_LENGTHS="'
    "{'inputs': 20, 'targets': 40}\"",
    "BATCH_SIZE": "--gin.BATCH_SIZE=64",
}
# Arguments whose macros are not their names in capitals.
MACROS = {"output_dir": "ANALYSIS_OUTPUT_DIR"}


def analyze(
    *,
    model: StandaloneModel,
    dataset: data.DatasetConfig,
    checkpoint_path: settings.Words,
    output_dir: settings.Words,
    measurements: Sequence[Any],
    num_batches: settings.Positive,
    split: settings.Words = "validation",
    seed: settings.Seed = 0,
    num_microbatches: settings.Positive = 1,
    dropout_seed: settings.Seed | None = None,
    matmul_precision: analysis.Precision = "highest",
    memory_budget: settings.Bytes | None = None,
    folding: bool = True,
    save_seconds: settings.Count = analysis.SAVE_SECONDS,
    compilation_cache_dir: settings.Path | None = None,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: optimizer_lib.LearningRate | None = None,
    checkpoint_steps: steps_lib.CheckpointSteps | None = None,
    train_steps: settings.Count | None = None,
    follow: bool = False,
    plan: bool = False,
    device_memory_gb: settings.Above | None = None,
    device_tflops: settings.Above | None = None,
    config_text: str = "",
) -> int:
    """Measures the loss of a checkpoint around its parameters; returns the exit status.

    With `checkpoint_steps` it measures several checkpoints of a training run.

    Args:
        model: the network and its loss, which needs forward mode.
        dataset: the source of the batches.
        checkpoint_path: a folder `checkpoint_<step>`, of T5X or of the standalone
            training, or a folder of these, of which the latest is taken, or a folder
            in Hugging Face's format.
        output_dir: folder of results; a run that was stopped resumes there.
        measurements: from `t5x_fwdloss.analysis`.
        num_batches: batches of the objective, the first of the split.
        split: for example "validation".
        seed: seed of probe vectors and start vectors.
        num_microbatches: pieces that every batch is cut into, to save memory.
        dropout_seed: one fixed dropout key per batch; None turns dropout off.
        matmul_precision: 'highest', 'high' or 'default'.
        memory_budget: bytes per device that linearized products may keep; None: half of
            the free memory; 0: none.
        folding: whether to rewrite linearized products to read less memory.
        save_seconds: seconds between two saved states of a measurement.
        compilation_cache_dir: folder of JAX's compilation cache, for the next run;
            None: JAX's own settings.
        optimizer: that of the training, for preconditioned measurements.
        learning_rate: its learning rate or schedule, if the optimizer itself does not
            tell it.
        checkpoint_steps: 'all', 'every N' or a list of steps: a sweep over the
            checkpoints of the model folder `checkpoint_path`; None: one checkpoint.
        train_steps: the step at which the training ends, for `follow`.
        follow: whether a sweep waits for further checkpoints, up to `train_steps`.
        plan: whether to print what the run would take, and to end: nothing is restored.
        device_memory_gb: memory of a device, in GiB (2^30 bytes): a run that does not
            fit is rejected; None: the plan reads it from the device, if it tells.
        device_tflops: 10^12 operations of a device per second, for the plan's times.
        config_text: the gin configuration, kept with the results.

    `ValueError` names bad input before anything is read or compiled.
    """
    measurement_list.check("MEASUREMENTS", measurements)
    settings.check_arguments(analyze, locals(), macros=MACROS)
    compilation_cache.use(compilation_cache_dir)
    check_no_other_loss(model)
    measurement_list.check_forward_mode(measurements, model.loss_settings)
    _check_optimizer(optimizer, measurements)
    data.check_vocabulary(dataset, model.vocab_size)
    hugging_face.check_network(checkpoint_path, model.module)
    if plan:
        ones = batch_of_ones(
            seqio.EncDecFeatureConverter(pack=dataset.pack),
            dataset.task_feature_lengths,
            dataset.batch_size,
        )
        return show(
            Planned(
                objective=analysis.Objective.from_model(
                    model,
                    [ones],
                    num_microbatches=num_microbatches,
                    dropout_seed=dropout_seed,
                    precision=matmul_precision,
                ),
                params=parameters.on_one_device(_shapes(model, ones)),
                measurements=measurements,
                num_batches=num_batches,
                memory_budget=memory_budget,
                fold=folding,
                device_bytes=device_memory(device_memory_gb),
            ),
            tflops=device_tflops,
        )
    steps_lib.check(
        checkpoint_path,
        checkpoint_steps,
        follow=follow,
        train_steps=train_steps,
        output_dir=output_dir,
    )
    if checkpoint_steps is None:
        checkpoint_path = str(checkpoints.find(checkpoint_path))

    def load_batches(split: str) -> list[data.Batch]:
        with progress.stage(f"Reading {num_batches} batches of {split}"):
            return data.fixed_batches(dataset, split, num_batches)

    batches = load_batches(split)
    like = _shapes(model, batches[0])
    measurement_list.check_groups(measurements, like)
    objective = analysis.Objective.from_model(
        model,
        batches,
        num_microbatches=num_microbatches,
        dropout_seed=dropout_seed,
        precision=matmul_precision,
        load_batches=load_batches,
    )

    def load(path: str) -> tuple[Any, analysis.HostInfo]:
        with progress.stage(f"Restoring {path}"):
            step, params = checkpoints.restore_params(path, like)
        return params, analysis.HostInfo(
            checkpoint=path,
            step=step,
            load_params=lambda other: checkpoints.restore_params(other, like)[1],
            load_preconditioner=(
                None
                if optimizer is None
                else functools.partial(
                    _preconditioner, optimizer, path, params, rate(step)
                )
            ),
            config_text=config_text,
            optimizer=(
                ""
                if optimizer is None
                else optimizer_lib.name_of(jax.eval_shape(optimizer.init, params))
            ),
            task=dataset.mixture_or_task_name,
        )

    rate = functools.partial(optimizer_lib.at_step, learning_rate)
    return analysis.run_one_or_all(
        objective,
        load,
        path=checkpoint_path,
        steps=checkpoint_steps,
        learning_rate=learning_rate,
        follow_until=train_steps if follow else None,
        measurements=measurements,
        output_dir=output_dir,
        seed=seed,
        memory_budget=memory_budget,
        fold=folding,
        save_seconds=save_seconds,
        device_memory=device_memory_gb and int(device_memory_gb * 2**30),
    )


def _shapes(model, batch) -> Any:
    with initialization.of_parameters():
        return jax.eval_shape(model.get_initial_params, jax.random.key(0), batch)


def _preconditioner(optimizer, path, params, rate) -> optimizer_lib.Preconditioner:
    state = checkpoints.restore_optimizer(path, optimizer.init(params))
    return optimizer_lib.of_update(optimizer.update, state, params, learning_rate=rate)


def _check_optimizer(optimizer, measurements) -> None:
    for measurement in measurements:
        if measurement.optimizer_setting and optimizer is None:
            raise ValueError(
                f"{type(measurement).__name__}.{measurement.optimizer_setting} must have "
                "the optimizer of the training: got OPTIMIZER = None; bind it as the "
                "training did, such as in t5x_fwdloss/configs/standalone/optimizer.gin."
            )


if __name__ == "__main__":
    from t5x_fwdloss.command_line import arguments

    arguments.run(analyze, RUN_FILE, REQUIRED_MACROS, is_analysis=True)
