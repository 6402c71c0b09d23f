"""T5X's tests of losses, metrics and models pass with ours put in T5X's place.

The test modules are those of the installed T5X. They import T5's tasks, which T5X users
have and this package does not need: `make test-t5x-own` installs what is missing. It
also turns the run-time type checks of the other tests off, which refuse what T5X's mocks
pass (integers for logits, a number for a random key).
"""

import contextlib
import functools
import importlib
import importlib.util
import unittest
import warnings

import pytest

from t5x_fwdloss import losses

MODULES = ("losses_test", "metrics_test", "models_test")
NUM_CASES = 46
NEEDED = ("t5x", "t5", "babel", "nltk", "rouge_score", "sacrebleu", "mesh_tensorflow")
NEEDED += ("sklearn", "pandas", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [pytest.mark.t5x, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def only_where_they_can_run(request):
    """Skips the tests, with the command that runs them."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}; make test-t5x-own")
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("with run-time type checks; make test-t5x-own")


def cases():
    """Every test of T5X's three modules by name; none where they cannot be imported."""
    if MISSING:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of T5 and what it imports
        modules = [importlib.import_module(f"t5x.{name}") for name in MODULES]
    loader = unittest.defaultTestLoader
    suites = [loader.loadTestsFromModule(module) for module in modules]
    return {case.id(): case for suite in suites for cls in suite for case in cls}


CASES = cases()


def with_choice(base, impl):
    """One of our classes with another default of `loss_impl`, mocked or not."""

    def construct(self, *args, **kwargs):
        base.__init__(self, *args, **{"loss_impl": impl} | kwargs)

    return type(base.__name__, (base,), {"__init__": construct, "_loss_impl": impl})


@contextlib.contextmanager
def in_place(impl):
    """Our functions and classes under T5X's names."""
    import t5x.losses
    import t5x.models

    from t5x_fwdloss import models

    classes = {
        "EncoderDecoderModel": models.FwdLossEncoderDecoderModel,
        "DecoderOnlyModel": models.FwdLossDecoderOnlyModel,
    }
    factor = "get_loss_normalizing_factor_and_weights"
    with pytest.MonkeyPatch.context() as patch:
        for name, base in classes.items():
            patch.setattr(t5x.models, name, with_choice(base, impl))
        for name in ("cross_entropy_with_logits", "compute_weighted_cross_entropy"):
            ours = functools.partial(getattr(losses, name), impl=impl)
            patch.setattr(t5x.losses, name, ours)
        patch.setattr(t5x.losses, factor, getattr(losses, factor))
        yield


def test_all_of_t5x_s_tests_are_found():
    assert len(CASES) == NUM_CASES


@pytest.mark.parametrize("impl", losses.IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES or ["T5X's tests"])
def test_t5x_s_own_test_passes(name, impl):
    with in_place(impl):
        CASES[name].debug()  # raises what the test raises
