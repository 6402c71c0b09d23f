"""A T5X trainer on T5X's own tiny network, stock and probed, side by side; needs T5X.

    python -m training.t5x_training FOLDER

On all devices there are, it trains without and with probes, and prints one line of JSON:
whether the parameters agree bit for bit, and the numbers in the event files.
"""

import functools
import json
import sys

import jax
import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, PERIOD, RATE, BATCH = 6, 3, 0.05, 8


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
    for step in range(STEPS):
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
        learning_rate_fn=lambda step: RATE / (1 + step),
        num_microbatches=microbatches,
        **more,
    )


def probed(constructor=None, period=PERIOD):
    from t5x import trainer as t5x_trainer

    from t5x_fwdloss.training.trainer import with_curvature

    return with_curvature(constructor or t5x_trainer.Trainer, period)


def forward(constructor=None, **settings):
    from t5x import trainer as t5x_trainer

    from t5x_fwdloss.training.forward_trainer import with_forward_gradient

    return with_forward_gradient(constructor or t5x_trainer.Trainer, **settings)


def trained(found):
    """The trainer's parameters after each step; it is closed."""
    found.compile_train(next(batches()))
    data, after = batches(), [jax.device_get(found.train_state.params)]
    for step in range(STEPS):
        found.train(data, 1, start_step=step)
        after.append(jax.device_get(found.train_state.params))
    found.close()
    return after


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

    stock = trained(trainer(folder / "stock", t5x_trainer.Trainer))
    ours = trained(trainer(folder / "probed", probed()))
    same = jax.tree.map(np.array_equal, stock, ours)
    moved = jax.tree.map(np.array_equal, stock[0], stock[-1])
    report = {
        "devices": jax.device_count(),
        "same": all(jax.tree.leaves(same)),
        "moved": not any(jax.tree.leaves(moved)),
        "events": events(folder / "probed"),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    import pathlib

    main(pathlib.Path(sys.argv[1]))
