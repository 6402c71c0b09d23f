"""Strict modes for all curvature tests: no silent promotion of types or ranks."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
