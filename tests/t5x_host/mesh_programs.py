"""Every measurement on T5X's networks and meshes; see test_meshes.py.

    python -m t5x_host.mesh_programs DUMP_DIR CASE ...

Prints one JSON line per case, such as "2x4 t5 1": mesh, network, and in how many
dimensions T5X partitions the parameters; with "products" behind it, no measurement is
done. XLA writes the text of each program that it
compiles into DUMP_DIR (the caller sets the flag), which is read after each phase.
"""

import json
import math
import pathlib
import re
import sys
import tempfile

import flax.core
import jax
import numpy as np
from analysis import runs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from t5x_models import subjects
from t5x_models.test_networks import scalable_t5, t5

from t5x_fwdloss import analysis
from t5x_fwdloss.curvature.vectors import probes

# No array of a program is as large as one of these parameters, but for themselves.
SIZES = {"emb_dim": 40, "num_heads": 8, "head_dim": 6, "mlp_dim": 56}
NETWORKS = {"t5": t5, "scalable_t5": scalable_t5}
VOCAB, BATCH, INPUTS, TARGETS = 88, 8, 4, 5
# Sums, differences and counts that are rounding, or how a run went.
UNEQUAL = ("orthogonality", "num_products", "seconds", "time", "memory", "residual")


def measurements():
    """One of every kind, and of every estimator."""
    groups = {"encoder": "encoder/.*", "decoder": "decoder/.*"}
    probe = {"num_probes": 2, "block_size": 2}
    pairs = {"num_largest": 1, "num_smallest": 1, "max_steps": 6, "tolerance": 1e-9}
    return [
        analysis.DirectionalDerivatives(num_random=1, num_points=3),
        analysis.LossComparison(
            implementations=("custom_jvp",), chunk_lengths=(2,), num_rounds=1
        ),
        analysis.Eigenpairs(save_eigenvectors=True, max_basis=5, **pairs),
        analysis.Eigenpairs(matrix="gauss_newton", num_starts=2, **pairs),
        analysis.Trace(**probe),
        analysis.Trace(matrix="sampled_fisher", **probe),
        analysis.Trace(matrix="empirical_fisher", **probe),
        analysis.Trace(name="hutchpp", estimator="hutch++", sketch_size=2, **probe),
        analysis.Trace(name="xtrace", estimator="xtrace", **probe),
        analysis.SpectralDensity(matrix="fisher", num_probes=1, num_steps=4),
        analysis.GroupTraces(groups=groups, **probe),
        analysis.GroupDensities(groups=groups, num_probes=1, num_steps=3),
        analysis.Diagonal(**probe),
        analysis.NewtonStep(max_steps=3, tolerance=1e-6),
        analysis.GradientNoiseScale(),
        analysis.Landscape(directions=("gradient", "random"), num_points=3),
    ]


def batches():
    """Two batches of random tokens, with some padding."""
    rng = np.random.default_rng(0)
    for _ in range(2):
        targets = rng.integers(1, VOCAB, (BATCH, TARGETS)).astype(np.int32)
        targets[:2, -1] = 0
        yield {
            "encoder_input_tokens": rng.integers(1, VOCAB, (BATCH, INPUTS), np.int32),
            "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            "decoder_target_tokens": targets,
            "decoder_loss_weights": (targets > 0).astype(np.float32),
        }


class Programs:
    """The texts of programs, those since the last look."""

    def __init__(self, folder, partitions):
        self._folder, self._partitions = pathlib.Path(folder), partitions
        self._seen = set(self._folder.iterdir())

    def new(self):
        """The texts of new programs on all devices."""
        found = set(self._folder.glob("*after_optimizations.txt")) - self._seen
        self._seen |= found
        texts = [path.read_text() for path in sorted(found)]
        mark = f"num_partitions={self._partitions}"  # in the first line, however long
        return [text for text in texts if mark in text.split("\n", 1)[0]]


def shapes(text):
    """Every array of a piece of a program: its shape and the bytes of an entry."""
    for kind, bits, dims in re.findall(r"\b(pred|[a-z]+)(\d*)\[([\d,]*)\]", text):
        size = [int(x) for x in dims.split(",") if x]
        yield size, (int(bits or 8) if kind != "pred" else 8) // 8


COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collectives(texts):
    """The operation and the results of each collective."""
    for text in texts:
        for types, name in re.findall(
            rf" = (\([^()]*\)|\S+) ({COLLECTIVES})(?:-start)?\(", text
        ):
            yield name, list(shapes(types))


def looked_at(texts, full):
    """What the programs send, and which of a parameter's full size they hold."""
    found = list(collectives(texts))
    sent = sum(math.prod(size) * width for _, each in found for size, width in each)
    gathers = {
        math.prod(size)
        for name, each in found
        for size, _ in each
        if name == "all-gather"
    }
    held = {tuple(size) for text in texts for size, _ in shapes(text)}
    return {
        "programs": len(texts),
        "bytes": sent,
        "gathered": sorted(gathers & full),
        "held": sorted(size for size in held if math.prod(size) in full),
    }


def run(case, dump):
    """All measurements of a case."""
    from t5x import partitioning, utils

    from t5x_fwdloss import analyze
    from t5x_fwdloss.t5x_host import checkpoint

    sizes, network, dimensions, *only_products = case.split()
    data, model = map(int, sizes.split("x"))
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    partitioner = partitioning.PjitPartitioner(
        num_partitions=model,
        logical_axis_rules=partitioning.standard_logical_axis_rules(
            activation_partitioning_dims=1, parameter_partitioning_dims=int(dimensions)
        ),
    )
    partitioner.mesh = mesh = jax.sharding.Mesh(devices, ("data", "model"))
    programs = Programs(dump, data * model)
    subject = subjects.ours(
        "encoder_decoder",
        "custom_jvp",
        NETWORKS[network](vocab_size=VOCAB, **SIZES),
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
    )
    with analyze.on_mesh(partitioner):
        found = list(batches())
        initializer = utils.TrainStateInitializer(
            optimizer_def=None,
            init_fn=subject.get_initial_variables,
            input_shapes={name: x.shape for name, x in found[0].items()},
            partitioner=partitioner,
        )
        like = checkpoint.described(initializer, partitioner)
        whole = subjects.initial(subject, found[0])
        params = jax.tree.map(
            lambda x, like: jax.device_put(np.asarray(x), like.sharding),
            flax.core.unfreeze(whole),
            like,
        )
        by_data = NamedSharding(mesh, P("data"))
        placed = [
            {name: jax.device_put(x, by_data) for name, x in batch.items()}
            for batch in found
        ]
        full = {
            x.size * many
            for x in jax.tree.leaves(params)
            if x.size > 1000 and x.addressable_shards[0].data.size < x.size
            for many in (1, 2)
        }
        objective = analysis.Objective.from_model(subject, placed)
        programs.new()
        phases = {}

        def phase(name, result):
            jax.block_until_ready(result)
            phases[name] = looked_at(programs.new(), full)
            return result

        v = phase("probe", probes.random_like(0, params))
        phase("gradient", objective.gradient(params))
        for matrix in ("hessian", "gauss_newton"):
            phase(f"direct {matrix}", objective.product(matrix, params, 0)(v))
            product = objective.product(matrix, params, None)
            phase(f"linearizing {matrix}", ())
            phase(f"linearized {matrix}", product(v))
        phase(
            "stacked gauss_newton", product.stacked(probes.random_stack(0, [0, 1], v))
        )
        folder = pathlib.Path(tempfile.mkdtemp())
        context = runs.context(
            folder,
            objective=objective,
            params=params,
            vectors_path=lambda name: folder / f"{name}_vectors",
        )
        numbers = {}
        for measurement in [] if only_products else measurements():
            result = measurement.run(context)
            phase(measurement.name, ())
            numbers |= {
                f"{measurement.name}/{name}": number.value
                for name, number in result.numbers.items()
                if not any(word in name for word in UNEQUAL)
            }
    probe = [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(v)]
    return {"phases": phases, "numbers": numbers, "probe": probe, "full": sorted(full)}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for one in sys.argv[2:]:
        sys.stdout.write(json.dumps(run(one, sys.argv[1])) + "\n")
        sys.stdout.flush()
