"""The identity of a run: neither the mesh nor the machine is part of it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.analysis.store.checksum import checksum
from t5x_fwdloss.curvature.vectors import trees

# How far the loss of the same network may differ between two meshes or machines, relative
# to its value, by the narrowest type in which the network multiplies matrices.
LOSS_ROUNDING = {
    "float64": 1e-10,
    "float32": 1e-5,
    "float16": 1e-3,
    "bfloat16": 4e-3,
}


def of_settings(
    objective: Objective,
    measurements: Sequence[Any],
    *,
    seed: int,
    checkpoint: str,
    step: int | None,
    other_checkpoints: Mapping[str, str],
) -> dict[str, Any]:
    """The part of a run's identity that is known before anything is compiled.

    Args:
        objective: the loss over the fixed list of batches.
        measurements: dataclasses of settings, in order.
        seed: the run's seed.
        checkpoint: path of the checkpoint.
        step: its training step.
        other_checkpoints: path to checksum of the other checkpoints that are read.

    Another split that the run cannot read raises `ValueError`.
    """
    found = {
        "checkpoint": checkpoint,
        "step": step,
        "batches": objective.batches_hash,
        "seed": seed,
        "loss": objective.loss_record,
        "normalizer": {"kind": objective.normalizer.kind, "W": objective.W},
        "dropout_seed": objective.dropout_seed,
        "precision": objective.precision,
        "measurements": [
            {"kind": type(m).__name__, **dataclasses.asdict(m)} for m in measurements
        ],
    }
    splits = [split for m in measurements for split in m.other_splits]
    if splits:
        found["other_batches"] = {
            split: objective.on_split(split).batches_hash for split in splits
        }
    if other_checkpoints:
        found["other_checkpoints"] = dict(other_checkpoints)
    return found


def of_network(
    objective: Objective, params: PyTree, loss_value: float
) -> dict[str, Any]:
    """The part from parameters and network: checksum, activation dtype, loss."""
    return {
        "parameters": checksum(params),
        "activation_dtype": objective.activation_dtype(params),
        "loss_value": loss_value,
    }


def of_preconditioner(preconditioner: Preconditioner | None) -> dict[str, Any]:
    """The part from the optimizer, if a measurement is preconditioned; else empty."""
    if preconditioner is None:
        return {}
    settings = {
        "optimizer": preconditioner.optimizer,
        "learning_rate": preconditioner.learning_rate,
        "threshold": preconditioner.threshold,
    }
    return {
        "preconditioner": settings,
        # Computed by reductions over a mesh: equal only up to rounding.
        "preconditioner_norm": float(trees.norm(preconditioner.diagonal)),
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names of the wanted entries that differ from the found ones, in JSON's types.

    Computed numbers are compared up to rounding, everything else exactly.
    """
    return [name for name in wanted if not _same(name, found, wanted)]


def _same(name, found, wanted) -> bool:
    one, other = found.get(name), wanted[name]
    if not isinstance(one, float):
        return one == other
    if name == "preconditioner_norm":
        return math.isclose(one, other, rel_tol=LOSS_ROUNDING["float32"])
    if name != "loss_value":
        return one == other
    kind = wanted["activation_dtype"]
    if wanted.get("precision") != "highest" and kind == "float32":
        kind = "bfloat16"  # in which accelerators multiply at a lower precision
    return math.isclose(one, other, rel_tol=LOSS_ROUNDING.get(kind, 4e-3))
