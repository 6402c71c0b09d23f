"""Batches from SeqIO: what is in them, that they repeat, and what is refused."""

import dataclasses
import itertools

import numpy as np
import odd_tasks
import pytest
import seqio
import tensorflow as tf

from t5x_fwdloss import tasks
from t5x_fwdloss.standalone import data

CONFIG = data.DatasetConfig(tasks.TASK_NAME, {"inputs": 12, "targets": 24}, 8)


def changed(**changes):
    return dataclasses.replace(CONFIG, **changes)


def first(count, config=CONFIG, split="validation", **options):
    return list(itertools.islice(data.batches(config, split, **options), count))


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert set(a) == set(b)
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_batch_holds_the_spelling_and_the_phonemes_shifted():
    (batch,) = first(1)
    word = tasks.entries()["validation"][0]
    spelling = [*tasks.VOCABULARY.encode(word.word), 1]
    said = [*tasks.VOCABULARY.encode(word.target), 1]
    assert batch["encoder_input_tokens"].shape == (8, 12)
    assert batch["encoder_input_tokens"][0, : len(spelling)].tolist() == spelling
    targets = batch["decoder_target_tokens"]
    assert targets[0, : len(said)].tolist() == said
    assert not targets[0, len(said) :].any()
    np.testing.assert_array_equal(batch["decoder_input_tokens"][:, 1:], targets[:, :-1])
    assert not batch["decoder_input_tokens"][:, 0].any()
    np.testing.assert_array_equal(batch["decoder_loss_weights"], targets != 0)


def test_equal_settings_give_equal_batches_and_another_seed_gives_others():
    options = {"split": "test", "shuffle": True, "num_epochs": None}
    one, again = (first(2, **options) for _ in range(2))
    assert_same(one, again)
    (other,) = first(1, changed(seed=1), **options)
    assert np.any(other["encoder_input_tokens"] != one[0]["encoder_input_tokens"])


def test_skipping_leaves_out_the_first_batches():
    options = {"split": "test", "shuffle": True, "num_epochs": None}
    assert_same(first(2, skip_batches=3, **options), first(5, **options)[3:])


def test_fixed_batches_are_the_first_of_the_split():
    assert_same(data.fixed_batches(CONFIG, "test", 2), first(2, split="test"))


def test_packing_puts_several_words_into_a_row():
    (batch,) = first(
        1, changed(pack=True, task_feature_lengths={"inputs": 40, "targets": 80})
    )
    assert batch["decoder_segment_ids"].max() >= 2
    assert batch["decoder_segment_ids"].shape == (8, 80)


def test_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"got 'cmudict_gtp'; registered: .*cmudict_g2p"
    ):
        first(1, changed(mixture_or_task_name="cmudict_gtp"))


def test_unknown_split_is_refused_with_the_splits_that_there_are():
    message = r"'cmudict_g2p', split 'dev' \(it declares test, train, validation\): got"
    with pytest.raises(ValueError, match=message):
        first(1, split="dev")


@pytest.fixture
def odd():
    with odd_tasks.registered():
        yield


def odd_config(task):
    return data.DatasetConfig(task, odd_tasks.lengths(task), batch_size=1)


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("task", "split"), odd_tasks.READ)
def test_every_split_that_seqio_reads_is_read(task, split):
    found = list(data.batches(odd_config(task), split))
    assert len(found) == odd_tasks.READ[task, split]


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("task", "split"), odd_tasks.REFUSED)
def test_what_seqio_refuses_is_a_sentence_with_its_reason(task, split):
    message = rf"SeqIO must be able .* {task!r}.*{odd_tasks.REFUSED[task, split]}"
    with pytest.raises(ValueError, match=message) as raised:
        list(data.batches(odd_config(task), split))
    assert "\n" not in str(raised.value)


def test_lengths_of_other_features_are_refused():
    with pytest.raises(ValueError, match="inputs, targets: got {'inputs': 12}"):
        first(1, changed(task_feature_lengths={"inputs": 12}))


@pytest.mark.parametrize("size", [0, -4])
def test_batch_sizes_below_one_are_refused(size):
    with pytest.raises(
        ValueError, match=f"BATCH_SIZE must be a whole number of at least 1: got {size}"
    ):
        first(1, changed(batch_size=size))


def test_vocabulary_must_fit_the_network():
    data.check_vocabulary(CONFIG, 259)
    with pytest.raises(ValueError, match=r"at least that of inputs .* 259: got 256"):
        data.check_vocabulary(CONFIG, 256)


@pytest.fixture
def empty_task():
    def dataset(split, shuffle_files=False, seed=None):
        return tf.data.Dataset.from_tensor_slices(
            {
                "inputs": tf.constant([], tf.string),
                "targets": tf.constant([], tf.string),
            }
        )

    seqio.TaskRegistry.add(
        "empty_task",
        source=seqio.FunctionDataSource(dataset, splits=["train"]),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features=dict(
            tasks.seqio.get_mixture_or_task("cmudict_g2p").output_features
        ),
    )
    yield "empty_task"
    seqio.TaskRegistry.remove("empty_task")


def test_empty_dataset_is_refused(empty_task):
    with pytest.raises(
        ValueError, match="'train' of empty_task must fill one batch of 8"
    ):
        first(1, changed(mixture_or_task_name=empty_task), split="train")


def test_too_few_batches_are_refused():
    with pytest.raises(ValueError, match="must have 4 batches of 2000: it has 3"):
        data.fixed_batches(changed(batch_size=2000), "validation", 4)
