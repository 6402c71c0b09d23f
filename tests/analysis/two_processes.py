"""One process of an analysis of the toy model on a mesh of 2 x 2 devices.

    python -m tests.analysis.two_processes OUTPUT_DIR [ADDRESS COUNT INDEX [LEAVE_AT]]

Alone without an address. Standard output has, as JSON, the operations that touched
arrays of several processes and were no compiled function of this package, and the
statuses of two calls of a sweep. With LEAVE_AT two measurements only, and SIGTERM to the second process at that step (0: none).
"""

import dataclasses
import json
import os
import pathlib
import re
import sys
import threading
import time

import jax
import numpy as np
import stops
from jax._src import pjit
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_fwdloss import analysis
from t5x_fwdloss.analysis import optimizer
from t5x_fwdloss.analysis.sweep import steps
from t5x_fwdloss.curvature.products import linearized

from . import toy

SMALL = {
    "num_probes": 2,
    "num_steps": 3,
    "num_random": 1,
    "num_points": 3,
    "num_largest": 1,
    "num_smallest": 1,
    "max_steps": 6,
    "tolerance": 0.3,
    "num_rounds": 2,
}
LITTLE_MEMORY = 2000
STEPS = (1, 2)


def small(kind, /, **settings):
    """A measurement by its class, with counts that take little time."""
    cls = getattr(analysis, kind)
    fields = {field.name for field in dataclasses.fields(cls)}
    given = {k: v for k, v in SMALL.items() if k in fields}
    return cls(**given | settings)


def all_measurements():
    """Those of ALL_MEASUREMENTS, and settings that take other paths than the default."""
    root = pathlib.Path(__file__).resolve().parents[2]
    text = (root / "configs" / "analysis" / "measurements.gin").read_text()
    listed = re.search(r"^ALL_MEASUREMENTS = \[(.*?)^\]", text, re.M | re.S)[1]
    found = [
        small(name, **({"matrix": matrix} if matrix else {}))
        for matrix, name in re.findall(r"@(?:(\w+)/)?analysis\.(\w+)\(\)", listed)
    ]
    eigenpairs = small(
        "Eigenpairs",
        name="block",
        group="dense/kernel",
        preconditioned=True,
        damping=0.1,
        save_eigenvectors=True,
    )
    return [
        *found,
        small("Trace", name="xtrace", estimator="xtrace"),
        small(
            "Trace",
            matrix="gauss_newton",
            name="hutchpp",
            estimator="hutch++",
            sketch_size=2,
        ),
        eigenpairs,
        small(
            "DirectionalDerivatives",
            name="directions",
            along_preconditioned_gradient=True,
            random_normalization="filter",
            eigenvectors_of="block",
            checkpoints=("/other",),
        ),
    ]


def spec(x):
    """The last axis that two divides, over `model`."""
    axes = [i for i, size in enumerate(x.shape) if size % 2 == 0]
    return PartitionSpec(
        *(["model" if i in axes[-1:] else None for i in range(x.ndim)])
    )


def placed(mesh, tree, spec_of):
    """The tree's arrays on the mesh, or as they are without one."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(
            np.shape(x), NamedSharding(mesh, spec_of(x)), np.asarray(x).__getitem__
        ),
        tree,
    )


def run(output_dir, mesh=None, measurements=None, **settings):
    """The analysis; the same on every mesh and number of processes."""
    params, other = (jax.tree.map(np.asarray, toy.parameters(seed)) for seed in (0, 1))
    diagonal = jax.tree.map(lambda x: 1 / (np.abs(x) + 0.1), other)
    batches = [
        placed(mesh, batch, lambda _: PartitionSpec("data")) for batch in toy.batches(6)
    ]
    model = toy.SoftmaxRegression(z_loss=0.01, factor="NUM_REAL_TARGET_TOKENS")
    num_microbatches = settings.pop("num_microbatches", 3)
    objective = analysis.Objective.from_model(
        model, batches, num_microbatches=num_microbatches
    )
    host = analysis.HostInfo(
        checkpoint="/model/checkpoint_3",
        step=3,
        mesh=mesh,
        load_params=lambda _: placed(mesh, other, spec),
        load_preconditioner=lambda: optimizer.Preconditioner(
            placed(mesh, diagonal, spec), "toy"
        ),
    )
    return analysis.run_analysis(
        objective,
        placed(mesh, params, spec),
        measurements=measurements or all_measurements(),
        output_dir=output_dir,
        host=host,
        **settings,
    )


def sweep(folder, mesh=None, index="0"):
    """A sweep that follows a training, and the same again when the training has ended.

    Only the first process sees the checkpoints: their listing in the second is another.
    """
    model_dir, out = pathlib.Path(f"{folder}_model"), pathlib.Path(f"{folder}_sweep")
    first, second = (model_dir / f"checkpoint_{step}" for step in STEPS)

    def train():
        while not (out / "step_1" / "results.json").exists():
            time.sleep(0.05)
        second.mkdir()

    def load(path):
        step = int(path.rpartition("_")[2])
        params = jax.tree.map(np.asarray, toy.parameters(step))
        host = analysis.HostInfo(checkpoint=path, step=step, mesh=mesh)
        return placed(mesh, params, spec), host

    if index == "0":
        first.mkdir(parents=True)
        threading.Thread(target=train).start()
    else:
        steps.find = lambda path: {7: f"{path}/checkpoint_7"}
        steps.finished = lambda _: []
    batches = [
        placed(mesh, batch, lambda _: PartitionSpec("data")) for batch in toy.batches(6)
    ]
    given = {
        "measurements": [small("Eigenpairs", max_steps=9)],
        "model_dir": model_dir,
        "output_dir": out,
        "poll_seconds": 1,
    }
    objective = analysis.Objective.from_model(toy.SoftmaxRegression(), batches)
    return [
        analysis.run_sweep(objective, load, steps="all", follow_until=2, **given),
        analysis.run_sweep(objective, load, steps=STEPS, **given),
    ]


def watch():
    """A list that fills with operations of JAX that were issued one by one."""
    found: list[str] = []
    original = pjit._pjit_call_impl_python
    library = os.path.dirname(pjit.__file__)

    def call(*args, jaxpr, name, **params):
        spread = [
            x for x in args if isinstance(x, jax.Array) and not x.is_fully_addressable
        ]
        # The first call of every compiled function comes by here; eager operations are
        # compiled functions that JAX made itself.
        if spread and library in str(jaxpr.jaxpr.debug_info.func_src_info):
            found.append(f"{name} of {spread[0].shape}")
        return original(*args, jaxpr=jaxpr, name=name, **params)

    pjit._pjit_call_impl_python = call
    return found


def main(output_dir, address=None, count="1", index="0", leave_at=None):
    """Joins the others, measures, prints."""
    mesh = None
    if address:
        jax.distributed.initialize(address, int(count), int(index))
        devices = np.asarray(jax.devices()).reshape(2, 2)
        mesh = Mesh(devices, ("data", "model"))
    if index == "1":
        # Enough for some batches: what is kept must be agreed.
        linearized.free_bytes = lambda: LITTLE_MEMORY
    found = watch()
    settings = {}
    if leave_at is not None:
        measurements = [small("Eigenpairs"), small("SpectralDensity")]
        # As if their clocks differed: when to save must be agreed.
        save_seconds = 0 if index == "0" else 10**6
        settings = {"measurements": measurements, "save_seconds": save_seconds}
        if index == "1":
            stops.signal_at(int(leave_at))
    status = run(output_dir, mesh, **settings)
    said = {"one_by_one": found}
    if leave_at is None:
        said["sweep"] = sweep(output_dir, mesh, index)
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
