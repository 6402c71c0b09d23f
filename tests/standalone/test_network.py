"""The network against T5X's, whose logits and parameters lie in tests/data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.standalone import layers
from t5x_fwdloss.standalone.network import T5Config, Transformer

from . import subjects

FEATURES = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")


def logits_of(network, params, batch, **options):
    inputs = [batch[name] for name in FEATURES]
    segments = {k: v for k, v in batch.items() if k.endswith(("_ids", "_positions"))}
    options = {"enable_dropout": False, **segments, **options}
    return jax.jit(lambda p: network.apply({"params": p}, *inputs, **options))(params)


@pytest.mark.parametrize("head", ["untied", "tied"])
def test_logits_are_those_of_t5x(head, repository):
    path = repository / "tests" / "data" / f"golden_network_{head}.npz"
    settings, params, batch, expected = subjects.golden(path)
    settings["mlp_activations"] = tuple(settings["mlp_activations"])
    logits = logits_of(Transformer(T5Config(**settings)), params, batch)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", ["untied", "tied"])
def test_parameters_have_the_names_and_shapes_of_t5x(head, repository):
    path = repository / "tests" / "data" / f"golden_network_{head}.npz"
    settings, params, batch, _ = subjects.golden(path)
    settings["mlp_activations"] = tuple(settings["mlp_activations"])
    inputs = [batch[name] for name in FEATURES]
    ours = jax.eval_shape(
        lambda key: Transformer(T5Config(**settings)).init(
            key, *inputs, enable_dropout=False
        ),
        jax.random.key(0),
    )
    assert subjects.shapes_of(ours["params"]) == subjects.shapes_of(params)


def test_buckets_are_exact_near_and_logarithmic_far():
    length = 300
    buckets = layers.relative_position_buckets(length, bidirectional=False)
    column = buckets[:, 0]  # distance 0, 1, 2, ...
    assert column[:16].tolist() == list(range(16))
    assert np.all(np.diff(column) >= 0)
    assert column[127] == 31 == column[-1]
    assert np.all(np.triu(buckets, 1) == 0)  # keys to the right count as distance 0
    # Bucket 16 + k begins at distance 16 * 8^(k / 16), which is never an integer.
    edges = np.flatnonzero(np.diff(column)) + 1
    expected = np.ceil(16 * 8 ** (np.arange(1, 16) / 16)).astype(int)
    assert edges[16:].tolist() == expected.tolist()

    both = layers.relative_position_buckets(length, bidirectional=True)
    assert both[:8, 0].tolist() == list(range(8))
    assert both[0, :8].tolist() == [0, *range(17, 24)]  # the other half: to the right
    assert np.all(
        both.T[np.tril_indices(length, -1)] == both[np.tril_indices(length, -1)] + 16
    )


def test_packed_examples_do_not_see_each_other():
    """Each example alone gives the logits that it gives packed (positions differ)."""
    batch = subjects.packed_batch()
    network = Transformer(subjects.config())
    model = subjects.model()
    params = model.get_initial_params(jax.random.key(1), batch)
    packed = logits_of(network, params, batch)
    for segment in (1, 2):
        alone = dict(batch)
        for side, names in (("encoder", FEATURES[:1]), ("decoder", FEATURES[1:])):
            mine = batch[f"{side}_segment_ids"] == segment
            for name in names:
                alone[name] = np.where(mine, batch[name], 0)
            del alone[f"{side}_segment_ids"]
        mine = batch["decoder_segment_ids"] == segment
        logits = logits_of(network, params, alone)
        np.testing.assert_allclose(logits[mine], packed[mine], rtol=0, atol=2e-5)
    # Without the segment ids the examples do see each other.
    merged = {k: v for k, v in batch.items() if not k.endswith("segment_ids")}
    mine = batch["decoder_segment_ids"] == 2
    difference = np.abs(logits_of(network, params, merged)[mine] - packed[mine])
    assert difference.max() > 1e-2


def test_a_token_sees_only_what_comes_before_it():
    batch = subjects.packed_batch()
    network = Transformer(subjects.config())
    params = subjects.model().get_initial_params(jax.random.key(1), batch)
    changed = dict(batch)
    changed["decoder_input_tokens"] = batch["decoder_input_tokens"].copy()
    changed["decoder_input_tokens"][:, 4] += 1
    difference = np.abs(
        logits_of(network, params, batch) - logits_of(network, params, changed)
    ).max(-1)
    np.testing.assert_array_equal(difference[:, :4], 0)
    assert np.all(difference[:, 4] > 0)


def test_segment_ids_of_one_side_only_are_refused():
    batch = subjects.packed_batch()
    params = subjects.model().get_initial_params(jax.random.key(1), batch)
    with pytest.raises(ValueError, match="got only decoder_segment_ids"):
        logits_of(
            Transformer(subjects.config()), params, batch, encoder_segment_ids=None
        )


def test_dropout_needs_its_key_and_changes_the_logits():
    batch = subjects.packed_batch()
    network = Transformer(subjects.config(dropout_rate=0.5))
    params = subjects.model().get_initial_params(jax.random.key(1), batch)
    plain = logits_of(network, params, batch)
    keys = [{"dropout": jax.random.key(seed)} for seed in (0, 0, 1)]
    first, again, other = (
        logits_of(network, params, batch, enable_dropout=True, rngs=key) for key in keys
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-2
    assert np.abs(first - plain).max() > 1e-2


def test_bfloat16_activations_give_float32_logits():
    batch = subjects.packed_batch()
    params = subjects.model().get_initial_params(jax.random.key(1), batch)
    plain = logits_of(Transformer(subjects.config()), params, batch)
    for changes in ({}, {"float32_attention_logits": True}):
        half = Transformer(subjects.config(dtype="bfloat16", **changes))
        logits = logits_of(half, params, batch)
        assert logits.dtype == jnp.float32
        scale = float(np.abs(plain).max())
        tolerance = 8 * float(jnp.finfo(jnp.bfloat16).eps) * scale
        np.testing.assert_allclose(logits, plain, rtol=0, atol=tolerance)
        assert np.abs(logits - plain).max() > 0
