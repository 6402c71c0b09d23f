"""The fixed list of batches: the first of the data, as T5X's converters make them."""

import numpy as np
import odd_tasks
import pytest

pytestmark = pytest.mark.t5x


def config(**changes):
    from t5x import utils

    from t5x_fwdloss import tasks

    settings = {
        "mixture_or_task_name": tasks.TASK_NAME,
        "task_feature_lengths": {"inputs": 16, "targets": 16},
        "split": "validation",
        "batch_size": 4,
        "shuffle": False,
        "seed": 0,
    }
    return utils.DatasetConfig(**settings | changes)


def load(num_batches=2, **changes):
    import seqio
    from t5x import partitioning

    from t5x_fwdloss.t5x_host import dataset

    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    converter = seqio.EncDecFeatureConverter
    return dataset.load_batches(config(**changes), num_batches, partitioner, converter)


def test_batches_are_the_first_examples_in_order():
    import seqio

    from t5x_fwdloss import tasks

    found = load()
    assert [x.shape for x in found[0].values()] == [(4, 16)] * 4
    words = [entry.word for entry in tasks.entries()["validation"][:8]]
    tokens = np.concatenate([batch["encoder_input_tokens"] for batch in found])
    decode = seqio.ByteVocabulary().decode
    assert [decode([int(t) for t in row if t > 1]) for row in tokens] == words


def test_a_seed_of_none_gives_the_same_batches_in_every_run():
    first, second = load(shuffle=True, seed=None), load(shuffle=True, seed=None)
    for one, other in zip(first, second, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_batches": 10**5}, r"must give NUM_BATCHES = 100000 .*: got \d+\."),
        ({"batch_size": 10**5}, r"got 0 \(no full batch\)\."),
        ({"batch_size": 0}, "positive multiple of the data axis .* BATCH_SIZE = 0"),
        (
            {"split": "tst"},
            r"'cmudict_g2p', split 'tst' \(it declares test, train, validation\): got",
        ),
        (
            {"task_feature_lengths": {"inputs": 4}},
            "got ValueError: .* missing features .*'targets'",
        ),
        (
            {"task_feature_lengths": {"inputs": 4, "targets": 4, "x": 4}},
            "got ValueError: .* extra features .*'x'",
        ),
        (
            {"mixture_or_task_name": "cmudict_g2q"},
            r"task or mixture: got 'cmudict_g2q'; close to it: cmudict_g2p\. A task is "
            "registered when its module is imported",
        ),
    ],
)
def test_data_that_cannot_be_had_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        load(**changes)


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    from t5x_fwdloss.t5x_host.dataset import check_batch_size

    check_batch_size(6, 3)
    with pytest.raises(ValueError, match="BATCH_SIZE = 8, data axis = 3"):
        check_batch_size(8, 3)


@pytest.fixture
def odd():
    with odd_tasks.registered():
        yield


def load_odd(task, split, num_batches):
    return load(
        num_batches,
        mixture_or_task_name=task,
        split=split,
        batch_size=1,
        task_feature_lengths=odd_tasks.lengths(task),
    )


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("task", "split"), odd_tasks.READ)
def test_every_split_that_seqio_reads_is_read(task, split):
    count = odd_tasks.READ[task, split]
    assert len(load_odd(task, split, count)) == count
    with pytest.raises(ValueError, match=f"must give NUM_BATCHES .*: got {count}"):
        load_odd(task, split, count + 1)


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(("task", "split"), odd_tasks.REFUSED)
def test_what_seqio_refuses_is_a_sentence_with_its_reason(task, split):
    message = rf"SeqIO must be able .* {task!r}.*{odd_tasks.REFUSED[task, split]}"
    with pytest.raises(ValueError, match=message) as raised:
        load_odd(task, split, 3)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("odd")
def test_vocabularies_that_differ_are_a_sentence():
    from t5x import utils
    from t5x_models import subjects

    from t5x_fwdloss.t5x_host.dataset import check_vocabularies

    model = subjects.stock("encoder_decoder")
    cfg = config(mixture_or_task_name="by_name")
    message = (
        "of the task 'by_name' must be those of MODEL: .*ByteVocabulary.*PassThrough"
    )
    with pytest.raises(ValueError, match=message) as raised:
        check_vocabularies(cfg, model, utils.verify_matching_vocabs)
    assert "\n" not in str(raised.value)
    check_vocabularies(cfg, model, lambda *_: None)


def test_the_batches_do_not_depend_on_the_number_of_processes(monkeypatch):
    from t5x import partitioning

    alone = load()
    # What the second of two processes is told by T5X.
    layout = partitioning.DataLayout(
        batch_size=4, shard_id=1, num_shards=2, is_first_host_in_replica_set=False
    )
    monkeypatch.setattr(
        partitioning.PjitPartitioner, "get_data_layout", lambda *_: layout
    )
    for one, other in zip(load(), alone, strict=True):
        for name in other:
            np.testing.assert_array_equal(one[name], other[name])
