"""A batch with the shapes of a SeqIO feature converter's, without any data."""

from collections.abc import Mapping

import numpy as np
import seqio


def batch_of_ones(
    converter: seqio.FeatureConverter,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
) -> dict[str, np.ndarray]:
    """The model's features, every entry one.

    Args:
        converter: the feature converter.
        task_feature_lengths: the lengths of the task's features.
        batch_size: the number of rows.
    """
    lengths = converter.get_model_feature_lengths(dict(task_feature_lengths))
    return {
        name: np.ones((batch_size, length), _dtype(converter, name))
        for name, length in lengths.items()
    }


def _dtype(converter, name):
    if name in converter.MODEL_FEATURES:
        return converter.MODEL_FEATURES[name].dtype.as_numpy_dtype
    return converter.PACKING_FEATURE_DTYPES[name].as_numpy_dtype
