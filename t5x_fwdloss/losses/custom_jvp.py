r"""Cross entropy as a JVP rule: forward mode, and its transpose, the stable backward pass.

With $S = \sum_j t_j$ and $m$, $\ell$ the split log-normalizer ($\log Z = m + \ell$):

$$ C = S \ell - \langle t, z - m \rangle, \qquad
   \dot\ell = \langle p, \dot z \rangle, \qquad
   \dot C = S \dot\ell - \langle t, \dot z \rangle
            - \langle \dot t, (z - m) - \ell \rangle. $$

The shift $m$ is constant in the rule: only $m + \ell$ and $C$ leave this file, and they
do not depend on it. Each rule takes its outputs from its own primal, so higher orders
pass through the rule again, and it is linear in the tangents, so jax transposes it:
$\bar z = \bar C (S p - t) + \bar\ell p$. All reductions run in at least float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike, Shaped

from t5x_fwdloss.losses.log_normalizer import (
    accumulation_dtype,
    probabilities,
    shifted_log_sum,
)
from t5x_fwdloss.losses.primitives.axis_types import laid_out_like
from t5x_fwdloss.losses.primitives.token_map import token_map
from t5x_fwdloss.losses.targets import (
    class_indices,
    cleared,
    label_mask,
    on_and_off_values,
    with_void,
)


def token_cross_entropy(
    logits: Float[Array, "*batch vocab"],
    labels: Shaped[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    z_loss: ScalarLike = 0.0,
    is_void: Bool[Array, "*batch"] | None = None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Loss and z-loss term of each token for integer labels, without target rows.

    $L = -\sum_j t_j (z_j - \log Z) + c\,(\log Z)^2$ and $c\,(\log Z)^2$, where $t$ is the
    smoothed target row of the label (see `targets.py`) and $c$ is `z_loss`. The entropy
    of the row is not subtracted. float32 (float64 for float64 logits), and the same
    arithmetic whether or not a derivative is taken.

    A label outside the vocabulary has no class: without smoothing its cross entropy is
    zero, and its z-loss term remains. A class at -inf has probability zero and no part
    in the smoothing sum; if it is the label, the loss is inf. Value, jvp, vjp and hvp
    never multiply zero by infinity.

    Args:
        logits: unnormalized log-probabilities; any floating dtype.
        labels: class indices; an ordinary argument whose tangent is float0.
        label_smoothing: the weight $s$ moved off the label, a Python number in [0, 1).
        z_loss: the coefficient $c \ge 0$; may be traced, its derivative is
            $(\log Z)^2$.
        is_void: tokens whose logits are treated as zeros, whatever they hold, and left
            out of every derivative; None means no token.
    """
    labels = with_void(labels, is_void)
    terms = token_terms(logits, labels, label_smoothing)
    return _loss_and_z_term(terms, z_loss)


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Float[Array, "*batch vocab"],
    z_loss: ScalarLike,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    r"""Loss and z-loss term of each token for dense target rows.

    Like `token_cross_entropy`, for any row $t$ of weights, and differentiable in it:
    the derivative is $-(z - \log Z)$, and zero at classes of -inf. A class at -inf with
    a target of zero contributes nothing; with a positive target the loss is inf.

    Args:
        logits: unnormalized log-probabilities; any floating dtype.
        targets: one row of weights over the classes per token.
        z_loss: the coefficient $c \ge 0$; its derivative is $(\log Z)^2$.
    """
    return _loss_and_z_term(_dense_terms(logits, targets), z_loss)


def _loss_and_z_term(terms, z_loss):
    cross_entropy, log_sum, shift, _ = terms
    z_term = jnp.asarray(z_loss, log_sum.dtype) * jnp.square(shift + log_sum)
    return cross_entropy + z_term, z_term


def against_targets(values, logits, labels, label_smoothing):
    """Sums of target times value over the classes, those at -inf left out of the smoothing.

    One sum over one product, not one sum for the label and one for the rest: compilers
    that materialize a reduction's operand then materialize only one.
    """
    on_value, off_value = on_and_off_values(label_smoothing, logits.shape[-1])
    rest = jnp.zeros_like(values)
    if off_value:
        rest = jnp.where(logits > -jnp.inf, off_value * values, rest)
    on_label = laid_out_like(label_mask(labels, logits.shape[-1]), logits)
    return jnp.sum(jnp.where(on_label, on_value * values, rest), axis=-1)


def _mass(logits, labels, label_smoothing):
    """The sum of each token's target row, classes at -inf left out of the smoothing.

    Without smoothing it is a matter of the label alone. A sum over the row of targets,
    which no sharded array is part of, would be made for all tokens on each device.
    """
    vocab_size = logits.shape[-1]
    on_value, off_value = on_and_off_values(label_smoothing, vocab_size)
    if off_value:
        ones = jnp.ones_like(logits)
        return against_targets(ones, logits, labels, label_smoothing)
    labels = class_indices(labels)
    has_class = (labels >= 0) & (labels < vocab_size)
    return jnp.where(has_class, jnp.asarray(on_value, logits.dtype), 0)


@dataclasses.dataclass(frozen=True)
class _Terms:
    """(C, l, m, S) of each token, a map over tokens."""

    label_smoothing: float

    def __call__(self, residuals, linear):
        logits, labels = residuals
        del linear
        logits = cleared(logits.astype(accumulation_dtype(logits.dtype)), labels)
        shift, log_sum = shifted_log_sum(logits)
        mass = laid_out_like(_mass(logits, labels, self.label_smoothing), log_sum)
        shifted = logits - shift[..., None]
        against = against_targets(shifted, logits, labels, self.label_smoothing)
        cross_entropy = mass * log_sum - against
        return [cross_entropy, log_sum, shift, mass]


@dataclasses.dataclass(frozen=True)
class _Tangents:
    """(C_dot, l_dot) of each token, a map over tokens that is linear in z_dot."""

    label_smoothing: float

    def __call__(self, residuals, linear):
        logits, labels, log_sum, shift, mass = residuals
        (logits_dot,) = linear
        logits, logits_dot = logits.astype(shift.dtype), logits_dot.astype(shift.dtype)
        logits = cleared(logits, labels)
        probs = probabilities(logits, shift, log_sum)
        log_sum_dot = jnp.sum(probs * logits_dot, axis=-1)
        against = against_targets(logits_dot, logits, labels, self.label_smoothing)
        return [mass * log_sum_dot - against, log_sum_dot]


def token_terms(logits, labels, label_smoothing):
    """(C, l, m, S) of each token, for any number of leading axes."""
    vocab_size = logits.shape[-1]
    terms = _token_terms(
        logits.reshape(-1, vocab_size), labels.reshape(-1), label_smoothing
    )
    return [term.reshape(labels.shape) for term in terms]


def token_tangents(residuals, logits_dot, label_smoothing):
    """(C_dot, l_dot) of each token from (z, label, l, m, S) and z_dot, `[tokens, ...]`."""
    return token_map(_Tangents(label_smoothing), residuals, [logits_dot])


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _token_terms(logits, labels, label_smoothing):
    return token_map(_Terms(label_smoothing), [logits, labels])


@_token_terms.defjvp
def _token_terms_jvp(label_smoothing, primals, tangents):
    # C_dot = S <p, z_dot> - <t, z_dot>.  Labels are integers: their tangent is float0.
    logits, labels = primals
    logits_dot, _ = tangents
    terms = _token_terms(logits, labels, label_smoothing)
    _, log_sum, shift, mass = terms
    cross_entropy_dot, log_sum_dot = token_tangents(
        [logits, labels, log_sum, shift, mass], logits_dot, label_smoothing
    )
    zero = jnp.zeros_like(shift)
    return terms, [cross_entropy_dot, log_sum_dot, zero, zero]


@jax.custom_jvp
def _dense_terms(logits, targets):
    """(C, l, m, S) of each token."""
    dtype = accumulation_dtype(logits.dtype)
    logits, targets = logits.astype(dtype), targets.astype(dtype)
    shift, log_sum = shifted_log_sum(logits)
    mass = jnp.sum(targets, axis=-1)
    products = targets * (logits - shift[..., None])
    products = jnp.where(targets == 0, jnp.zeros_like(products), products)
    return mass * log_sum - jnp.sum(products, axis=-1), log_sum, shift, mass


@_dense_terms.defjvp
def _dense_terms_jvp(primals, tangents):
    # C_dot = S <p, z_dot> - <t, z_dot> - <t_dot, (z - m) - l>.
    logits, targets = primals
    terms = _dense_terms(logits, targets)
    _, log_sum, shift, mass = terms
    logits, targets = logits.astype(shift.dtype), targets.astype(shift.dtype)
    logits_dot, targets_dot = (tangent.astype(shift.dtype) for tangent in tangents)
    probs = probabilities(logits, shift, log_sum)
    log_sum_dot = jnp.sum(probs * logits_dot, axis=-1)
    # A zero tangent at a class of -inf must not be multiplied by its log-probability.
    log_probs = (logits - shift[..., None]) - log_sum[..., None]
    log_probs = jnp.where(logits > -jnp.inf, log_probs, jnp.zeros_like(log_probs))
    cross_entropy_dot = (
        mass * log_sum_dot
        - jnp.sum(targets * logits_dot, axis=-1)
        - jnp.sum(targets_dot * log_probs, axis=-1)
    )
    mass_dot = jnp.sum(targets_dot, axis=-1)
    return terms, (cross_entropy_dot, log_sum_dot, jnp.zeros_like(shift), mass_dot)
