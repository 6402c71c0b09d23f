"""One run of the whole engine on a mesh of forced host devices; see test_mesh.py.

Prints one JSON line per mesh with the numbers and the shardings found. Programs are
dumped by XLA as text (the caller sets the flag), after its own mark of the mesh.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from t5x_fwdloss import curvature

SHAPES = {
    "decoder/mlp/wi/kernel": ((32, 64), ("data", "model")),
    "decoder/mlp/wo/kernel": ((64, 32), ("model", None)),
    "decoder/norm/scale": ((40,), ("model",)),
    "token_embedder/embedding": ((64, 24), ("model", "data")),
}


def tree_of(leaves):
    tree = {}
    for path, leaf in leaves.items():
        node = tree
        *parents, last = path.split("/")
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def problem(mesh):
    """Parameters, and the map diag(d) + u u^T: no gather needed, known spectrum."""
    params, diagonal, direction = {}, {}, {}
    for number, (path, (shape, spec)) in enumerate(SHAPES.items()):
        rng = np.random.default_rng(number)
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        place = lambda x, s=sharding: jax.device_put(x.astype(np.float32), s)
        params[path] = place(np.zeros(shape))
        diagonal[path] = place(rng.normal(size=shape) + 3 * (rng.random(shape) < 0.002))
        direction[path] = place(rng.normal(size=shape) / 20)
    d, u = tree_of(diagonal), tree_of(direction)

    @jax.jit
    def matvec(v, d, u):
        dot = sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), u, v)))
        return jax.tree.map(lambda d, u, v: d * v + u * dot, d, u, v)

    many = jax.jit(jax.vmap(matvec, in_axes=(0, None, None)))
    return tree_of(params), lambda v: matvec(v, d, u), lambda vs: many(vs, d, u)


def slope(params):
    """The derivative of a loss with a matrix product, its kernel sharded."""
    x = np.random.default_rng(0).normal(size=(256, 32)).astype(np.float32) / 6

    def loss(params, x):
        layer = params["decoder"]
        x = x * (1 + jnp.sum(layer["norm"]["scale"]))
        return jnp.sum(jnp.tanh(x @ layer["mlp"]["wi"]["kernel"]) ** 2)

    v = curvature.random_like(2, params)
    moved = curvature.axpy(0.1, curvature.random_like(3, params), params)
    return float(jax.jit(curvature.directional_derivative(loss))(moved, v, x)[1])


def curvatures(mesh):
    """v.Av of two matrices by linearized products, stacked; and if they are folded."""
    rng = np.random.default_rng(0)

    def place(shape, *axes):
        array = rng.normal(size=shape).astype(np.float32)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    params = {"wi": place((16, 32), None, "model"), "wo": place((32, 24), "model")}
    x = place((8, 16), "data")

    def outputs(params, x):
        hidden = jnp.tanh(x @ params["wi"] / 4)
        by_batch = NamedSharding(mesh, PartitionSpec("data"))
        is_explicit = AxisType.Explicit in mesh.axis_types
        options = {"out_sharding": by_batch} if is_explicit else {}
        return jnp.einsum("bh,he->be", hidden, params["wo"] / 4, **options)

    loss = lambda params, x: jnp.sum(jnp.sin(outputs(params, x)))
    vs = curvature.random_stack(0, [0, 1], params)
    found = []
    for linear_map in (
        curvature.hessian_map(loss),
        curvature.gauss_newton_map(outputs, lambda z, u, _: jnp.cos(z) * u),
    ):
        product = curvature.AmortizedProduct(linear_map, params, [(x,)])
        pairs = zip(
            curvature.unstack(vs), curvature.unstack(product.stacked(vs)), strict=True
        )
        found += [float(curvature.inner(v, product)) for v, product in pairs]
        assert product.folding == "folded", product.folding
    return found


def kept(tree, params):
    """For each leaf, whether it is sharded like the parameter."""
    return [
        leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)
        for leaf, param in zip(
            jax.tree.leaves(tree), jax.tree.leaves(params), strict=True
        )
    ]


def run(mesh):
    params, matvec, many = problem(mesh)
    is_explicit = AxisType.Explicit in mesh.axis_types
    states = []
    pairs = curvature.eigenpairs(
        matvec,
        curvature.random_like(0, params, "normal"),
        num_largest=3,
        num_smallest=1,
        max_steps=60,
        max_basis=24,
        tolerance=3e-3,
        on_step=states.append,
    )
    samples = curvature.slq(matvec, params, 0, num_probes=2, num_steps=12)
    grid = np.linspace(-4, 6, 50)
    traces = {
        "hutchinson": curvature.hutchinson_trace(matvec, params, 0, num_probes=3).mean,
        "block": curvature.hutchinson_trace(
            many, params, 0, num_probes=4, block_size=4
        ).mean,
        "hutchpp": curvature.hutchpp_trace(
            matvec, params, 0, sketch_size=3, num_probes=3
        ).mean,
        "xtrace": curvature.xtrace(matvec, params, 0, num_probes=4).mean,
    }
    sums = curvature.probe_estimates(matvec, params, 0, num_probes=3, diagonal=True)
    mask = curvature.group_mask(params, "decoder/.*")
    group = curvature.restricted(matvec, mask)(curvature.random_like(1, params))
    filters = curvature.filter_normalized(pairs.eigenvectors[0], params)
    vectors = {
        "probe": curvature.random_like(0, params),
        "eigenvector": pairs.eigenvectors[0],
        "diagonal": sums.diagonal,
        "group": group,
        "filters": filters,
        "row": states[-1].space.basis.row(0),
        "axpy": curvature.axpy(2.0, pairs.eigenvectors[0], group),
    }
    return {
        "mesh": list(mesh.devices.shape),
        "eigenvalues": pairs.eigenvalues.tolist(),
        "residuals": pairs.residuals.tolist(),
        "converged": pairs.converged,
        "num_restarts": pairs.num_restarts,
        "traces": traces,
        # With Explicit axes JAX gathers a kernel that is sharded where it is contracted.
        "slope": None if is_explicit else slope(params),
        "curvatures": curvatures(mesh) if is_explicit or mesh.size == 1 else None,
        "frobenius": sums.frobenius_norm,
        "density": curvature.density(samples, grid, width=0.3).mean.tolist(),
        "kept": {name: kept(vector, params) for name, vector in vectors.items()},
    }


if __name__ == "__main__":
    for text in sys.argv[1:]:
        sizes, *axis_types = text.split()
        shape = tuple(int(size) for size in sizes.split("x"))
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        kind = AxisType.Explicit if axis_types else AxisType.Auto
        mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)
        sys.stdout.write(json.dumps(run(mesh)) + "\n")
        sys.stdout.flush()
