"""Batches of a SeqIO task or mixture, as the network takes them.

A batch is a dict of NumPy arrays `[batch, length]`: `encoder_input_tokens`,
`decoder_input_tokens`, `decoder_target_tokens`, `decoder_loss_weights`, and with packing
also the segment ids and positions. Equal settings and seeds give equal batches.
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import seqio

Batch = dict[str, np.ndarray]


def get_task(name: str) -> seqio.Task | seqio.Mixture:
    """The registered task or mixture of that name.

    Raises:
        ValueError: if there is none.
    """
    known = sorted([*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()])
    if name not in known:
        raise ValueError(
            "MIXTURE_OR_TASK_NAME must be a registered SeqIO task or mixture, and the "
            f"module that registers it imported in gin: got {name!r}; "
            f"registered: {', '.join(known) or 'none'}."
        )
    return seqio.get_mixture_or_task(name)


def vocabulary_size(task: seqio.Task | seqio.Mixture) -> int:
    """The number of token ids of the larger vocabulary."""
    return max(
        feature.vocabulary.vocab_size for feature in task.output_features.values()
    )


def batches(
    task_name: str,
    task_feature_lengths: Mapping[str, int],
    split: str,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int | None = 0,
    pack: bool = False,
    num_epochs: int | None = 1,
    skip_batches: int = 0,
) -> Iterator[Batch]:
    """The whole batches of a split, one after the other.

    Args:
        task_name: a registered SeqIO task or mixture.
        task_feature_lengths: lengths of `inputs` and `targets`; longer ones are cut.
        split: for example "train".
        batch_size: rows per batch; examples that do not fill a batch are dropped.
        shuffle: whether to shuffle, by the seed.
        seed: of the order.
        pack: whether several examples share a row.
        num_epochs: how often the split is gone through; None for ever.
        skip_batches: how many batches to leave out at the beginning.

    Raises:
        ValueError: if the task, the split or the lengths do not exist or fit, or if
            the split does not fill a single batch.
    """
    task = get_task(task_name)
    if split not in task.splits:
        raise ValueError(
            f"split must be one of those of {task_name}, {sorted(task.splits)}: "
            f"got {split!r}."
        )
    if set(task_feature_lengths) != set(task.output_features):
        raise ValueError(
            f"TASK_FEATURE_LENGTHS must name the features of {task_name}, "
            f"{sorted(task.output_features)}: got {dict(task_feature_lengths)}."
        )
    if batch_size < 1:
        raise ValueError(f"BATCH_SIZE must be at least 1: got {batch_size}.")
    dataset = seqio.get_dataset(
        task_name,
        task_feature_lengths,
        dataset_split=split,
        shuffle=shuffle,
        num_epochs=num_epochs,
        feature_converter=seqio.EncDecFeatureConverter(pack=pack),
        seed=seed,
    )
    dataset = dataset.batch(batch_size, drop_remainder=True).skip(skip_batches)
    found = dataset.prefetch(2).as_numpy_iterator()
    first = next(found, None)
    if first is None:
        raise ValueError(
            f"The split {split!r} of {task_name} must fill one batch of {batch_size}: "
            "it does not, or is empty."
        )
    return itertools.chain([first], found)


def fixed_batches(
    task_name: str,
    task_feature_lengths: Mapping[str, int],
    split: str,
    batch_size: int,
    num_batches: int,
    **options,
) -> list[Batch]:
    """The first `num_batches` batches of a split, the same in every call.

    Args:
        task_name: a registered SeqIO task or mixture.
        task_feature_lengths: lengths of `inputs` and `targets`.
        split: for example "validation".
        batch_size: rows per batch.
        num_batches: how many.
        **options: those of `batches`.

    Raises:
        ValueError: if `num_batches` is below one or the split has fewer.
    """
    if num_batches < 1:
        raise ValueError(f"NUM_BATCHES must be at least 1: got {num_batches}.")
    found = batches(task_name, task_feature_lengths, split, batch_size, **options)
    taken = list(itertools.islice(found, num_batches))
    if len(taken) < num_batches:
        raise ValueError(
            f"The split {split!r} of {task_name} must have NUM_BATCHES batches of "
            f"BATCH_SIZE examples: it has {len(taken)} of {batch_size}, not "
            f"{num_batches}."
        )
    return taken
