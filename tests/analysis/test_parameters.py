"""Parameters by name, and the sentence about a checkpoint of others."""

import jax
import jax.numpy as jnp
import pytest

from t5x_fwdloss.analysis.objective.parameters import check_same, placed


def test_parameters_that_differ_are_named_with_both_sides():
    model = {"a/kernel": (2, 3), "b/scale": (3,), "c/bias": (1,), "d/bias": (1,)}
    check_same(dict(model), model, "here")
    wrong = {"a/kernel": (2, 4), "c/bias": (1,), "e/bias": (1,)}
    message = (
        r"The arrays of here must be those of OPTIMIZER: 4 differ: "
        r"a/kernel: checkpoint \(2, 4\), optimizer \(2, 3\); b/scale: checkpoint has none, optimizer \(3,\); d/bias: "
        r"checkpoint has none, optimizer \(1,\); and 1 more\."
    )
    with pytest.raises(ValueError, match=message):
        check_same(wrong, model, "here", "arrays", "OPTIMIZER")


def test_placed_parameters_are_bound_to_their_device_in_the_same_memory():
    params = {"kernel": jax.jit(jnp.ones, static_argnums=0)(1024)}
    assert not params["kernel"].committed
    found = placed(params)
    assert found["kernel"].committed
    where = [x["kernel"].unsafe_buffer_pointer() for x in (params, found)]
    assert where[0] == where[1]
