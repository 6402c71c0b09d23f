"""Plans and runs on one device and on a mesh; prints the bytes of both as JSON.

The bytes of a run are those of the arrays that live when a compiled function is called,
plus what the compiler says that this function needs, on the first device.
"""

import contextlib
import json
import tempfile
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_fwdloss.analysis import (
    Eigenpairs,
    Objective,
    SpectralDensity,
    Trace,
    run,
    run_analysis,
)
from t5x_fwdloss.analysis.objective import programs
from t5x_fwdloss.analysis.plan import plan
from t5x_fwdloss.curvature.krylov import rows as row_ops
from t5x_fwdloss.curvature.products import linearized
from t5x_fwdloss.curvature.vectors import layout

from . import toy

FEATURES, CLASSES, LENGTH = 64, 96, 12
BATCH, NUM_BATCHES = 16, 3
BUDGET = 2**31


def measurements():
    return [
        Eigenpairs(num_largest=2, num_smallest=1, max_steps=12, max_basis=10),
        Trace(matrix="gauss_newton", num_probes=8, block_size=4),
        SpectralDensity(matrix="fisher", num_probes=1, num_steps=6),
    ]


def batches(place):
    rng = np.random.default_rng(0)
    for _ in range(NUM_BATCHES):
        shape = BATCH, LENGTH
        batch = {
            "features": rng.normal(size=(*shape, FEATURES)).astype(np.float32),
            "decoder_target_tokens": rng.integers(1, CLASSES, shape).astype(np.int32),
            "decoder_loss_weights": np.ones(shape, np.float32),
        }
        yield {name: place(x, P("data")) for name, x in batch.items()}


class Watch:
    """The largest number of bytes on the first device, by what the run was doing."""

    def __init__(self, mesh):
        self.device = mesh.devices.flat[0]
        self.now, self.largest = "checks", {}

    def note(self, more=0):
        # By address: several arrays may share their memory.
        live = {
            shard.data.unsafe_buffer_pointer(): shard.data.nbytes
            for x in jax.live_arrays()
            if not x.is_deleted()
            for shard in x.addressable_shards
            if shard.device == self.device
        }
        total = sum(live.values()) + more
        self.largest[self.now] = max(self.largest.get(self.now, 0), total)

    def called(self, function):
        def call(*args, **kwargs):
            lower = getattr(function, "lower", None)
            compiled = lower(*args, **kwargs).compile() if lower else function
            sizes = compiled.memory_analysis()
            self.note(
                sizes.temp_size_in_bytes
                + sizes.output_size_in_bytes
                - sizes.alias_size_in_bytes
            )
            return function(*args, **kwargs)

        call.trace = getattr(function, "trace", None)
        call.lower = getattr(function, "lower", None)
        return call

    @contextlib.contextmanager
    def watching(self):
        """Every call of a compiled function that counts is noted."""
        init, jitted = linearized._Compiled.__init__, programs.Programs._jitted
        once, measure = linearized.CompiledMap.linearized, run._measure

        def compiled(this, apply, direct):
            init(this, apply, direct)
            this.apply, this.direct = self.called(this.apply), self.called(this.direct)

        def measured(measurement, *args):
            self.now = measurement.name
            return measure(measurement, *args)

        with contextlib.ExitStack() as stack:
            for owner, name, new in (
                (linearized._Compiled, "__init__", compiled),
                (programs.Programs, "_jitted", lambda *a: self.called(jitted(*a))),
                (
                    linearized.CompiledMap,
                    "linearized",
                    lambda *a: _Linearize(self, once(*a)),
                ),
                (run, "_measure", measured),
                *(
                    (row_ops, name, self.called(getattr(row_ops, name)))
                    for name in ("subtract", "measure", "local_step")
                ),
            ):
                stack.enter_context(mock.patch.object(owner, name, new))
            yield


class _Linearize:
    """A compiled linearization whose calls are noted."""

    def __init__(self, watch, compiled):
        self._watch, self._compiled = watch, compiled
        self.memory_analysis = compiled.memory_analysis

    def __call__(self, *args):
        return self._watch.called(self._compiled)(*args)


def planned_and_seen(devices, data):
    """Bytes on each device by the plan, and in a run, by measurement."""
    mesh = Mesh(np.asarray(devices).reshape(data, -1), ("data", "model"))
    place = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
    given = list(batches(place))
    model = toy.SoftmaxRegression(factor="NUM_REAL_TARGET_TOKENS")
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(FEATURES, CLASSES)).astype(np.float32)
    bias = rng.normal(size=CLASSES).astype(np.float32)
    params = {
        "dense": {
            "kernel": place(kernel, P(None, "model")),
            "bias": place(bias, P("model")),
        }
    }
    shapes = layout.described(params)
    rows = plan.rows(
        plan.Planned(
            Objective.from_model(model, given[:1]),
            shapes,
            measurements(),
            num_batches=NUM_BATCHES,
            memory_budget=BUDGET,
            fold=False,
        )
    )
    watch = Watch(mesh)
    with watch.watching():
        status = run_analysis(
            Objective.from_model(model, given),
            params,
            measurements=measurements(),
            output_dir=tempfile.mkdtemp(),
            memory_budget=BUDGET,
            fold=False,
        )
    assert status == 0
    return {
        row.name: {"planned": row.total, "seen": watch.largest[row.name]}
        for row in rows
    }


def main():
    """One device, then eight; prints the bytes."""
    found = {
        "1": planned_and_seen(jax.devices()[:1], 1),
        "8": planned_and_seen(jax.devices()[1:], 2),
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
