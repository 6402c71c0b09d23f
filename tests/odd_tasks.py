"""SeqIO tasks that declare no splits, read several, or cannot be read; by both hosts."""

import contextlib

import seqio
import tensorflow as tf

SIZES = {"train": 3, "validation": 5}
LENGTHS = {"inputs": 4, "targets": 4}
VOCABULARY = seqio.ByteVocabulary()


def examples(count):
    inputs = [f"a{number}" for number in range(count)]
    return tf.data.Dataset.from_tensor_slices(
        {"inputs": inputs, "targets": ["b"] * count}
    )


def by_name(split, shuffle_files=False, seed=None):
    """A function that knows the names of its splits, as most are written."""
    return examples(SIZES[split])


class Several(seqio.DataSource):
    """A source that reads 'train+validation', as TFDS does."""

    supports_arbitrary_sharding = False

    def list_shards(self, split):
        return [split]

    def get_dataset(self, split, shuffle=True, seed=None, shard_info=None, **_):
        return examples(sum(SIZES[part] for part in split.split("+")))


def breaks_at_the_third(dataset):
    def check(example):
        with tf.control_dependencies([tf.debugging.assert_none_equal(example, b"a2")]):
            return tf.identity(example)

    return dataset.map(lambda x: {**x, "inputs": check(x["inputs"])})


TOKENS = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
FUNCTION = seqio.FunctionDataSource(by_name, splits=tuple(SIZES))
TASKS = {
    "by_name": (FUNCTION, TOKENS, ()),
    "undeclared": (Several(splits=()), TOKENS, ()),
    "undeclared_function": (seqio.FunctionDataSource(by_name, splits=()), TOKENS, ()),
    "several": (Several(splits=tuple(SIZES)), TOKENS, ()),
    "lacks_a_feature": (FUNCTION, TOKENS, ("extra",)),
    "no_tokens": (FUNCTION, [], ()),
    "breaks": (FUNCTION, [breaks_at_the_third, *TOKENS], ()),
}
# Task and split that SeqIO reads, and the number of examples.
READ = {
    ("by_name", "validation"): 5,
    ("undeclared", "train"): 3,
    ("undeclared_function", "validation"): 5,
    ("several", "train+validation"): 8,
}
DECLARED = r"\(it declares train, validation\): got KeyError: "
# Task and split that it does not read, and what must be said.
REFUSED = {
    ("by_name", "train+validation"): f"{DECLARED}'train\\+validation'",
    ("by_name", "validation[:2]"): f"{DECLARED}'validation",
    ("by_name", "dev"): f"{DECLARED}'dev'",
    ("undeclared", "dev"): "split 'dev': got KeyError: 'dev'",
    ("lacks_a_feature", "train"): "missing expected output feature .*: extra",
    ("no_tokens", "train"): "incorrect type for feature 'inputs' .*: Got string",
    ("breaks", "validation"): "split 'validation': got InvalidArgumentError: ",
}


@contextlib.contextmanager
def registered():
    """The tasks, in SeqIO's registry for as long as the block lasts."""
    for name, (source, preprocessors, more) in TASKS.items():
        features = {k: seqio.Feature(VOCABULARY) for k in (*LENGTHS, *more)}
        seqio.TaskRegistry.add(
            name,
            source=source,
            preprocessors=preprocessors,
            output_features=features,
        )
    try:
        yield
    finally:
        for name in TASKS:
            seqio.TaskRegistry.remove(name)


def lengths(task):
    """Feature lengths of a task."""
    return LENGTHS | dict.fromkeys(TASKS[task][2], 4)
