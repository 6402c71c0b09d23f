"""Batches of a SeqIO task or mixture, as the network takes them.

A batch is a dict of NumPy arrays `[batch, length]`: `encoder_input_tokens`,
`decoder_input_tokens`, `decoder_target_tokens`, `decoder_loss_weights`, and with packing
also the segment ids and positions. Equal settings and seeds give equal batches.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import seqio

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.command_line import seqio_sentences

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """A dataset to read; the fields have the names of T5X's `DatasetConfig`.

    Attributes:
        mixture_or_task_name: a registered SeqIO task or mixture.
        task_feature_lengths: lengths of `inputs` and `targets`; longer ones are cut.
        batch_size: rows per batch; an incomplete last batch is dropped.
        pack: whether several examples share a row.
        seed: seed of the order when shuffling.
    """

    mixture_or_task_name: settings.Words
    task_feature_lengths: Mapping[settings.Words, settings.Positive]
    batch_size: settings.Positive
    pack: bool = False
    seed: settings.Seed = 0

    def __post_init__(self):
        """Checks every field (`ValueError`), by the names of gin's macros."""
        settings.check_fields(self, macros={})


def get_task(name: str) -> seqio.Task | seqio.Mixture:
    """The registered task or mixture of that name.

    Raises:
        ValueError: if there is none.
    """
    known = sorted([*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()])
    if name not in known:
        raise ValueError(
            "MIXTURE_OR_TASK_NAME must be a registered SeqIO task or mixture, and the "
            f"module that registers it imported in gin: got {name!r}; registered: "
            f"{', '.join(known) or 'none'}."
        )
    return seqio.get_mixture_or_task(name)


def check_vocabulary(config: DatasetConfig, vocab_size: int) -> None:
    """Checks that the network's vocabulary holds every token of the task.

    Raises:
        ValueError: if it does not.
    """
    for name, feature in get_task(config.mixture_or_task_name).output_features.items():
        if feature.vocabulary.vocab_size > vocab_size:
            raise ValueError(
                f"vocab_size of the network must be at least that of {name} in "
                f"{config.mixture_or_task_name}, {feature.vocabulary.vocab_size}: got "
                f"{vocab_size}."
            )


def batches(
    config: DatasetConfig,
    split: str,
    *,
    shuffle: bool = False,
    num_epochs: int | None = 1,
    skip_batches: int = 0,
) -> Iterator[Batch]:
    """The whole batches of a split, one after the other.

    Args:
        config: the dataset to read.
        split: for example "train".
        shuffle: whether to shuffle, by the seed.
        num_epochs: number of passes over the split; None: unlimited.
        skip_batches: number of batches to skip at the beginning.

    Raises:
        ValueError: if the task or the lengths do not exist or fit, if SeqIO cannot
            read the split, or if it does not fill a single batch.
    """
    name, lengths = config.mixture_or_task_name, dict(config.task_feature_lengths)
    task = get_task(name)
    if set(lengths) != set(task.output_features):
        raise ValueError(
            f"TASK_FEATURE_LENGTHS must name the features of {name}, "
            f"{', '.join(task.output_features)}: got {lengths}."
        )
    with seqio_sentences.reading(name, split):
        examples = task.get_dataset(
            lengths,
            split,
            shuffle=shuffle,
            num_epochs=num_epochs,
            seed=config.seed,
            try_in_mem_cache=False,  # a split is rarely read to its end
        )
        dataset = seqio.EncDecFeatureConverter(pack=config.pack)(examples, lengths)
        dataset = dataset.batch(config.batch_size, drop_remainder=True)
    found = _batches(dataset.skip(skip_batches).prefetch(2), name, split)
    first = next(found, None)
    if first is None:
        raise ValueError(
            f"The split {split!r} of {name} must fill one batch of "
            f"{config.batch_size}: it does not, or is empty."
        )
    return itertools.chain([first], found)


def _batches(dataset, name, split) -> Iterator[Batch]:
    with seqio_sentences.reading(name, split):
        yield from dataset.as_numpy_iterator()


def fixed_batches(config: DatasetConfig, split: str, num_batches: int) -> list[Batch]:
    """The first `num_batches` batches of a split, the same in every call.

    Raises:
        ValueError: if the split has fewer.
    """
    found = list(itertools.islice(batches(config, split), num_batches))
    if len(found) < num_batches:
        raise ValueError(
            f"The split {split!r} of {config.mixture_or_task_name} must have "
            f"{num_batches} batches of {config.batch_size}: it has {len(found)}."
        )
    return found
