"""Strict modes for the losses: no silent promotion of dtypes or ranks."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion(request):
    if request.node.get_closest_marker("t5x"):  # T5X's own code promotes both
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
