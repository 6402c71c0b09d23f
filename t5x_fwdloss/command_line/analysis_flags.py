"""The flags of an analysis, on either host, beside those of T5X."""

from typing import Any

from absl import flags

FLAGS = {
    "follow": "wait for new checkpoints of a running job, to TRAIN_STEPS.",
    "plan": "print what the run would take per device, and end; measures nothing.",
}


def define() -> None:
    """Defines the flags."""
    for name, words in FLAGS.items():
        flags.DEFINE_boolean(name, False, words)


def given(values: Any) -> dict[str, bool]:
    """Those that are set, as keyword arguments of the analysis.

    Args:
        values: the parsed flags; some may be missing.
    """
    return {name: True for name in FLAGS if getattr(values, name, False)}
