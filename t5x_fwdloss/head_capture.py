"""The decoder's last hidden states and its output head, without forking the network.

A network's head is the call that turns hidden states `[batch, length, embed]` into
logits: a Dense module named `logits_dense`, or the embedder's `attend` when input and
output embeddings are tied. The call is intercepted (`flax.linen.intercept_methods`),
its argument kept, and zeros returned in place of the logits, which the compiler drops
since nothing reads them. After the head, the network may then only apply a constant
factor to the logits (T5's tied head divides by sqrt(embed)); that is read from the
jaxpr, and anything else is rejected.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Primitives that keep the value of every logit.
_TRANSPARENT = {"copy", "copy_p", "sharding_constraint", "optimization_barrier"}
# Primitives that keep a constant array constant, with the same value everywhere.
_UNIFORM = {"broadcast_in_dim", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True)
class Head:
    """The captured arguments of the head.

    Attributes:
        hidden: `[batch, length, embed]`, in the network's activation dtype.
        kernel: `[embed, vocab]` of `logits_dense`, or the embedding `[vocab, embed]`.
        tied: whether `kernel` is the embedding.
        scale: the factor that the network applies to the logits afterwards.
    """

    hidden: jax.Array
    kernel: jax.Array
    tied: bool
    scale: float

    @property
    def vocab_size(self) -> int:
        """The number of classes."""
        return self.kernel.shape[0 if self.tied else 1]


def capture_head(compute_logits: Callable[[], jax.Array]) -> Head:
    """The hidden states and the head of one forward pass.

    Args:
        compute_logits: runs the network and returns its logits.

    Returns:
        The captured head; `hidden @ kernel * scale` (transposed if tied) in float32
        are the network's logits.

    Raises:
        ValueError: if no head or more than one is called, if the head has parameters
            other than a kernel, or if the logits are changed after it.
    """
    calls = []

    def capture(kernel, tied, hidden, vocab):
        calls.append((hidden, kernel, tied))
        return jnp.zeros((*hidden.shape[:-1], vocab), jnp.float32)

    with nn.intercept_methods(_interceptor(capture)):
        compute_logits()
    if len(calls) != 1:
        raise ValueError(
            "loss_chunk_length needs a network that calls its output head once, as a "
            "module named 'logits_dense' or by the embedder's 'attend': got "
            f"{len(calls)} such calls; set LOSS_CHUNK_LENGTH = None for this network."
        )
    hidden, kernel, tied = calls[0]
    return Head(hidden, kernel, tied, _scale_after_head(compute_logits, *calls[0]))


def _interceptor(replace):
    def intercept(next_function, args, kwargs, context):
        module = context.module
        if context.method_name == "attend":
            kernel = _only_parameter(module, "embedding")
            return replace(kernel, True, args[0], kernel.shape[0])
        if module.name == "logits_dense" and context.method_name == "__call__":
            kernel = _only_parameter(module, "kernel")
            return replace(kernel, False, args[0], kernel.shape[1])
        return next_function(*args, **kwargs)

    return intercept


def _only_parameter(module, name):
    parameters = module.variables.get("params", {})
    if set(parameters) != {name} or parameters[name].ndim != 2:
        shapes = {k: tuple(np.shape(v)) for k, v in parameters.items()}
        raise ValueError(
            f"loss_chunk_length needs a head whose only parameter is a 2-D '{name}': "
            f"got {shapes} at {'/'.join(module.path)}."
        )
    return parameters[name]


def _scale_after_head(compute_logits, hidden, kernel, tied) -> float:
    """The constant between the head's output and the network's logits.

    Raises:
        _changed: a ValueError, if there is more between them than a constant.
    """
    vocab = kernel.shape[0] if tied else kernel.shape[1]
    shape = (*hidden.shape[:-1], vocab)

    def after_head(logits):
        with nn.intercept_methods(_interceptor(lambda *_: logits)):
            return compute_logits()

    closed = jax.make_jaxpr(after_head)(jax.ShapeDtypeStruct(shape, jnp.float32))
    out_aval = closed.out_avals[0]
    if tuple(out_aval.shape) != shape:
        raise _changed(f"their shape goes from {shape} to {tuple(out_aval.shape)}")
    with jax.ensure_compile_time_eval():
        (scale,) = _propagate(closed.jaxpr, [("logits", 1.0)])
    if scale is None or scale[0] != "logits":
        raise _changed("they do not come from the head's output alone")
    return scale[1]


def _propagate(jaxpr, inputs):
    """Follows ("logits", factor) and ("constant", value) through a jaxpr.

    Everything else is None. Raises if anything but a constant factor is applied to the
    logits; operations on other values are ignored.
    """
    env = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom):
        if isinstance(atom, core.Literal):
            return ("constant", float(atom.val)) if np.ndim(atom.val) == 0 else None
        return env.get(atom)

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if all(value is None for value in values) and eqn.invars:
            continue
        env.update(zip(eqn.outvars, _apply(eqn, values), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn, values):
    name = eqn.primitive.name
    on_logits = [v is not None and v[0] == "logits" for v in values]
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if inner is not None and name in {"jit", "pjit", "closed_call", "custom_jvp_call"}:
        return _propagate(getattr(inner, "jaxpr", inner), values)
    unknown = [None] * len(eqn.outvars)
    if not any(on_logits):
        if name in _UNIFORM:
            return [values[0]]
        return _fold(eqn, values) if None not in values else unknown
    if name in _TRANSPARENT:
        return values
    if name == "convert_element_type" and eqn.params["new_dtype"] == jnp.float32:
        return values
    other = [v for v, hit in zip(values, on_logits, strict=True) if not hit]
    if len(other) == 1 and other[0] is not None:
        (_, factor), (_, scale) = other[0], values[on_logits.index(True)]
        if name == "mul":
            return [("logits", scale * factor)]
        if name == "div" and on_logits[0]:
            return [("logits", scale / factor)]
    raise _changed(f"the network applies '{name}' to them")


def _fold(eqn, values):
    """The value of an operation on constants, if it has a single scalar result."""
    scalars = [
        np.asarray(v[1], a.aval.dtype) for v, a in zip(values, eqn.invars, strict=True)
    ]
    if len(eqn.outvars) != 1:
        return [None] * len(eqn.outvars)
    if eqn.params.get("jaxpr") is not None or any(a.aval.shape for a in eqn.invars):
        return [None]
    result = eqn.primitive.bind(*scalars, **eqn.params)
    return [("constant", float(result))] if np.ndim(result) == 0 else [None]


def _changed(what) -> ValueError:
    return ValueError(
        "loss_chunk_length needs logits that leave the network as the head made them, "
        f"up to a constant factor: after the head {what}; set LOSS_CHUNK_LENGTH = None "
        "for this network."
    )
