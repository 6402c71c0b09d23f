"""A T5X trainer on T5X's own tiny network, stock and probed, side by side; needs T5X.

    python -m training.t5x_training FOLDER [ADDRESS COUNT INDEX]

On all devices there are, of one process or of several, it trains without and with probes,
and prints one line of JSON: whether the whole state agrees bit for bit, and the numbers in
the event files.
"""

import functools
import json
import sys

import jax
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, PERIOD, BATCH = 6, 3, 8
MANY_STEPS = 60
PRODUCTS, FEW_PRODUCTS = 30, 3
TASK, LENGTHS = "training_probe", {"inputs": 6, "targets": 6}


def rate(step):
    """The learning rate of the step that follows `step` steps."""
    return 0.05 / (1 + step)


def model(impl="custom_jvp", cls=None):
    import seqio
    from t5x import adafactor
    from t5x.examples.t5 import network

    from t5x_fwdloss import models

    config = network.T5Config(
        vocab_size=32,
        emb_dim=8,
        num_heads=8,
        head_dim=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        mlp_dim=16,
        dropout_rate=0.1,
    )
    vocabulary = seqio.PassThroughVocabulary(32, eos_id=1)
    cls = cls or functools.partial(models.FwdLossEncoderDecoderModel, loss_impl=impl)
    return cls(
        module=network.Transformer(config),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=adafactor.Adafactor(),
        z_loss=1e-3,
        label_smoothing=0.1,
    )


def batches():
    """One batch per step, of different lengths."""
    for step in range(MANY_STEPS):
        draw = np.random.default_rng(step)
        lengths = draw.integers(2, 7, size=(BATCH, 1))
        mask = np.arange(6) < lengths
        tokens = lambda mask=mask, draw=draw: (
            draw.integers(2, 32, mask.shape) * mask
        ).astype(np.int32)
        yield {
            "encoder_input_tokens": tokens(),
            "decoder_input_tokens": tokens(),
            "decoder_target_tokens": tokens(),
            "decoder_loss_weights": mask.astype(np.int32),
        }


def trainer(folder, constructor, of_model=None, microbatches=2, pattern=None, **more):
    """A trainer at step 0; with a pattern, of the parameters that match it."""
    from t5x import partitioning, utils

    found = of_model or model()
    partitioner = partitioning.PjitPartitioner(
        num_partitions=min(2, jax.device_count())
    )
    first = next(batches())
    initializer_cls = utils.TrainStateInitializer
    if pattern is not None:
        from t5x_fwdloss.training.forward_trainer import with_chosen_parameters

        initializer_cls = with_chosen_parameters(pattern)
    state = initializer_cls(
        optimizer_def=found.optimizer_def,
        init_fn=found.get_initial_variables,
        input_shapes={name: x.shape for name, x in first.items()},
        input_types={name: x.dtype for name, x in first.items()},
        partitioner=partitioner,
    )
    return constructor(
        model=found,
        train_state=state.from_scratch(jax.random.PRNGKey(0)),
        partitioner=partitioner,
        train_state_axes=state.train_state_axes,
        eval_names=[],
        summary_dir=str(folder),
        rng=jax.random.PRNGKey(1),
        learning_rate_fn=rate,
        num_microbatches=microbatches,
        **more,
    )


def probed(constructor=None, period=PERIOD, **more):
    from t5x import trainer as t5x_trainer

    from t5x_fwdloss.training.trainer import with_curvature

    return with_curvature(constructor or t5x_trainer.Trainer, period, **more)


def forward(constructor=None, **settings):
    from t5x import trainer as t5x_trainer

    from t5x_fwdloss.training.forward_trainer import with_forward_gradient

    return with_forward_gradient(constructor or t5x_trainer.Trainer, **settings)


def probed_in_all(period=PERIOD):
    """With everything that a probe can measure."""
    register()
    return probed(
        period=period,
        # Collectives between processes are slow.
        eigenvalue_products=PRODUCTS if jax.process_count() == 1 else FEW_PRODUCTS,
        eigenvalue_matrices=("hessian", "preconditioned_hessian"),
        noise_scale=True,
        probe_mixture=TASK,
        probe_dataset=dataset,
    )


def register():
    """A task of random tokens of the network's vocabulary."""
    import seqio

    if TASK in seqio.TaskRegistry.names():
        return

    def examples(split, shuffle_files=False, seed=None):
        del split, shuffle_files, seed
        draw = np.random.default_rng(10)
        tokens = draw.integers(2, 32, size=(16, 2, 5)).astype(np.int32)
        return tf.data.Dataset.from_tensor_slices(
            {"inputs": tokens[:, 0], "targets": tokens[:, 1]}
        )

    vocabulary = seqio.PassThroughVocabulary(32, eos_id=1)
    seqio.TaskRegistry.add(
        TASK,
        source=seqio.FunctionDataSource(examples, splits=["train"]),
        preprocessors=[seqio.preprocessors.append_eos],
        output_features={
            name: seqio.Feature(vocabulary, dtype=tf.int32) for name in LENGTHS
        },
    )


def dataset(mixture_or_task_name, lengths=LENGTHS):
    from t5x import utils

    return utils.DatasetConfig(
        mixture_or_task_name=mixture_or_task_name,
        task_feature_lengths=lengths,
        split="train",
        batch_size=BATCH,
        shuffle=False,
        seed=0,
    )


def trained(found, steps=STEPS):
    """The trainer's state after each step; it is closed."""
    found.compile_train(next(placed(found)))
    data, after = placed(found), [on_host(found.train_state)]
    for step in range(steps):
        found.train(data, 1, start_step=step)
        after.append(on_host(found.train_state))
    found.close()
    return after


def placed(found):
    """The batches over all devices of all processes."""
    partitioner = found._partitioner
    layout = jax.sharding.NamedSharding(
        partitioner.mesh, partitioner.data_partition_spec
    )
    place = lambda x: jax.make_array_from_callback(x.shape, layout, lambda at: x[at])
    for batch in batches():
        yield batch if jax.process_count() == 1 else jax.tree.map(place, batch)


def on_host(state):
    """The state; where there are several processes, this one's part of it."""
    if jax.process_count() == 1:
        return jax.device_get(state)
    parts = lambda x: [np.ravel(shard.data) for shard in x.addressable_shards]
    return jax.tree.map(lambda x: np.concatenate(parts(x)), state)


def events(folder):
    """The scalars of a run's event files: tag to step to value."""
    read = EventAccumulator(str(folder / "train"))
    read.Reload()
    return {
        tag: {x.step: float(tf.make_ndarray(x.tensor_proto)) for x in of_tag}
        for tag in read.Tags()["tensors"]
        if tag.startswith(("curvature/", "learning_rate")) or tag == "loss"
        if (of_tag := read.Tensors(tag))
    }


def main(folder):
    from t5x import trainer as t5x_trainer

    stock = trained(trainer(folder / "stock", t5x_trainer.Trainer), MANY_STEPS)
    ours = trained(trainer(folder / "probed", probed(period=30)), MANY_STEPS)
    in_all = trained(trainer(folder / "in_all", probed_in_all()))
    equal = lambda *trees: jax.tree.leaves(jax.tree.map(np.array_equal, *trees))
    report = {
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "same": all(equal(stock, ours)) and all(equal(stock[: STEPS + 1], in_all)),
        "moved": not any(equal(stock[0].params, stock[-1].params)),
        "events": events(folder / "in_all") if jax.process_index() == 0 else {},
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    import pathlib

    if sys.argv[2:]:
        address, count, index = sys.argv[2:]
        jax.distributed.initialize(address, int(count), int(index))
    main(pathlib.Path(sys.argv[1]))
