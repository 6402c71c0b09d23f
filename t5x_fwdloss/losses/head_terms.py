r"""Head and cross entropy of each token, length chunk by length chunk.

Notation as in `custom_jvp.py`, with hidden states $h$ `[batch, length, embed]`, head
$W$, and logits $z = s\,h W$ of which only one chunk, `[batch, chunk, vocab]`, is ever in
memory. The tangent of a token's terms and its transpose are

$$ \dot z = s(\dot h W + h \dot W), \quad \dot\ell = \langle p, \dot z\rangle, \quad
   \dot C = S\dot\ell - \langle t, \dot z\rangle; \qquad
   \bar z = (S \bar C + \bar\ell)\, p - \bar C\, t, \quad
   \bar h = s\,\bar z W^T, \quad \bar W = \textstyle\sum s\, h^T \bar z, $$

each a loop over chunks that recomputes the logits. $\bar W$ is summed in float32.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Integer

from t5x_fwdloss.losses.custom_jvp import token_tangents, token_terms
from t5x_fwdloss.losses.log_normalizer import accumulation_dtype, probabilities
from t5x_fwdloss.losses.primitives.axis_types import have_axis_types
from t5x_fwdloss.losses.primitives.linear_pair import LinearPair
from t5x_fwdloss.losses.targets import (
    cleared,
    label_mask,
    on_and_off_values,
    with_void,
    without,
)


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The static settings.

    Attributes:
        chunk_length: positions per chunk; divides the length.
        label_smoothing: as in `token_cross_entropy`.
        tied: whether the head is an embedding, `[vocab, embed]`.
        scale: factor of the logits.
        precision: precision of all matrix products, as jax.default_matmul_precision.
    """

    chunk_length: int
    label_smoothing: float
    tied: bool
    scale: float
    precision: str | None


def head_terms(
    hidden: Float[Array, "batch length embed"],
    head: Float[Array, "..."],
    labels: Integer[Array, "batch length"],
    settings: HeadSettings,
) -> list[Array]:
    r"""$C$, $\ell$, $m$, the target sum $S$ and the predicted class of each token.

    `[batch, length]` each, in float32 at least; the class is int32.
    """
    return _head_terms(hidden, head, labels, settings)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _head_terms(hidden, head, labels, settings):
    def chunk(_, part):
        hidden, labels = part
        hidden = cleared(hidden, labels)
        logits = head_logits(hidden, head, settings)
        terms = token_terms(logits, labels, settings.label_smoothing)
        return None, (*terms, jnp.argmax(logits, axis=-1).astype(jnp.int32))

    return list(_over_chunks(chunk, None, (hidden, labels), head, settings)[1])


# A zero tangent is left out, not materialized as zeros: a frozen head, or a frozen
# decoder, costs nothing, and XLA's CPU compiler miscomputes a product with a constant
# matrix that it fuses (`docs/upstream/xla_cpu_ynn_fusion.md`).
@functools.partial(_head_terms.defjvp, symbolic_zeros=True)
def _head_terms_jvp(settings, primals, tangents):
    hidden, head, labels = primals
    terms = _head_terms(hidden, head, labels, settings)
    _, log_sum, shift, mass, classes = terms
    moves = tuple(not isinstance(dot, SymbolicZero) for dot in tangents[:2])
    cross_entropy_dot, log_sum_dot = _TANGENT(
        (hidden, head, log_sum, shift, mass, labels),
        [dot for dot in tangents[:2] if not isinstance(dot, SymbolicZero)],
        settings=settings,
        moves=moves,
    )
    zero = jnp.zeros_like(shift)
    no_tangent = jax.custom_derivatives.zero_from_primal(classes)
    return terms, [cross_entropy_dot, log_sum_dot, zero, zero, no_tangent]


def _tangent(residuals, linear, *, settings, moves):
    """C_dot and l_dot from h_dot and W_dot; `moves` says which are not zero."""
    hidden, head, log_sum, shift, mass, labels = residuals
    hidden_moves, head_moves = moves

    def chunk(_, part):
        hidden, log_sum, shift, mass, labels, *hidden_dot = part
        hidden = cleared(hidden, labels)
        logits = head_logits(hidden, head, settings)
        logits_dot = [head_logits(dot, head, settings) for dot in hidden_dot]
        if head_moves:
            logits_dot.append(head_logits(hidden, linear[-1], settings))
        residuals = [logits, labels, log_sum, shift, mass]
        return None, token_tangents(
            residuals, sum(logits_dot), settings.label_smoothing
        )

    parts = (hidden, log_sum, shift, mass, labels, *linear[:hidden_moves])
    return _over_chunks(chunk, None, parts, head, settings)[1]


def _cotangent(residuals, linear, *, settings, moves):
    """h_bar and W_bar from C_bar and l_bar: the transpose of `_tangent`."""
    hidden, head, log_sum, shift, mass, labels = residuals
    hidden_moves, head_moves = moves

    def chunk(head_bars, part):
        hidden, log_sum, shift, mass, labels, cross_entropy_bar, log_sum_bar = part
        hidden = cleared(hidden, labels)
        logits = head_logits(hidden, head, settings)
        probs = probabilities(logits, shift, log_sum)
        on_probs = mass * cross_entropy_bar + log_sum_bar
        logits_bar = on_probs[..., None] * probs - cross_entropy_bar[
            ..., None
        ] * _target_rows(logits, labels, settings.label_smoothing)
        hidden_bars = []
        if hidden_moves:
            hidden_bar = _hidden_bar(logits_bar, head, settings)
            hidden_bars.append(hidden_bar.astype(hidden.dtype))
        add = lambda bar: _add_head_bar(bar, hidden, logits_bar, settings)
        return list(map(add, head_bars)), hidden_bars

    parts = (hidden, log_sum, shift, mass, labels, *linear)
    dtype = accumulation_dtype(head.dtype)
    zeros = [jnp.zeros(head.shape, dtype)] * head_moves
    head_bars, hidden_bars = _over_chunks(chunk, zeros, parts, head, settings)
    return [*hidden_bars, *(bar.astype(head.dtype) for bar in head_bars)]


_TANGENT = LinearPair("head_terms_tangent", _tangent, _cotangent)


def head_cross_entropy(hidden, head, labels, is_void, settings, z_loss):
    """Loss, z-loss term and class of each token, by the rules above.

    Args:
        hidden: hidden states `[batch, length, embed]`, the length a multiple of the
            chunk length.
        head: the kernel, or the embedding.
        labels: class indices `[batch, length]`.
        is_void: tokens to leave out of every derivative; None means no token.
        settings: the head's settings.
        z_loss: coefficient of the squared log-normalizer.
    """
    labels = with_void(labels, is_void)
    cross_entropy, log_sum, shift, _, classes = head_terms(
        hidden, head, labels, settings
    )
    z_term = jnp.asarray(z_loss, log_sum.dtype) * jnp.square(shift + log_sum)
    return cross_entropy + z_term, z_term, classes


def rematerialized(tokens):
    """Like `head_cross_entropy`, for a token loss that JAX differentiates.

    Each chunk's logits are recomputed in the backward pass.

    Args:
        tokens: as `Implementation.tokens`.
    """

    def head_cross_entropy(hidden, head, labels, is_void, settings, z_loss):
        hidden = without(is_void, hidden)

        def chunk(hidden, labels):
            logits = head_logits(hidden, head, settings)
            loss, z_term = tokens(
                logits,
                labels,
                label_smoothing=settings.label_smoothing,
                z_loss=z_loss,
            )
            return loss, z_term, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        return scan_over_chunks(chunk, (hidden, labels), settings.chunk_length)

    return head_cross_entropy


def _over_chunks(chunk, carry, parts, head, settings):
    """A scan of `chunk(carry, part)` over length chunks, `[batch * chunk_length, ...]`.

    Chunks are sliced from, and results written into, `[batch, length, ...]` in place,
    so that no transposed copy of the hidden states is made. The body is rematerialized:
    JAX's derivative recomputes each chunk's logits.
    """
    size = settings.chunk_length
    if have_axis_types(*parts, head):
        return carry, scan_over_chunks(lambda *part: chunk(carry, part)[1], parts, size)
    batch, length = parts[0].shape[:2]
    num_chunks = length // size

    def take(index):
        taken = [jax.lax.dynamic_slice_in_dim(p, index * size, size, 1) for p in parts]
        return [t.reshape(batch * size, *t.shape[2:]) for t in taken]

    remat = jax.checkpoint(chunk)
    shapes = jax.eval_shape(lambda: chunk(carry, take(0))[1])
    whole = jax.tree.map(
        lambda s: jnp.zeros((batch, length, *s.shape[1:]), s.dtype),
        shapes,
    )

    def body(state, index):
        carry, whole = state
        carry, results = remat(carry, take(index))

        def put(whole, result):
            result = result.reshape(batch, size, *result.shape[1:])
            return jax.lax.dynamic_update_slice_in_dim(whole, result, index * size, 1)

        whole = jax.tree.map(put, whole, results)
        return (carry, whole), None

    return jax.lax.scan(body, (carry, whole), jnp.arange(num_chunks))[0]


def scan_over_chunks(function, parts, size):
    """Results of `function(*part)` for length chunks `[batch, size, ...]`, by plain JAX.

    The function is rematerialized, and the scan runs over its parts, so that the
    transpose writes each chunk's cotangents to a separate place.
    """

    def split(part):
        shape = (part.shape[0], -1, size, *part.shape[2:])
        return jnp.moveaxis(part.reshape(shape), 1, 0)

    def join(result):
        result = jnp.moveaxis(result, 0, 1)
        return result.reshape(result.shape[0], -1, *result.shape[3:])

    body = jax.checkpoint(function)
    scanned = [split(part) for part in parts]
    results = jax.lax.scan(lambda _, part: (None, body(*part)), None, scanned)[1]
    return jax.tree.map(join, results)


def _contract(left, right, axes, settings):
    # Both operands in the wider dtype; products of bfloat16 are summed in float32.
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (axes, ((), ())),
        precision=settings.precision,
        preferred_element_type=accumulation_dtype(dtype),
    )


def _scaled(hidden, settings):
    if settings.scale == 1.0:
        return hidden
    return hidden.astype(accumulation_dtype(hidden.dtype)) * settings.scale


def head_logits(hidden, head, settings):
    """The logits of some tokens, `[..., vocab]`."""
    axes = ((hidden.ndim - 1,), (1 if settings.tied else 0,))
    return _contract(_scaled(hidden, settings), head, axes, settings)


def _hidden_bar(logits_bar, head, settings):
    axes = ((1,), (0 if settings.tied else 1,))
    return _scaled(_contract(logits_bar, head, axes, settings), settings)


def _add_head_bar(head_bar, hidden, logits_bar, settings):
    """`head_bar` plus the chunk's contribution."""
    hidden = _scaled(hidden, settings)

    def product(hidden):
        pair = (logits_bar, hidden) if settings.tied else (hidden, logits_bar)
        return _contract(*pair, ((0,), (0,)), settings).astype(head_bar.dtype)

    def at_once(head_bar, hidden):
        return head_bar + product(hidden)

    def by_slices(head_bar, hidden):
        axis = 1 if settings.tied else 0
        embed = hidden.shape[1]
        num_slices = _num_slices(embed, hidden.shape[0])
        width = embed // num_slices

        def add(i, head_bar):
            part = product(jax.lax.dynamic_slice_in_dim(hidden, i * width, width, 1))
            old = jax.lax.dynamic_slice_in_dim(head_bar, i * width, width, axis)
            return jax.lax.dynamic_update_slice_in_dim(
                head_bar, old + part, i * width, axis
            )

        return jax.lax.fori_loop(0, num_slices, add, head_bar)

    # An accelerator's product adds into its result. The CPU's allocates a new array
    # first: as large as the head, unless it is computed in slices.
    return jax.lax.platform_dependent(head_bar, hidden, cpu=by_slices, default=at_once)


def _num_slices(embed, rows):
    """The fewest equal slices of the head at most half as wide as a chunk has tokens.

    At least one wide, which is more than half of a single token.
    """
    least = min(math.ceil(2 * embed / rows), embed)
    return next(n for n in range(least, embed + 1) if embed % n == 0)


def _target_rows(logits, labels, label_smoothing):
    on_value, off_value = on_and_off_values(label_smoothing, logits.shape[-1])
    on = jnp.asarray(on_value, logits.dtype)
    off = jnp.asarray(off_value, logits.dtype)
    if off_value:
        off = jnp.where(logits > -jnp.inf, off, jnp.zeros_like(off))
    return jnp.where(label_mask(labels, logits.shape[-1]), on, off)
