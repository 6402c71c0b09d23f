"""Every loss keeps the table of laws: at ordinary and at extreme points, in every dtype."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from losses import subjects
from losses.subjects import LENGTH, SUBJECTS, VOCAB, Settings, check_laws
from t5x_fwdloss import losses

pytestmark = pytest.mark.usefixtures("x64")

# Losses that run the whole table; the others, of which each is a part, the essentials.
FULL = [
    name
    for name in SUBJECTS
    if not name.startswith("chunked") or name == "chunked custom_jvp"
]
PLAIN = Settings(label_smoothing=0.0, z_loss=0.0)
SMOOTHED = Settings(label_smoothing=0.1, z_loss=0.01)
T5X_RULES = [name for name, subject in SUBJECTS.items() if subject.is_t5x_rule]
LOSSES_OF_LOGITS = [n for n in SUBJECTS if not n.startswith("chunked")]
RULES_OF_LOGITS = [name for name in SUBJECTS if name.startswith("custom_jvp")]


def example(name, kind="none"):
    keys = jax.random.split(jax.random.key(0), 2)
    x = SUBJECTS[name].draw(keys[0])
    return x, subjects.draw_labels(keys[1]), subjects.draw_weights(kind)


def laws_of(name):
    return laws.LAWS if name in FULL else (*laws.ESSENTIAL, *laws.COMPOSED)


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_law_holds_in_float64(name):
    check_laws(name, SMOOTHED, *example(name, "float"), names=laws_of(name))


@pytest.mark.parametrize("name", SUBJECTS)
def test_laws_hold_without_smoothing_or_weights(name):
    check_laws(name, PLAIN, *example(name), names=laws.ESSENTIAL)


@pytest.mark.parametrize("name", SUBJECTS)
def test_laws_hold_with_bool_weights(name):
    settings = Settings(label_smoothing=0.0, z_loss=0.01)
    check_laws(name, settings, *example(name, "bool"), names=laws.ESSENTIAL)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("settings", [PLAIN, SMOOTHED], ids=["plain", "smoothed"])
def test_laws_hold_where_labels_are_no_classes(name, settings):
    x, labels, _ = example(name)
    labels = labels.at[0].set(jnp.array([-1, VOCAB, -100]))
    weights = None if settings is PLAIN else subjects.draw_weights("float")
    names = laws.ESSENTIAL if settings is PLAIN else laws_of(name)
    check_laws(name, settings, x, labels, weights, names=names)


@pytest.mark.parametrize("name", SUBJECTS)
def test_laws_hold_where_all_weights_are_zero(name):
    x, labels, weights = example(name, "float")
    check_laws(name, SMOOTHED, x, labels, np.zeros_like(weights), names=laws_of(name))


@pytest.mark.parametrize("name", SUBJECTS)
def test_laws_hold_where_all_logits_are_equal(name):
    x, labels, weights = example(name, "float")
    x = jax.tree.map(jnp.zeros_like, x)
    check_laws(name, SMOOTHED, x, labels, weights, names=laws_of(name))


@pytest.mark.parametrize("name", LOSSES_OF_LOGITS)
def test_laws_hold_at_logits_of_ten_thousand(name):
    x, labels, weights = example(name, "float")
    check_laws(name, SMOOTHED, 1e4 * jnp.sign(x), labels, weights)


@pytest.mark.parametrize("name", [n for n in SUBJECTS if n not in LOSSES_OF_LOGITS])
def test_laws_hold_at_hidden_states_of_ten_thousand(name):
    x, labels, weights = example(name, "float")
    x = 1e4 * jnp.sign(x[0]), x[1]
    check_laws(name, SMOOTHED, x, labels, weights, names=laws.FIRST_ORDER)


@pytest.mark.parametrize("name", LOSSES_OF_LOGITS)
@pytest.mark.parametrize("settings", [PLAIN, SMOOTHED], ids=["plain", "smoothed"])
def test_laws_hold_with_classes_masked_by_a_large_negative_number(name, settings):
    x, labels, _ = example(name)
    weights = None if settings is PLAIN else subjects.draw_weights("float")
    names = laws.ESSENTIAL if settings is PLAIN else None
    x = x.at[..., 3:].set(-1e10)
    check_laws(name, settings, x, labels % 3, weights, names=names)


@pytest.mark.parametrize("name", RULES_OF_LOGITS)
def test_laws_of_custom_jvp_hold_with_classes_at_minus_infinity(name):
    x, labels, weights = example(name, "float")
    masked = x.at[..., 3:].set(-jnp.inf)
    check_laws(name, PLAIN, masked, labels % 3, None, names=laws.ESSENTIAL)
    if (
        name != "custom_jvp on dense targets"
    ):  # with dense targets, smoothing puts mass on those classes
        names = [law for law in laws.LAWS if "scan" not in law and "vmap" not in law]
        check_laws(name, SMOOTHED, masked, labels % 3, weights, names=names)


@pytest.mark.parametrize("impl", ["autodiff", "custom_vjp"])
def test_classes_at_minus_infinity_give_nan_as_in_t5x(impl):
    x, labels, _ = example(impl)
    masked = x.at[..., 3:].set(-jnp.inf)
    loss, _ = subjects.on_logits(masked, labels % 3, None, PLAIN, impl=impl)
    assert jnp.isnan(loss)


@pytest.mark.parametrize("name", SUBJECTS)
def test_laws_hold_in_float32(name):
    names = laws.ESSENTIAL
    if name in LOSSES_OF_LOGITS:
        names = (*laws.ESSENTIAL, *laws.COMPOSED)
    point = example(name, "float")
    check_laws(name, SMOOTHED, *point, names=names, dtype=jnp.float32)


@pytest.mark.parametrize("name", [n for n in SUBJECTS if n not in T5X_RULES])
def test_bfloat16_arrays_lose_nothing_but_the_last_rounding(name):
    x, labels, weights = example(name, "float")
    check_laws(
        name, SMOOTHED, x, labels, weights, names=laws.ESSENTIAL, dtype=jnp.bfloat16
    )


@pytest.mark.parametrize("name", LOSSES_OF_LOGITS)
def test_laws_hold_for_a_vocabulary_of_one_class(name):
    x = subjects.draw_logits(jax.random.key(3), vocab_size=1)
    labels = jnp.zeros(x.shape[:-1], jnp.int32).at[0, 0].set(4)
    weights = subjects.draw_weights("float")
    check_laws(name, SMOOTHED, x, labels, weights, names=laws.ESSENTIAL)


# batch, length, embed, vocabulary; chunks of one token.
SIZES_OF_ONE = [(1, 1, 1, 2), (1, 3, 4, 1)]


@pytest.mark.parametrize("sizes", SIZES_OF_ONE, ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_laws_hold_for_sizes_of_one(name, sizes, monkeypatch):
    monkeypatch.setattr(subjects, "CHUNK_LENGTH", 1)
    *tokens, embed, vocab_size = sizes
    draw = lambda key, *shape: jax.random.normal(jax.random.key(key), shape)
    if name in LOSSES_OF_LOGITS:
        x = draw(0, *tokens, vocab_size)
    else:
        head = draw(1, embed, vocab_size)
        x = draw(0, *tokens, embed), head.T if name.endswith("tied") else head
    labels = jnp.zeros(tokens, jnp.int32)
    names = ("grad", "jvp", "jvp(grad)")
    check_laws(name, SMOOTHED, x, labels, np.ones(tokens), names=names)


@pytest.mark.parametrize("law", laws.FORBIDDEN)
@pytest.mark.parametrize("name", T5X_RULES)
def test_forward_mode_fails_on_the_rule_of_t5x(name, law):
    error, message = laws.FORBIDDEN[law]
    x, labels, weights = example(name, "float")
    f = functools.partial(
        SUBJECTS[name].loss, labels=labels, weights=weights, settings=SMOOTHED
    )
    with pytest.raises(error, match=message):
        laws.LAWS[law](f, x, x, x)


def test_laws_hold_under_the_coming_custom_vjp():
    flag = "jax_custom_vjp3"
    if not hasattr(jax.config, flag):
        pytest.skip(f"this jax has no flag {flag}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    # Without the chunked loss: that jax cannot lower its own rule in a scan of remat.
    tests = "every_law_holds_in_float64 or forward_mode_fails"
    selection = f"({tests}) and custom_vjp and not chunked"
    finished = subprocess.run(
        [*command, "-k", selection],
        env={**os.environ, flag.upper(): "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize("impl", losses.IMPLEMENTATIONS)
def test_the_derivative_in_the_coefficient_is_the_squared_log_normalizer(impl):
    x, labels, _ = example(impl)

    def loss(z_loss):
        settings = Settings(label_smoothing=0.0, z_loss=z_loss)
        return subjects.on_logits(x, labels, None, settings, impl=impl)[0]

    log_z = jax.nn.logsumexp(x, axis=-1)
    expected = 0.0 if impl == "custom_vjp" else jnp.sum(log_z**2)
    np.testing.assert_allclose(jax.grad(loss)(0.1), expected, rtol=1e-12)


def test_shapes_of_the_example_leave_a_short_last_chunk_and_make_several_blocks():
    assert LENGTH % subjects.CHUNK_LENGTH
    num_tokens = subjects.BATCH * LENGTH
    size = subjects.BLOCK_ELEMENTS // VOCAB
    assert num_tokens // size > 2
