"""Textbook formulas that the package is compared with: slow, obvious, float64."""

import jax
import jax.numpy as jnp
import numpy as np


def target_rows(labels, vocab_size, label_smoothing):
    """T5X's smoothed rows: off value everywhere, on value where the label is a class."""
    confidence = 1.0 - label_smoothing
    off_value = (
        label_smoothing / (vocab_size - 1) if vocab_size > 1 else label_smoothing
    )
    classes = np.arange(vocab_size).reshape((1,) * np.ndim(labels) + (-1,))
    # In float64, which holds every label of every dtype that is used here.
    is_label = jnp.asarray(labels, jnp.float64)[..., None] == classes.astype(np.float64)
    return jnp.where(is_label, confidence, off_value)


def entropy(label_smoothing, vocab_size):
    """The entropy of a smoothed row of more than one class, in plain Python floats."""
    confidence = 1.0 - label_smoothing
    off_value = label_smoothing / max(vocab_size - 1, 1)
    return -sum(
        count * p * np.log(p + floor)
        for count, p, floor in (
            (1, confidence, 0.0),
            (vocab_size - 1, off_value, 1e-20),
        )
    )


def token_loss(logits, labels, label_smoothing, z_loss, *, mass=None):
    """(loss, z term) of each token, by the formula; classes at -inf are left out.

    With `mass` the derivative (not the value) is that of targets summing to `mass`:
    T5X's backward rule takes 1 for granted.
    """
    logits = logits.astype(jnp.float64)
    present = logits > -jnp.inf
    safe = jnp.where(present, logits, 0.0)
    # The shift is a constant of the formula; without it exp overflows at 1e4.
    shift = jax.lax.stop_gradient(jnp.max(jnp.where(present, logits, -1e300), -1))
    exps = jnp.where(present, jnp.exp(safe - shift[..., None]), 0.0)
    log_z = shift + jnp.log(jnp.sum(exps, axis=-1))
    rows = target_rows(labels, logits.shape[-1], label_smoothing)
    rows = jnp.where(present, rows, 0.0)
    cross_entropy = -jnp.sum(rows * (safe - log_z[..., None]), axis=-1)
    if mass is not None:
        assumed = mass * log_z - jnp.sum(rows * safe, axis=-1)
        constant = jax.lax.stop_gradient(cross_entropy - assumed)
        cross_entropy = assumed + constant
    z_term = z_loss * log_z**2
    return cross_entropy + z_term, z_term


def weighted_loss(
    logits, labels, weights, label_smoothing, z_loss, factor=None, *, mass=None
):
    """(loss, z part) of the batch: weighted, over the factor, summed."""
    loss, z_term = token_loss(logits, labels, label_smoothing, z_loss, mass=mass)
    loss = loss - entropy(label_smoothing, logits.shape[-1])
    scale = 1.0 if weights is None else jnp.asarray(weights, jnp.float64)
    scale = scale / (1.0 if factor is None else float(factor))
    return jnp.sum(loss * scale), jnp.sum(z_term * scale)


def token_gradient(logits, label, label_smoothing, z_loss):
    """The gradient of one token's loss, in NumPy and without any autodiff."""
    probs = np.exp(logits - logits.max())
    log_z = np.log(probs.sum()) + logits.max()
    probs /= probs.sum()
    row = np.asarray(target_rows(label, len(logits), label_smoothing))
    return (row.sum() + 2 * z_loss * log_z) * probs - row


def token_hessian(logits, label, label_smoothing, z_loss):
    """The dense Hessian of one token's loss, in NumPy and without any autodiff."""
    probs = np.exp(logits - logits.max())
    log_z = np.log(probs.sum()) + logits.max()
    probs /= probs.sum()
    row = np.asarray(target_rows(label, len(logits), label_smoothing))
    scale = row.sum() + 2 * z_loss * log_z
    outer = np.outer(probs, probs)
    return scale * (np.diag(probs) - outer) + 2 * z_loss * outer


def segment_sums(weights, segment_ids):
    """The sum of the weights of each position's segment, by two loops; 0 on padding."""
    sums = np.zeros_like(weights)
    for row in range(weights.shape[0]):
        for segment in np.unique(segment_ids[row][segment_ids[row] > 0]):
            inside = segment_ids[row] == segment
            sums[row, inside] = weights[row, inside].sum()
    return sums
