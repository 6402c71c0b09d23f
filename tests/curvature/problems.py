"""Small problems whose derivatives and spectra are known without differentiation.

Everything is NumPy float64; only `unflatten` makes JAX arrays.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from t5x_fwdloss import curvature

# Shapes of a small tree with T5X's kind of names; "step" is an integer leaf.
SHAPES = {
    "encoder": {"layers_0": {"wi": {"kernel": (2, 3)}}},
    "decoder": {"layers_0": {"wo": {"kernel": (3, 1)}, "bias": (3,)}},
}
SIZE = 12


def leaves_of(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def flatten(vector):
    """The entries of a vector, in the order of its leaves, float64."""
    return np.concatenate([leaf.ravel() for leaf in leaves_of(vector)])


def flatten_jax(vector):
    """The same inside of a traced function."""
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(vector)])


def unflatten(flat, dtype=None, shapes=None):
    """The tree of `SHAPES` with the given entries."""
    shapes = SHAPES if shapes is None else shapes
    is_shape = lambda node: isinstance(node, tuple)
    leaves, structure = jax.tree.flatten(shapes, is_leaf=is_shape)
    sizes = [int(np.prod(shape)) for shape in leaves]
    parts = np.split(np.asarray(flat), np.cumsum(sizes)[:-1])
    dtype = jnp.zeros(()).dtype if dtype is None else dtype
    arrays = [
        jnp.asarray(part.reshape(shape), dtype)
        for part, shape in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def symmetric(eigenvalues, seed=0):
    """A symmetric matrix with the given eigenvalues, and its eigenvectors."""
    rng = np.random.default_rng(seed)
    n = len(eigenvalues)
    vectors, _ = np.linalg.qr(rng.normal(size=(n, n)))
    return vectors @ np.diag(eigenvalues) @ vectors.T, vectors


def matvec_of(matrix, shapes=None):
    """The compiled product with a dense matrix, tree to tree."""

    @jax.jit
    def product(vector):
        leaves, structure = jax.tree.flatten(vector)
        flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
        out = jnp.matmul(
            jnp.asarray(matrix, flat.dtype), flat, precision=jax.lax.Precision.HIGHEST
        )
        sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = [
            part.reshape(leaf.shape)
            for part, leaf in zip(jnp.split(out, sizes), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, parts)

    return product


def quadratic(matrix, slope):
    """The loss (1/2) x A x + b x of the float leaves; Hessian A for any parameters."""

    def loss(params, matrix=matrix, slope=slope):
        floats = [
            leaf
            for leaf in jax.tree.leaves(params)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        flat = jnp.concatenate([leaf.ravel() for leaf in floats])
        a, b = jnp.asarray(matrix, flat.dtype), jnp.asarray(slope, flat.dtype)
        return flat @ (a @ flat) * jnp.asarray(0.5, flat.dtype) + b @ flat

    return loss


class SoftmaxRegression:
    """Logits z_n = W x_n + c; smoothed cross entropy with z-loss, weighted sum.

    l = -sum_k t_k log p_k + z_loss (log Z)^2, with sum_k t_k = 1. The logit Hessian is
    s (diag p - p p^T) + 2 z_loss p p^T, s = 1 + 2 z_loss log Z, and the parameter
    Hessian sum_n w_n H_n (x) [x_n, 1][x_n, 1]^T; no derivative is taken anywhere.
    """

    def __init__(self, z_loss=0.1, smoothing=0.2, seed=3):
        rng = np.random.default_rng(seed)
        self.num, self.classes, self.features = 5, 3, 3
        self.x = rng.normal(size=(self.num, self.features))
        self.labels = rng.integers(0, self.classes, size=self.num)
        self.weights = np.array([1.0, 0.5, 0.0, 2.0, 1.0])
        self.kernel = rng.normal(size=(self.classes, self.features))
        self.bias = rng.normal(size=self.classes)
        self.z_loss = z_loss
        one_hot = np.eye(self.classes)[self.labels]
        self.targets = one_hot * (1 - smoothing) + (1 - one_hot) * smoothing / (
            self.classes - 1
        )

    def params(self):
        dtype = jnp.zeros(()).dtype
        return {
            "decoder": {
                "logits_dense": {
                    "bias": jnp.asarray(self.bias, dtype),
                    "kernel": jnp.asarray(self.kernel, dtype),
                }
            }
        }

    def outputs(self, params):
        head = params["decoder"]["logits_dense"]
        x = jnp.asarray(self.x, head["kernel"].dtype)
        return x @ head["kernel"].T + head["bias"][None, :]

    def loss(self, params):
        logits = self.outputs(params)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        targets = jnp.asarray(self.targets, logits.dtype)
        weights = jnp.asarray(self.weights, logits.dtype)
        cross = log_z - jnp.sum(targets * logits, axis=-1)
        z_loss = jnp.asarray(self.z_loss, logits.dtype)
        return jnp.sum(weights * (cross + z_loss * log_z * log_z))

    def output_hessian(self, logits, u):
        """The closed form as the engine takes it; weights included."""
        log_z = jax.nn.logsumexp(logits, axis=-1)
        p = jnp.exp(logits - log_z[:, None])
        pu = jnp.sum(p * u, axis=-1, keepdims=True)
        z_loss = jnp.asarray(self.z_loss, logits.dtype)
        two = jnp.asarray(2.0, logits.dtype)
        s = (jnp.ones_like(log_z) + two * z_loss * log_z)[:, None]
        weights = jnp.asarray(self.weights, logits.dtype)[:, None]
        return weights * (s * (p * u - p * pu) + two * z_loss * p * pu)

    def probabilities(self):
        logits = self.x @ self.kernel.T + self.bias
        log_z = np.log(np.exp(logits).sum(axis=-1))
        return np.exp(logits - log_z[:, None]), log_z

    def logit_hessians(self):
        p, log_z = self.probabilities()
        s = 1 + 2 * self.z_loss * log_z
        return [
            s[n] * (np.diag(p[n]) - np.outer(p[n], p[n]))
            + 2 * self.z_loss * np.outer(p[n], p[n])
            for n in range(self.num)
        ]

    def jacobians(self):
        """Of each example's logits in [bias, kernel], `[classes, parameters]`."""
        eye = np.eye(self.classes)
        return [np.hstack([eye, np.kron(eye, x[None, :])]) for x in self.x]

    def hessian(self):
        return sum(
            w * j.T @ h @ j
            for w, j, h in zip(
                self.weights, self.jacobians(), self.logit_hessians(), strict=True
            )
        )

    def logit_gradients(self):
        p, log_z = self.probabilities()
        s = (1 + 2 * self.z_loss * log_z)[:, None]
        return self.weights[:, None] * (s * p - self.targets)

    def gradient(self):
        return sum(
            j.T @ g
            for j, g in zip(self.jacobians(), self.logit_gradients(), strict=True)
        )


def dense(product, params):
    """The matrix of a compiled product `v -> A v`, column by column, float64."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    leaves, structure = jax.tree.flatten(params)
    sizes = np.cumsum([leaf.size for leaf in leaves])[:-1]
    columns = []
    for i in range(size):
        parts = np.split(np.eye(size)[i], sizes)
        vector = jax.tree.unflatten(
            structure,
            [
                jnp.asarray(part.reshape(leaf.shape), jnp.zeros(()).dtype)
                for part, leaf in zip(parts, leaves, strict=True)
            ],
        )
        columns.append(flatten(product(vector)))
    return np.stack(columns, axis=1)


def packed(state):
    """What is saved of a state, through JSON; later steps do not change it."""
    numbers, vectors = curvature.pack(state)
    return json.loads(json.dumps(numbers)), jax.tree.map(np.array, vectors)


def unpacked(kind, saved, like):
    """The state that `packed` was given."""
    numbers, vectors = saved
    return curvature.unpack(kind, numbers, jax.tree.map(jnp.array, vectors), like)
