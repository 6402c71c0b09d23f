"""A tiny T5 with a vocabulary of 384, and its matrices written out in float64.

Nothing here goes through the package's losses or products: logits of the network, their
Jacobian by jax.jacfwd, the loss and its derivatives in the logits by `tests/oracles.py`.
Order of entries: that of `jax.flatten_util.ravel_pytree`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from jax.flatten_util import ravel_pytree

from t5x_fwdloss.standalone.model import StandaloneModel
from t5x_fwdloss.standalone.network import T5Config, Transformer

VOCAB, LENGTH, EXAMPLES = 384, 20, 2
SMOOTHING, Z_LOSS = 0.1, 1e-2
SIZES = T5Config(
    vocab_size=VOCAB,
    emb_dim=2,
    num_heads=1,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=2,
    mlp_dim=4,
    dropout_rate=0.0,
    logits_via_embedding=True,
)
MATRICES = ("hessian", "gauss_newton", "fisher", "sampled_fisher", "empirical_fisher")


def model(impl="custom_jvp", config=SIZES):
    return StandaloneModel(
        Transformer(config),
        label_smoothing=SMOOTHING,
        z_loss=Z_LOSS,
        loss_normalizing_factor="NUM_REAL_TARGET_TOKENS",
        loss_impl=impl,
    )


def batches(num=2, seed=0):
    """Batches of sequences of unequal length and weight."""
    rng = np.random.default_rng(seed)
    return [_batch(rng) for _ in range(num)]


def _batch(rng):
    shape = (EXAMPLES, LENGTH)
    tokens = lambda: rng.integers(1, VOCAB, shape).astype(np.int32)
    real = np.arange(LENGTH) < rng.integers(4, LENGTH // 2, (EXAMPLES, 1))
    targets = np.where(real, tokens(), 0)
    return {
        "encoder_input_tokens": tokens(),
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets,
        # Weights that are neither zero nor one show where their square would.
        "decoder_loss_weights": (real * rng.uniform(0.5, 2, shape)).astype(np.float32),
    }


@functools.cache
def parameters(seed=0):
    with jax.enable_x64(False):  # whose random numbers are others
        return model().get_initial_params(jax.random.key(seed), batches()[0])


def diagonal():
    """What the optimizer of the runs multiplies a gradient by."""
    return jax.tree.map(lambda x: (x**2 + 0.1) ** -0.5, parameters(7))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(float)


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """What is true of the tiny T5.

    Attributes:
        theta: the parameters.
        shares: each batch's share of the loss.
        gradient: the gradient of the loss.
        matrices: each matrix by name.
    """

    theta: np.ndarray
    shares: np.ndarray
    gradient: np.ndarray
    matrices: dict[str, np.ndarray]


def reference() -> Reference:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return _reference()


def loss(theta: np.ndarray, seed=0) -> float:
    """The loss at other parameters, or over other batches."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        total = normalizer(seed=seed)
        return float(sum(share(theta, b, total) for b in batches(seed=seed)))


def normalizer(num=2, seed=0) -> float:
    return sum(b["decoder_loss_weights"].sum(dtype=float) for b in batches(num, seed))


def group(prefix: str) -> np.ndarray:
    """Which entries belong to leaves whose path starts with `prefix`."""
    return np.concatenate(
        [
            np.full(np.size(leaf), path.startswith(prefix))
            for path, leaf in leaves(parameters()).items()
        ]
    )


def leaves(tree) -> dict[str, Any]:
    """The leaves by path, in the order of the entries."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _logits(theta, batch):
    _, unravel = ravel_pytree(jax.tree.map(jnp.float64, parameters()))
    wide = model(config=dataclasses.replace(SIZES, dtype="float64"))
    return wide._compute_logits(unravel(theta), batch)


@jax.jit
def share(theta, batch, normalizer):
    """A batch's share of the loss."""
    total, _ = oracles.weighted_loss(
        _logits(theta, batch),
        batch["decoder_target_tokens"],
        batch["decoder_loss_weights"],
        SMOOTHING,
        Z_LOSS,
    )
    return total / normalizer


@jax.jit
def _hessian_columns(theta, batch, vectors):
    slope = jax.grad(lambda x: share(x, batch, normalizer()))
    return jax.vmap(lambda v: jax.jvp(slope, (theta,), (v,))[1])(vectors)


def _reference():
    theta, found = jnp.asarray(flat(parameters())), batches()
    jacobian = jax.jit(jax.jacfwd(_logits))
    # In blocks, to save memory.
    blocks = np.array_split(np.eye(len(theta)), 8)
    columns = lambda b: np.concatenate([_hessian_columns(theta, b, v) for v in blocks])
    matrices = {"hessian": sum(map(columns, found))}
    for number, b in enumerate(found):
        rows, z = np.asarray(jacobian(theta, b)), np.asarray(_logits(theta, b))
        for name, part in _sandwiches(rows, z, b, number).items():
            matrices[name] = matrices.get(name, 0.0) + part / normalizer()
    gradient = jax.jit(jax.grad(share))
    return Reference(
        np.asarray(theta),
        np.asarray([float(share(theta, b, normalizer())) for b in found]),
        sum(np.asarray(gradient(theta, b, normalizer())) for b in found),
        matrices,
    )


def _sandwiches(jacobian, z, batch, number):
    """The sums over tokens of w J^T M J, M from formulas; not divided by W."""
    drawn = drawn_labels(z, number)
    total = dict.fromkeys(MATRICES[1:], 0.0)
    for place in zip(*np.nonzero(batch["decoder_loss_weights"]), strict=True):
        weight = float(batch["decoder_loss_weights"][place])
        label, rows = batch["decoder_target_tokens"][place], jacobian[place]
        for name, label_of, settings in (
            ("gauss_newton", label, (SMOOTHING, Z_LOSS)),
            ("fisher", label, (0.0, 0.0)),
        ):
            inner = oracles.token_hessian(z[place], label_of, *settings)
            total[name] += weight * rows.T @ (inner @ rows)
        for name, label_of, settings in (
            ("empirical_fisher", label, (SMOOTHING, Z_LOSS)),
            ("sampled_fisher", drawn[place], (0.0, 0.0)),
        ):
            g = rows.T @ oracles.token_gradient(z[place], label_of, *settings)
            total[name] += weight * np.outer(g, g)
    return total


def drawn_labels(logits, number):
    """The labels that the sampled Fisher matrix of batch `number` is fixed to."""
    root = jax.random.key(0, impl="threefry2x32")
    keys = [jax.random.fold_in(root, number * EXAMPLES + i) for i in range(EXAMPLES)]
    # Drawn by adding float32 noise to float32 logits.
    z = jnp.asarray(logits, jnp.float32)
    drawn = [jax.random.categorical(*pair) for pair in zip(keys, z, strict=True)]
    return np.stack(drawn)
