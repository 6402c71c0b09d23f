"""On a real network the measurements are those of its dense Hessian."""

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.analysis import Eigenpairs, Objective, Trace
from t5x_fwdloss.analysis.objective import preflight

from . import runs, tiny_t5

# Of a float32 network: rounding through its layers, in units of the largest entry.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def objective():
    return Objective.from_model(tiny_t5.model(), tiny_t5.batches())


@pytest.fixture(scope="module")
def params():
    return tiny_t5.parameters()


@pytest.fixture(scope="module")
def dense(objective, params):
    """The Hessian by columns of the identity: forward over reverse, without Lanczos."""
    flat, unravel = ravel_pytree(params)

    def loss(x):
        with jax.default_matmul_precision("highest"):
            return sum(objective.batch_loss(unravel(x), b) for b in objective.batches)

    return np.asarray(jax.jit(jax.hessian(loss))(flat), np.float64)


def context(objective, params, path):
    return runs.context(path, objective=objective, params=params, seed=0)


def test_every_self_check_passes(objective, params):
    assert preflight.has_forward_mode(objective, params, "this test")
    product = objective.product("hessian", params, memory_budget=0)
    key = jax.random.key(0)
    checks = preflight.check_objective(objective, params, key, product=product)
    assert len(checks) == 5  # the model's own loss_fn among them


def test_both_ends_of_the_spectrum_are_found(objective, params, dense, tmp_path):
    found = Eigenpairs(
        num_largest=3, num_smallest=2, tolerance=1e-4, max_steps=120
    ).run(context(objective, params, tmp_path))
    expected = np.linalg.eigvalsh(dense)
    rounding = ROUNDING * np.abs(expected).max()
    wanted = {f"largest_{i + 1}": expected[-1 - i] for i in range(3)}
    wanted |= {f"smallest_{i + 1}": expected[i] for i in range(2)}
    assert expected[0] < -100 * rounding  # a network's Hessian is indefinite
    for name, value in wanted.items():
        number = found.numbers[name]
        assert number.converged
        assert abs(number.value - value) <= number.error + rounding


def test_the_trace_lies_within_four_standard_errors(objective, params, dense, tmp_path):
    found = Trace(num_probes=60, block_size=1)
    number = found.run(context(objective, params, tmp_path)).numbers["trace"]
    assert abs(number.value - np.trace(dense)) <= 4 * number.error
