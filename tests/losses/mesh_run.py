"""Every loss on meshes of forced host devices, beside the oracle; see test_meshes.py.

    python -m losses.mesh_run KIND SUBJECT ...

Prints one line per subject: its name and "ok", or the first law that it breaks.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from losses.subjects import SUBJECTS, Settings

BATCH, LENGTH, EMBED, VOCAB = 4, 3, 4, 8
SETTINGS = Settings(label_smoothing=0.1, z_loss=0.01)
KINDS = ("shard_map", "Explicit", "Auto")
NAMES = ("vjp", "jvp", "jvp(grad)")
# Of the rules that JAX does not make itself.
MORE_NAMES = (*NAMES, "grad(jvp)", "vjp of scan", "vjp of remat", "jvp of vmap")
WITH_RULES = ("custom_jvp", "chunked custom_jvp")


def draw(name, key):
    """The argument of a loss, and how it lies on the mesh."""
    is_chunked = name.startswith("chunked")
    normal = functools.partial(jax.random.normal, dtype=jnp.float64)
    if not is_chunked:
        spec = PartitionSpec("data", None, "model")
        return 3 * normal(key, (BATCH, LENGTH, VOCAB)), spec
    keys = jax.random.split(key, 2)
    head, spec = normal(keys[1], (EMBED, VOCAB)), PartitionSpec(None, "model")
    if name.endswith("tied"):
        head, spec = head.T, PartitionSpec("model", None)
    hidden = 2 * normal(keys[0], (BATCH, LENGTH, EMBED))
    return (hidden, head), (PartitionSpec("data"), spec)


def data():
    labels = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCAB)
    weights = np.linspace(0.0, 2.0, BATCH * LENGTH).reshape(BATCH, LENGTH)
    return labels, jnp.asarray(weights)


def over_shards(loss, mesh, x_spec, *, total=jax.lax.psum):
    """The loss as a sum over devices, each with a part of the batch."""
    # A shard has all classes: the head lies on each device.
    local = lambda spec: PartitionSpec(*[a if a == "data" else None for a in spec])
    specs = jax.tree.map(local, x_spec, is_leaf=lambda s: isinstance(s, PartitionSpec))
    by_batch = PartitionSpec("data")

    def summed(x, labels, weights):
        return total(loss(x, labels, weights), "data")

    def sharded(x, labels, weights):
        in_specs = (specs, by_batch, by_batch)
        return jax.shard_map(
            summed, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec()
        )(x, labels, weights)

    return sharded


def check_that_a_sum_left_out_is_refused(loss, mesh, x_spec, args):
    forgetful = over_shards(loss, mesh, x_spec, total=lambda parts, _: parts)
    with pytest.raises(ValueError, match="out_specs which require replication"):
        jax.eval_shape(forgetful, *args)


def mesh_of(kind):
    axis_type = AxisType.Explicit if kind == "Explicit" else AxisType.Auto
    shape = (4, 1) if kind == "shard_map" else (4, 2)
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(
        shape, ("data", "model"), axis_types=(axis_type,) * 2, devices=devices
    )


def oracle(subject, x, labels, weights):
    mass = 1.0 if subject.is_t5x_rule else None
    settings = SETTINGS.label_smoothing, SETTINGS.z_loss
    loss, z_loss = oracles.weighted_loss(
        subject.logits(x), labels, weights, *settings, mass=mass
    )
    return loss, jax.lax.stop_gradient(z_loss) if mass else z_loss


def check(kind, name):
    """Raises AssertionError at a law that the loss does not keep on the mesh."""
    subject, mesh = SUBJECTS[name], mesh_of(kind)
    x, specs = draw(name, jax.random.key(0))
    v, u = (laws.draw_like(x, jax.random.key(k)) for k in (2, 3))
    labels, weights = data()
    wanted = MORE_NAMES if name in WITH_RULES else NAMES
    if kind == "Auto":
        wanted = ("vjp", "jvp(grad)")
    names = [law for law in wanted if law in subject.laws]
    loss = lambda x, labels, weights: subject.loss(x, labels, weights, SETTINGS)
    if kind == "shard_map":
        check_that_a_sum_left_out_is_refused(loss, mesh, specs, (x, labels, weights))
        loss = over_shards(loss, mesh, specs)

    def place(tree, specs):
        put = lambda spec, leaf: jax.device_put(leaf, NamedSharding(mesh, spec))
        is_spec = lambda s: isinstance(s, PartitionSpec)
        return jax.tree.map(put, specs, tree, is_leaf=is_spec)

    def results(f, x, labels, weights, v, u):
        at = lambda x: f(x, labels, weights)
        return laws.transform(at, names, x, v, u)

    expected = jax.jit(functools.partial(results, functools.partial(oracle, subject)))
    want = expected(x, labels, weights, v, u)
    placed = [place(tree, specs) for tree in (x, v, u)]
    by_batch = [place(array, PartitionSpec("data")) for array in (labels, weights)]
    actual = jax.jit(functools.partial(results, loss))
    with jax.set_mesh(mesh):
        got = actual(placed[0], *by_batch, *placed[1:])
    got = jax.device_get(got)
    laws.assert_laws_hold(got, want, x, jnp.float64)


def main():
    """Checks every subject that is named, and prints what was found."""
    jax.config.update("jax_enable_x64", True)
    kind, *names = sys.argv[1:]
    for name in names:
        try:
            check(kind, name)
            answer = "ok"
        except Exception as error:
            first = [line for line in str(error).splitlines() if line.strip()]
            answer = f"{type(error).__name__} {' '.join(first[:3])}"
        sys.stdout.write(f"{name}: {answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
