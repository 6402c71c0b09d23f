"""What stands beside the measurements: which model, which data, which machine."""

import dataclasses

import jax
import numpy as np
import pytest

from . import cells, dense
from .test_numbers import EPS

OF_HEADER = [
    "num_encoder_layers",
    "num_decoder_layers",
    "emb_dim",
    "mlp_dim",
    "num_heads",
    "head_dim",
    "vocab_size",
]


def test_the_header_says_what_was_measured(kept):
    document = kept.document
    assert document["normalizer"]["W"] == pytest.approx(dense.normalizer(), rel=EPS)
    assert document["num_parameters"] == len(dense.flat(dense.parameters()))
    counted = sum(np.count_nonzero(b["decoder_loss_weights"]) for b in dense.batches())
    assert document["num_tokens"] == counted
    assert (document["step"], document["seed"]) == (70, cells.SEED)
    loss = kept["directional_derivatives"].value("loss")
    assert document["loss_value"] == pytest.approx(loss, rel=EPS)
    assert document["parameters_left_out"] == []
    sizes = dataclasses.asdict(dense.SIZES)
    assert document["model"] == {
        "class": "StandaloneModel",
        "sizes": {name: size for name, size in sizes.items() if name in OF_HEADER},
        "parameter_dtypes": ["float32"],
    }
    shapes = {name: list(np.shape(x)) for name, x in dense.batches()[0].items()}
    assert document["batch_shapes"] == shapes
    assert jax.default_backend() == document["environment"]["platform"]
