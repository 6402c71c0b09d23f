"""Parameters and checkpoints go between T5X and the standalone host, both ways."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_fwdloss.standalone import checkpoints, layers
from t5x_fwdloss.standalone.network import T5Config, Transformer

from . import subjects

pytestmark = pytest.mark.t5x

HEADS = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@functools.cache
def t5x_side(tied):
    """T5X's model of the same sizes, its initializer and its partitioner."""
    import seqio
    from t5x import adafactor, models, partitioning, utils
    from t5x.examples.t5 import network

    config = network.T5Config(**subjects.SIZES, logits_via_embedding=tied)
    vocabulary = seqio.ByteVocabulary()
    model = models.EncoderDecoderModel(
        network.Transformer(config),
        vocabulary,
        vocabulary,
        optimizer_def=adafactor.Adafactor(decay_rate=0.8, step_offset=0),
    )
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    shapes = {name: x.shape for name, x in subjects.packed_batch().items()}
    initializer = functools.partial(
        utils.TrainStateInitializer,
        init_fn=model.get_initial_variables,
        input_shapes=shapes,
        partitioner=partitioner,
        input_types=dict.fromkeys(shapes, jnp.int32),
    )
    return types.SimpleNamespace(
        model=model, partitioner=partitioner, initializer=initializer
    )


def logits(model, params, batch):
    return jax.jit(model._compute_logits)(params, batch)


@HEADS
def test_parameter_trees_are_equal_with_names_shapes_and_dtypes(tied):
    batch = subjects.packed_batch()
    shapes = {name: x.shape for name, x in batch.items()}
    theirs = jax.eval_shape(
        lambda key: t5x_side(tied).model.get_initial_variables(
            key, shapes, dict.fromkeys(shapes, jnp.int32)
        ),
        jax.random.key(0),
    )["params"]
    ours = jax.eval_shape(
        subjects.model(logits_via_embedding=tied).get_initial_params,
        jax.random.key(0),
        batch,
    )
    assert subjects.shapes_of(ours) == subjects.shapes_of(theirs)


@HEADS
def test_initial_parameters_have_the_same_spread(tied):
    """Standard deviation of every leaf within 5 standard errors of T5X's."""
    state = t5x_side(tied).initializer(None).from_scratch(jax.random.PRNGKey(0))
    ours = subjects.model(logits_via_embedding=tied).get_initial_params(
        jax.random.key(1), subjects.packed_batch()
    )
    for theirs, mine in zip(
        jax.tree.leaves(state.state_dict()["target"]),
        jax.tree.leaves(ours),
        strict=True,
    ):
        spread, other = float(np.std(theirs)), float(np.std(mine))
        assert abs(spread - other) <= 5 * spread * np.sqrt(1 / mine.size)


@HEADS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_logits_are_equal_in_both_dtypes(tied, dtype):
    from t5x.examples.t5 import network

    batch = subjects.packed_batch()
    settings = {**subjects.SIZES, "dtype": dtype, "logits_via_embedding": tied}
    theirs = network.Transformer(network.T5Config(**settings))
    mine = Transformer(T5Config(**settings))
    params = subjects.model(logits_via_embedding=tied).get_initial_params(
        jax.random.key(0), batch
    )
    inputs, options = (
        [batch[k] for k in batch if "tokens" in k],
        {k: v for k, v in batch.items() if "segment" in k or "position" in k},
    )
    del inputs
    arguments = [
        batch[f"{k}_tokens"]
        for k in ("encoder_input", "decoder_input", "decoder_target")
    ]
    one, other = (
        jax.jit(
            lambda p, net=net: net.apply(
                {"params": p}, *arguments, **options, enable_dropout=False
            )
        )(params)
        for net in (theirs, mine)
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_buckets_are_those_of_t5x_at_every_distance():
    from t5x.examples.t5.layers import RelativePositionBiases

    distance = np.arange(700)[None, :] - np.arange(700)[:, None]
    for both in (False, True):
        theirs = RelativePositionBiases._relative_position_bucket(distance, both)
        mine = layers.relative_position_buckets(700, bidirectional=both)
        np.testing.assert_array_equal(mine, theirs)


@HEADS
def test_a_t5x_train_checkpoint_restores_here(tied, tmp_path):
    """Written by T5X's Orbax manager, optimizer state and all, as t5x.train does."""
    from t5x import utils

    side = t5x_side(tied)
    initializer = side.initializer(side.model.optimizer_def)
    state = initializer.from_scratch(jax.random.PRNGKey(0)).replace_step(jnp.array(7))
    manager = utils.create_orbax_checkpoint_manager(
        save_cfg=utils.SaveCheckpointConfig(),
        train_state=initializer.global_train_state_shape,
        partitioner=side.partitioner,
        model_dir=str(tmp_path),
    )
    manager.save(state)
    manager.close()
    model, batch = subjects.model(logits_via_embedding=tied), subjects.packed_batch()
    like = jax.eval_shape(model.get_initial_params, jax.random.key(0), batch)
    step, params = checkpoints.restore_params(str(tmp_path), like)
    assert step == 7
    subjects.assert_same_trees(params, state.state_dict()["target"])
    np.testing.assert_allclose(
        logits(model, params, batch),
        logits(side.model, state.params, batch),
        rtol=0,
        atol=1e-5,
    )
    with pytest.raises(ValueError, match="must hold the optimizer's state"):
        checkpoints.restore_optimizer(str(tmp_path), optax.adam(1e-3).init(params))


@HEADS
@pytest.mark.parametrize("path", ["", "checkpoint_5"], ids=["latest", "specific"])
def test_a_checkpoint_of_ours_restores_in_t5x(tied, path, tmp_path):
    """As T5X's eval, infer and this package's analysis restore: no optimizer."""
    from t5x import utils

    model, batch = subjects.model(logits_via_embedding=tied), subjects.packed_batch()
    params = model.get_initial_params(jax.random.key(3), batch)
    manager = checkpoints.open_manager(str(tmp_path))
    checkpoints.save(manager, 5, params, optax.adamw(1e-3).init(params))
    manager.close()
    side = t5x_side(tied)
    restore = utils.RestoreCheckpointConfig(
        path=str(tmp_path / path), mode="specific" if path else "latest", strict=False
    )
    (found,) = utils.get_first_valid_restore_config_and_paths([restore])[1]
    state, _ = utils.create_checkpoint_manager_and_restore(
        side.initializer(None),
        side.partitioner,
        restore,
        found,
        fallback_init_rng=None,
        use_orbax=True,
    )
    assert int(state.step) == 5
    subjects.assert_same_trees(state.state_dict()["target"], params)
    np.testing.assert_allclose(
        logits(side.model, state.params, batch),
        logits(model, params, batch),
        rtol=0,
        atol=1e-5,
    )
