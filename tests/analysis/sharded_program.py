"""The toy run on a mesh of 2 x 2 devices; prints what it found as JSON."""

import json
import tempfile

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_fwdloss import curvature
from t5x_fwdloss.analysis import Eigenpairs, Trace
from t5x_fwdloss.analysis.store import checksum

from . import runs, toy


def numbers(objective, params):
    """The numbers of two measurements, by name; not those that are rounding only."""
    context = runs.context(tempfile.mkdtemp(), objective=objective, params=params)
    found = {}
    for measurement in (
        Eigenpairs(num_largest=2, num_smallest=0, tolerance=1e-6),
        Trace(num_probes=4, block_size=2),
    ):
        found |= measurement.run(context).numbers
    skipped = ("orthogonality", "num_products")
    return {k: x.value for k, x in found.items() if k not in skipped}


def many(params, place):
    """Numbers of sums over more batches than a device lets wait, and of a large basis."""
    batches = [jax.tree.map(place, batch) for batch in toy.batches(4, num=160)]
    objective = runs.objective(batches)
    v = objective.gradient(params)
    product = objective.product("hessian", params)(v)
    basis = curvature.Basis(v)
    for number in range(160):
        basis.append(v, float(number))
    return {
        "num_batches": len(batches),
        "loss": objective.value(params),
        "slope": objective.jvp(params, v)[1],
        "gradient": float(curvature.norm(v)),
        "product": float(curvature.norm(product)),
        "basis": float(np.sum(basis.coefficients(basis.combination(np.ones(160))))),
    }


def main():
    """Place everything on the mesh, measure, print."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("data", "model"))
    place = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    params = toy.parameters()
    params = {
        "dense": {
            "kernel": place(P(None, "model"))(params["dense"]["kernel"]),
            "bias": place(P("model"))(params["dense"]["bias"]),
        }
    }
    batches = [jax.tree.map(place(P("data")), batch) for batch in toy.batches(6)]
    objective = runs.objective(batches)
    spec = lambda tree: jax.tree.map(lambda x: x.sharding.spec, tree)
    v = objective.gradient(params)
    stacked = jax.tree.map(lambda x: jax.numpy.stack([x, 2 * x]), v)
    several = jax.tree.map(lambda x: P(None, *x.sharding.spec), params)
    kept = {"gradient": spec(v) == spec(params)}
    for matrix in ("hessian", "gauss_newton"):
        for budget in (None, 0):
            product = objective.product(matrix, params, budget)
            kept[f"{matrix}, {budget}"] = spec(product(v)) == spec(params)
            kept[f"{matrix}, {budget}, stacked"] = (
                spec(product.stacked(stacked)) == several
            )
    print(  # noqa: T201
        json.dumps(
            {
                "kept": kept,
                "hash": objective.batches_hash,
                "checksum": checksum.checksum(params),
                "many": many(params, place(P("data"))),
                "numbers": numbers(objective, params),
            }
        )
    )


if __name__ == "__main__":
    main()
