"""The line search: known crossings of known functions, in few passes, and what has none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_fwdloss.training import line_search as lib


def parabola(crossing):
    """Falls at 0 and is back at its value, 7, at the crossing."""
    return lambda m: 7 + m * (m - crossing)


FUNCTIONS = {
    "parabola": parabola,
    # The model's guess is too large, and too small, by far.
    "wall": lambda crossing: lambda m: 7 - m + m * (m / crossing) ** 8,
    "plain": lambda crossing: (
        lambda m: 7 - jnp.tanh(m) + jnp.tanh(crossing) * m / crossing
    ),
    # NaN beyond the crossing: the loss does not exist there.
    "cliff": lambda crossing: lambda m: jnp.where(m > crossing, jnp.nan, 7 - m),
}


@functools.partial(jax.jit, static_argnums=0)
def searched(function, guess, descends=True):
    return lib.line_search(function, guess, descends)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("off", [0.02, 0.15, 0.5, 0.95, 1.0, 1.05, 1.7, 6.0, 70.0])
@pytest.mark.parametrize("crossing", [0.3, 1.0, 2.2, 7.0])
def test_the_crossing_is_found_to_10_percent_in_ten_passes(name, off, crossing):
    found = searched(FUNCTIONS[name](crossing), jnp.float32(off * crossing))
    assert float(found.multiple) == pytest.approx(crossing, rel=0.1)
    assert int(found.passes) <= 10


@pytest.mark.parametrize("crossing", [0.02, 0.5, 1.9, 5.0, 300.0])
def test_an_exact_model_takes_four_passes_however_far(crossing):
    found = searched(parabola(crossing), jnp.float32(crossing))
    assert float(found.multiple) == pytest.approx(crossing, rel=0.1)
    assert int(found.passes) == 4


@pytest.mark.parametrize("crossing", [0.3, 1.0, 2.2, 40.0])
def test_without_a_guess_the_search_starts_from_the_step_itself(crossing):
    found = searched(parabola(crossing), jnp.float32(np.nan))
    assert float(found.multiple) == pytest.approx(crossing, rel=0.1)
    assert int(found.passes) <= 10


def test_the_first_passes_are_the_losses_before_and_after_the_step():
    seen = []

    def function(m):
        jax.debug.callback(lambda x: seen.append(float(x)), m, ordered=True)
        return parabola(5.0)(m)

    found = jax.block_until_ready(searched(function, jnp.float32(4.0)))
    jax.effects_barrier()
    assert seen[:3] == [0.0, 1.0, 4.0]
    assert len(seen) == int(found.passes)
    assert (float(found.loss), float(found.loss_after)) == (7.0, 3.0)


def test_what_has_no_crossing_ends_without_one():
    uphill = searched(lambda m: 7 + m, jnp.float32(-2.0), False)
    assert int(uphill.passes) == 2
    assert (float(uphill.loss), float(uphill.loss_after)) == (7.0, 8.0)
    for endless in (lambda m: 7 - m, lambda m: 7 + m, lambda m: m * jnp.nan):
        found = searched(endless, jnp.float32(3.0))
        assert int(found.passes) == 10
        assert np.isnan(found.multiple)
