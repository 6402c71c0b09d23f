"""A small sweep on the toy model: checkpoints are folders, parameters drawn by step."""

import json
import pathlib

import pytest

from t5x_fwdloss.analysis import Eigenpairs, Trace, run_sweep
from t5x_fwdloss.analysis.report import figures

from . import runs, toy

STEPS = (100, 200, 300)


def model_folder(path, steps=STEPS):
    for step in steps:
        (path / f"checkpoint_{step}").mkdir(parents=True)
    return path


def step_of(path):
    return int(pathlib.Path(path).name.removeprefix("checkpoint_"))


def load(path):
    step = step_of(path)
    return toy.parameters(step), runs.host(checkpoint=str(path), step=step)


# Where the numbers do not matter.
FEW = (Trace(num_probes=4),)


def measurements():
    return [
        Eigenpairs(num_largest=2, num_smallest=1, max_steps=16),
        Trace(num_probes=8, block_size=4),
    ]


def run(model_dir, output_dir, steps="all", drawn=None, **overrides):
    """A sweep; its pages have no figures, which go to `drawn` by their names."""
    given = {
        "objective": runs.objective(),
        "load": load,
        "measurements": measurements(),
        "seed": runs.SEED,
        "poll_seconds": 1,
    } | overrides

    def keep(figure, salt):
        # To write each as SVG takes longer than to measure.
        if drawn is not None:
            drawn[salt] = figure
        return "<svg/>"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "to_svg", keep)
        return run_sweep(
            given.pop("objective"),
            given.pop("load"),
            model_dir=model_dir,
            steps=steps,
            output_dir=output_dir,
            **given,
        )


def sweep_json(path):
    return json.loads((path / "sweep.json").read_text())


def results(path):
    """The measurements of a run's folder, without their wall times."""
    found = json.loads((path / "results.json").read_text())["measurements"]
    return [{k: x for k, x in entry.items() if k != "seconds"} for entry in found]
