"""Gradient descent at the edge of stability, seen by the probes of training.

    python scripts/edge_of_stability.py    # writes docs/benchmarks/edge_of_stability.json
    python scripts/edge_of_stability.py --draw          # docs/edge_of_stability.svg from it

Plain gradient descent on the loss of one fixed batch, a tiny T5 on words of cmudict_g2p,
at two learning rates. Every few steps the largest eigenvalue of the Hessian is found,
from the last eigenvector on, and the probe of training measures the same step. Cohen et
al. (2021) found that the largest eigenvalue rises to 2 over the learning rate and stays
there. The exit status is 1 if this run does not show it.
"""

import pathlib

import jax
import optax

from t5x_fwdloss import curvature, tasks
from t5x_fwdloss.standalone import data
from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer
from t5x_fwdloss.training import along_update

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
RATES = (0.1, 0.05)
STEPS, PERIOD = 3000, 25
BATCH, LENGTHS = 32, {"inputs": 12, "targets": 24}
SIZES = {
    "emb_dim": 32,
    "num_heads": 2,
    "head_dim": 16,
    "mlp_dim": 64,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
LOSS = {"label_smoothing": 0.1, "z_loss": 0.0}
SHARPNESS, CRITICAL = "largest_eigenvalue", "critical_sharpness"


def problem():
    """The model and the batch that all steps see."""
    config = T5Config(vocab_size=384, dtype="float32", dropout_rate=0.0, **SIZES)
    model = StandaloneModel(
        Transformer(config),
        **LOSS,
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
        loss_impl="custom_jvp",
    )
    dataset = data.DatasetConfig(tasks.TASK_NAME, LENGTHS, BATCH)
    (batch,) = data.fixed_batches(dataset, "train", 1)
    return model, jax.tree.map(jax.numpy.asarray, batch)


def descend(model, batch, rate, steps, period):
    """Trains; the numbers before each span of `period` steps, by name."""
    loss = lambda params, batch: model.loss_fn(params, batch, None)[0]
    optimizer = optax.sgd(rate)

    def step(params, batch):
        updates, _ = optimizer.update(
            jax.grad(loss)(params, batch), optimizer.init(params), params
        )
        return optax.apply_updates(params, updates)

    step = jax.jit(step)
    span = jax.jit(
        lambda *x: jax.lax.fori_loop(0, period, lambda _, p: step(p, x[1]), x[0])
    )
    product = jax.jit(curvature.hessian_product(loss))
    probe = jax.jit(along_update.along_update(loss))
    params = jax.jit(model.get_initial_params)(jax.random.key(0), batch)
    vector = curvature.random_like(0, params)
    rows = []
    for done in range(0, steps + 1, period):
        found = curvature.eigenpairs(
            lambda v, at=params: product(at, v, batch),
            vector,
            num_largest=1,
            num_smallest=0,
            tolerance=0.01,
            max_steps=60,
        )
        vector = found.eigenvectors[0]
        around = jax.device_get(probe(params, step(params, batch), batch))
        numbers = along_update.scalars(around, rate)
        rows.append(
            {
                "step": done,
                SHARPNESS: float(found.eigenvalues[0]),
                "products": found.num_products,
                **{
                    name: numbers.get(name)
                    for name in ("loss", "directional_sharpness", CRITICAL)
                },
            }
        )
        params = span(params, batch)
    return {name: [row[name] for row in rows] for name in rows[0]}
