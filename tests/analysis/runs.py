"""A small run on the toy model, shared by the tests of this folder."""

from etils import epath

from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    Eigenpairs,
    HostInfo,
    Objective,
    Trace,
    run_analysis,
)
from t5x_fwdloss.analysis.measurements.context import Context

from . import toy

SEED = 3
NEVER = 10**6  # seconds between two saved states; a signal to stop saves as well


def objective(batches=None, **settings):
    model = toy.SoftmaxRegression(**{"factor": "NUM_REAL_TARGET_TOKENS"} | settings)
    return Objective.from_model(model, toy.batches(6) if batches is None else batches)


def host(**fields):
    given = {
        "checkpoint": "/models/toy/checkpoint_50",
        "step": 50,
        "load_params": lambda _: toy.parameters(4),
        "config_text": "SEED = 3\n",
        "task": "toy",
    }
    return HostInfo(**given | fields)


def measurements():
    return [
        DirectionalDerivatives(num_random=1, num_points=3, checkpoints=("/other",)),
        Eigenpairs(num_largest=2, num_smallest=1, max_steps=9),
        Trace(num_probes=8, block_size=4),
    ]


def run(output_dir, **overrides):
    given = {
        "objective": objective(),
        "params": toy.parameters(),
        "measurements": measurements(),
        "seed": SEED,
        "host": host(),
        "save_seconds": NEVER,
    } | overrides
    return run_analysis(
        given.pop("objective"), given.pop("params"), output_dir=output_dir, **given
    )


def context(path, cls=Context, **fields):
    """What a measurement is given; its saved states lie under `path`."""
    given = {
        "objective": None,
        "params": toy.parameters(),
        "seed": SEED,
        "load_params": None,
        "state_path": lambda name: epath.Path(path) / f"{name}.state",
        "save_seconds": NEVER,
    } | fields
    given["objective"] = given["objective"] or objective()
    return cls(**given)
