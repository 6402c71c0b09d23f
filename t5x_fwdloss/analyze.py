"""The analysis run: a T5X checkpoint and its data, measured on the mesh it runs on.

    python -m t5x_fwdloss.analyze \
      --gin_file=t5x_fwdloss/configs/runs/analyze.gin \
      --gin_file=my_model.gin \
      --gin.CHECKPOINT_PATH="'/my/model/checkpoint_1000'" ...

The flags are T5X's. The run file's header lists the macros that it needs. The status is
0 when every measurement ended, 1 after bad input or a failed measurement, 143 where
SIGTERM stopped it (a preempted machine): the same command resumes it.
"""

import sys

if __name__ == "__main__":  # the imports take seconds, in which nothing else is said
    sys.stderr.write("t5x_fwdloss.analyze: importing T5X, JAX and TensorFlow\n")

import contextlib
import copy
import dataclasses
import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import gin
import jax
import seqio

from t5x_fwdloss import analysis, loss_mixin, losses, models, progress
from t5x_fwdloss.analysis import preemption

# isort: split
# After `models`, whose error names the missing part of T5X in one sentence.
import t5x
from flax import linen as nn
from t5x import gin_utils, partitioning, utils
from t5x import models as t5x_models

from t5x_fwdloss.analysis import measurement_list, settings
from t5x_fwdloss.analysis import optimizer as optimizer_lib
from t5x_fwdloss.analysis.plan.compiled import device_memory
from t5x_fwdloss.analysis.plan.plan import Planned
from t5x_fwdloss.analysis.plan.show import show
from t5x_fwdloss.analysis.sweep import steps as steps_lib
from t5x_fwdloss.command_line import (
    analysis_flags,
    compilation_cache,
    exit_status,
    gin_sentences,
    initialization,
)
from t5x_fwdloss.t5x_host import checkpoint, dataset, simulated_mesh
from t5x_fwdloss.t5x_host import optimizer as host_optimizer

# Arguments whose macros are not their names in capitals.
MACROS = {"output_dir": "ANALYSIS_OUTPUT_DIR"}


def analyze(
    *,
    model: t5x_models.BaseTransformerModel,
    dataset_cfg: utils.DatasetConfig,
    restore_checkpoint_cfg: utils.RestoreCheckpointConfig,
    partitioner: partitioning.BasePartitioner,
    output_dir: settings.Words,
    measurements: Sequence[Any],
    num_batches: settings.Positive,
    seed: settings.Seed = 0,
    loss_impl: str = "custom_jvp",
    loss_chunk_length: settings.Positive | None = None,
    num_microbatches: settings.Positive = 1,
    dropout_seed: settings.Seed | None = None,
    matmul_precision: analysis.Precision = "highest",
    train_state_initializer_cls: Any = utils.TrainStateInitializer,
    verify_matching_vocabs_fn: Any = utils.verify_matching_vocabs,
    use_orbax: bool = True,
    memory_budget: settings.Bytes | None = None,
    folding: bool = True,
    save_seconds: settings.Count = analysis.SAVE_SECONDS,
    compilation_cache_dir: settings.Path | None = None,
    learning_rate_fn: optimizer_lib.LearningRate | None = None,
    checkpoint_steps: steps_lib.CheckpointSteps | None = None,
    train_steps: settings.Count | None = None,
    follow: bool = False,
    plan: bool = False,
    device_memory_gb: settings.Above | None = None,
    device_tflops: settings.Above | None = None,
    plan_devices: settings.Positive | None = None,
    config_text: str = "",
) -> int:
    """Measures the loss of a checkpoint around its parameters; returns the exit status.

    With `checkpoint_steps` it measures several checkpoints of a training run.

    Args:
        model: the user's own T5X model; its loss is exchanged here.
        dataset_cfg: T5X's dataset configuration.
        restore_checkpoint_cfg: T5X's restore configuration, of one checkpoint.
        partitioner: T5X's partitioner.
        output_dir: folder of results.
        measurements: the measurements, from `t5x_fwdloss.analysis`.
        num_batches: batches of the objective, the first of one pass over the data.
        seed: seed of probe vectors and start vectors.
        loss_impl: a name in `losses.IMPLEMENTATIONS` that has forward mode.
        loss_chunk_length: target positions per chunk of the head and the loss.
        num_microbatches: pieces that every batch is cut into, to save memory.
        dropout_seed: one fixed dropout key per batch; None turns dropout off.
        matmul_precision: 'highest', 'high' or 'default'.
        train_state_initializer_cls: T5X's `TrainStateInitializer` or a subclass.
        verify_matching_vocabs_fn: T5X's check of the task against the model, or None.
        use_orbax: False only for T5X's single-file checkpoints.
        memory_budget: bytes per device that linearized products may keep; None: half of
            the free memory; 0: none.
        folding: whether to rewrite linearized products to read less memory.
        save_seconds: seconds between two saved states of a measurement.
        compilation_cache_dir: folder of JAX's compilation cache, for the next run;
            None: JAX's own settings.
        learning_rate_fn: the trainer's learning rate or its schedule, for the threshold
            of stability beside preconditioned eigenvalues.
        checkpoint_steps: 'all', 'every N' or a list of steps: a sweep over the
            checkpoints of the model folder in `restore_checkpoint_cfg`; None: one.
        train_steps: the step at which the training ends, for `follow`.
        follow: whether a sweep waits for further checkpoints, up to `train_steps`.
        plan: whether to print what the run would take, and to end: nothing is restored.
        device_memory_gb: memory of a device, in GiB (2^30 bytes): a run that does not
            fit is rejected; None: the plan reads it from the device, if it tells.
        device_tflops: 10^12 operations of a device per second, for the plan's times.
        plan_devices: devices of a mesh that the plan simulates on CPUs, with the
            partitioner's number of model partitions; None: those that are there.
        config_text: the gin configuration, kept with the results.

    Raises:
        ValueError: bad input, named before anything is compiled.
    """
    measurement_list.check("MEASUREMENTS", measurements)
    settings.check_arguments(analyze, locals(), macros=MACROS)
    compilation_cache.use(compilation_cache_dir)
    if plan and plan_devices is not None:
        simulated_mesh.use(partitioner, plan_devices)
    dataset.check_config(dataset_cfg)
    dataset.check_mesh(partitioner)
    path = restore_checkpoint_cfg.path
    settings.check("CHECKPOINT_PATH", path, settings.Path | Sequence[settings.Path])
    if loss_impl not in forward_losses():
        raise ValueError(
            f"An analysis needs a loss with forward mode, one of "
            f"{', '.join(forward_losses())}: got LOSS_IMPL = {loss_impl!r}; add "
            "--gin.LOSS_IMPL=\"'custom_jvp'\" (its value is the same)."
        )
    model = models.with_loss(model, loss_impl, loss_chunk_length)
    loss_mixin.check_no_other_loss(model)

    def shaped(batches, load_batches=None):
        with on_mesh(partitioner):
            objective = analysis.Objective.from_model(
                model,
                batches,
                num_microbatches=num_microbatches,
                dropout_seed=dropout_seed,
                precision=matmul_precision,
                load_batches=load_batches,
            )
        shapes, types = dataset.shapes_and_types(batches[0])

        def initializer(optimizer_def):
            with initialization.of_parameters():
                return train_state_initializer_cls(
                    optimizer_def=optimizer_def,
                    init_fn=model.get_initial_variables,
                    input_shapes=shapes,
                    input_types=types,
                    partitioner=partitioner,
                )

        return objective, initializer

    if plan:
        ones = dataset.batch_of_ones(
            dataset_cfg, partitioner, model.FEATURE_CONVERTER_CLS
        )
        objective, initializer = shaped([ones])
        with on_mesh(partitioner):
            return show(
                Planned(
                    objective=objective,
                    params=checkpoint.described(initializer(None), partitioner),
                    measurements=measurements,
                    num_batches=num_batches,
                    memory_budget=memory_budget,
                    fold=folding,
                    device_bytes=device_memory(device_memory_gb),
                ),
                tflops=device_tflops,
            )
    # Before the data, which may take a while to load.
    steps_lib.check(
        path,
        checkpoint_steps,
        follow=follow,
        train_steps=train_steps,
        output_dir=output_dir,
    )
    if checkpoint_steps is None:
        checkpoint.find_checkpoint(restore_checkpoint_cfg)
    is_primary = jax.process_index() == 0

    def load_batches(split: str) -> list[dataset.Batch]:
        task = dataset.task_name(dataset_cfg)
        with progress.stage(
            f"Reading {num_batches} batches of {task}, {split}", is_primary=is_primary
        ):
            return dataset.load_batches(
                dataclasses.replace(dataset_cfg, split=split),
                num_batches,
                partitioner,
                model.FEATURE_CONVERTER_CLS,
            )

    batches = load_batches(dataset_cfg.split)
    if verify_matching_vocabs_fn is not None:
        dataset.check_vocabularies(dataset_cfg, model, verify_matching_vocabs_fn)
    objective, initializer = shaped(batches, load_batches)
    plain = initializer(None)  # no optimizer state
    measurement_list.check_groups(measurements, plain.global_train_state_shape.params)
    restorer = checkpoint.Restorer(
        plain, partitioner, restore_checkpoint_cfg, use_orbax
    )

    def load(path: str) -> tuple[Any, analysis.HostInfo]:
        restored = restorer.restore(path)
        cfg = copy.copy(
            restore_checkpoint_cfg
        )  # dataclasses.replace would rename twice
        cfg.path = restored.path
        return restored.params, analysis.HostInfo(
            checkpoint=restored.path,
            step=restored.step,
            mesh=partitioner.mesh,
            load_params=lambda other: restorer.restore(other).params,
            load_preconditioner=lambda: host_optimizer.load(
                initializer(model.optimizer_def),
                partitioner,
                cfg,
                use_orbax,
                learning_rate=learning_rate_fn,
            ),
            is_primary=is_primary,
            config_text=config_text,
            task=dataset.task_name(dataset_cfg),
            optimizer=host_optimizer.name_of(model.optimizer_def),
        )

    with on_mesh(partitioner):
        return analysis.run_one_or_all(
            objective,
            load,
            path=path,
            steps=checkpoint_steps,
            learning_rate=learning_rate_fn,
            follow_until=train_steps if follow else None,
            measurements=measurements,
            output_dir=output_dir,
            seed=seed,
            memory_budget=memory_budget,
            fold=folding,
            save_seconds=save_seconds,
            device_memory=device_memory_gb and int(device_memory_gb * 2**30),
        )


def forward_losses() -> list[str]:
    """The names of the losses that have forward mode."""
    return [name for name, x in losses.IMPLEMENTATIONS.items() if x.has_forward_mode]


@contextlib.contextmanager
def on_mesh(partitioner: partitioning.BasePartitioner):
    """T5X's mesh and logical axis rules, for all that is traced and run inside."""
    rules = getattr(partitioner, "logical_axis_rules", ())
    with warnings.catch_warnings():
        # jax.set_mesh, which JAX recommends instead, has no effect on T5X's networks.
        warnings.filterwarnings("ignore", "`with mesh:`", DeprecationWarning)
        mesh = contextlib.ExitStack()
        mesh.enter_context(partitioner.mesh)
    with mesh, nn.logical_axis_rules(rules):
        yield


REQUIRED_MACROS = {
    "MODEL": "the file of your model, for example "
    "--gin_file=t5x/examples/t5/t5_1_1/small.gin, after the run file",
    "CHECKPOINT_PATH": "--gin.CHECKPOINT_PATH=\"'/my/model/checkpoint_1000'\"",
    "ANALYSIS_OUTPUT_DIR": "--gin.ANALYSIS_OUTPUT_DIR=\"'/my/analysis'\"",
    "MIXTURE_OR_TASK_NAME": "--gin.MIXTURE_OR_TASK_NAME=\"'my_task'\"",
    "TASK_FEATURE_LENGTHS": '--gin.TASK_FEATURE_LENGTHS="'
    "{'inputs': 512, 'targets': 128}\"",
    "NUM_BATCHES": "--gin.NUM_BATCHES=8",
    "BATCH_SIZE": "--gin.BATCH_SIZE=32",
    "MEASUREMENTS": '--gin.MEASUREMENTS="[@DirectionalDerivatives()]"',
}


def attempt(values: Any) -> int:
    """Reads gin as the flags say and runs the analysis; returns the exit status.

    A rejected input gives one sentence on standard error; another exception is a bug,
    and is raised.

    Args:
        values: has `gin_file`, `gin_bindings`, `gin_search_paths`, `multiprocess_gpu`.
    """

    def configure():
        _parse(values)
        configured = gin.get_configurable(analyze)
        more = analysis_flags.given(values)
        run = functools.partial(configured, config_text=gin.config_str(), **more)
        # From here on; JAX alone would get SIGTERM, and the run would not stop.
        return preemption.listening()(run) if values.multiprocess_gpu else run

    return exit_status.exit_status("t5x_fwdloss.analyze", configure, analyze)


def _parse(flags: Any) -> None:
    """Reads the gin files and bindings, and checks for the most frequent omissions.

    Raises:
        ValueError: no gin file, no run file, or macros without a value.
    """
    if not flags.gin_file:
        raise ValueError(
            "No --gin_file was given: an analysis needs the run file "
            f"{gin_sentences.RUN_FILE} and the file of your model."
        )
    gin_sentences.check_bindings(flags.gin_bindings)
    # T5X's package folder is searched last, as in its own scripts.
    t5x_folder = os.path.dirname(os.path.dirname(t5x.__file__))
    gin_utils.parse_gin_flags(
        [*flags.gin_search_paths, t5x_folder],
        flags.gin_file,
        flags.gin_bindings,
        finalize_config=False,
    )
    if _bound("analyze.model") is None:
        raise ValueError(
            "No gin file configures the analysis: add "
            f"--gin_file={gin_sentences.RUN_FILE} before the file of your model."
        )
    gin_sentences.check_macros(flags.gin_bindings, flags.gin_file)
    gin_sentences.check_scopes()
    unset = [
        f"{name} ({remedy})"
        for name, remedy in REQUIRED_MACROS.items()
        if _bound(f"{name}/gin.macro.value") is None
    ]
    if unset:
        raise ValueError(
            f"The run file needs values for {'; '.join(unset)}. If a file sets one, it "
            "must come after the run file, which resets it."
        )
    if _bound("DROPOUT_SEED/gin.macro.value") is None:
        # T5X's model files require a rate, which has no effect while dropout is off.
        gin.bind_parameter("DROPOUT_RATE/gin.macro.value", 0.0)
    gin.finalize()


def _bound(key):
    """The value of a binding; None if there is none or it is `%gin.REQUIRED`."""
    try:
        value = gin.query_parameter(key)
    except ValueError:
        return None
    return None if repr(value) == "%gin.REQUIRED" else value


if __name__ == "__main__":
    import tensorflow as tf
    from absl import app, flags

    from t5x_fwdloss.command_line import arguments

    FLAGS = flags.FLAGS
    analysis_flags.define()
    flags.DEFINE_multi_string(
        "gin_file", None, "gin file; repeat it, later files override earlier ones."
    )
    flags.DEFINE_multi_string("gin_bindings", [], "one gin binding, NAME = VALUE.")
    flags.DEFINE_list(
        "gin_search_paths",
        ["."],
        "folders that --gin_file and include are looked for in.",
    )
    flags.DEFINE_string("tfds_data_dir", None, "folder of TensorFlow Datasets' data.")
    flags.DEFINE_list("seqio_additional_cache_dirs", [], "folders of cached tasks.")
    flags.DEFINE_boolean(
        "multiprocess_gpu", False, "run jax.distributed with the next three flags."
    )
    flags.DEFINE_string("coordinator_address", None, "address:port of process 0.")
    flags.DEFINE_integer("process_count", None, "number of processes.")
    flags.DEFINE_integer("process_index", None, "index of this process.")
    flags.DEFINE_integer(
        "initialization_timeout", None, "seconds to wait for the others."
    )

    def main(argv: Sequence[str]) -> int:
        """Reads flags and gin, runs the analysis, and reports errors in one sentence.

        Raises:
            UsageError: there are arguments that are not flags.
        """
        if len(argv) > 1:
            raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}.")
        tf.config.experimental.set_visible_devices([], "GPU")  # they are JAX's
        if FLAGS.multiprocess_gpu:
            timeout = FLAGS.initialization_timeout
            jax.distributed.initialize(
                FLAGS.coordinator_address,
                FLAGS.process_count,
                FLAGS.process_index,
                **({"initialization_timeout": timeout} if timeout else {}),
            )
        if FLAGS.tfds_data_dir:
            seqio.set_tfds_data_dir_override(FLAGS.tfds_data_dir)
        seqio.add_global_cache_dirs(FLAGS.seqio_additional_cache_dirs)
        return attempt(FLAGS)

    try:
        arguments.rewrite_gin_flags(sys.argv)
    except ValueError as error:
        sys.exit(f"t5x_fwdloss.analyze: {error}")
    jax.config.parse_flags_with_absl()
    progress.show_lines()
    gin_utils.run(main)
