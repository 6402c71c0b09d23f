r"""A linearized function, rewritten to read less memory in each product.

`jax.linearize` returns a linear jaxpr with the network's *residuals* as constants, one
for each factor of the chain rule: eighteen arrays of a gated GELU's width, where its
second derivative has four coefficients. Reading them dominates the time of products.
`fold` rewrites the jaxpr once, at linearization:

* Sums and products with constants become linear combinations $\sum_i c_i \odot x_i$,
  whose coefficients are multiplied out beforehand.
* A product that contracts the leading axes of a constant (a weight's gradient, over batch
  and length) gets it transposed in advance, as its left operand: a compiler that needs
  this layout would transpose in every product, and may compute the other operand's
  elementwise chain in that order.
* A constant with inner batch axes (attention heads) gets them moved to the front.

Results equal the jaxpr's up to rounding: coefficients are multiplied out and added in
float32 at least, since in float16 their products leave its range. Control flow (a scan
over layers), functions with derivative rules and `shard_map` are kept as they are.
"""

import collections
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import PyTree

from t5x_fwdloss.curvature.products.linear_forms import Fill, Form, Pool, scaled, wider
from t5x_fwdloss.curvature.products.linear_program import Folded, Program, Step

INLINED = ("pjit", "jit", "closed_call", "core_call")


def fold(*functions: tuple[Callable[[PyTree], PyTree], PyTree]) -> Folded:
    """Linear functions, rewritten.

    Call it inside of the traced function that they were made in.

    Args:
        *functions: pairs of a linear function and a tree like its argument.
    """
    pool = Pool([], {}, {})
    programs = []
    for function, like in functions:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(like)
        folding = _Folding(len(closed.in_avals), pool)
        inputs = [Form({i: None}) for i in range(len(closed.in_avals))]
        found = folding.run(closed.jaxpr, closed.consts, inputs)
        results = tuple(map(folding.variable, found, closed.out_avals))
        structure = jax.tree.structure(shapes)
        programs.append(Program(tuple(folding.steps), results, structure))
    return Folded(pool.constants, tuple(programs))


class _Folding:
    """The steps of one jaxpr, collected so far."""

    def __init__(self, num_variables, pool):
        self.steps: list[Step] = []
        self._pool = pool
        self._made: dict[int, tuple[Form, int]] = {}
        self._count = num_variables

    def run(self, jaxpr, consts, inputs):
        """A jaxpr's results, as values or linear combinations."""
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))
        uses = collections.Counter(
            v
            for reader in (*jaxpr.eqns, jaxpr)
            for v in (reader.outvars if reader is jaxpr else reader.invars)
            if not isinstance(v, core.Literal)
        )
        for eqn in jaxpr.eqns:
            args = [
                v.val if isinstance(v, core.Literal) else known[v] for v in eqn.invars
            ]
            for var, value in zip(eqn.outvars, self._equation(eqn, args), strict=True):
                known[var] = value
                if uses[var] > 1 and isinstance(value, Form) and len(value.terms) > 1:
                    # A sum with several readers would have coefficients for each.
                    known[var] = Form({self.variable(value, var.aval): None})
        return [
            v.val if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars
        ]

    def _equation(self, eqn, given):
        name = eqn.primitive.name
        if name in INLINED:
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            return self.run(inner.jaxpr, inner.consts, given)
        if name == "broadcast_in_dim" and isinstance(eqn.invars[0], core.Literal):
            return [Fill(eqn.invars[0].val, eqn.outvars[0].aval)]
        args: list[Any] = [
            arg.array() if isinstance(arg, Fill) else arg for arg in given
        ]
        moving = [isinstance(arg, Form) for arg in args]
        if not any(moving):
            if eqn.primitive.multiple_results:
                # It may hold jaxprs with constants that its text leaves out.
                return _evaluate(eqn, args)
            key = name, str(eqn.params)
            return [self._pool.compute(key, lambda *x: _evaluate(eqn, x)[0], *args)]
        shape = eqn.outvars[0].aval
        if name in ("add", "add_any", "sub") and all(moving):
            right = self._times(args[1], -1.0) if name == "sub" else args[1]
            return [args[0].plus(right)]
        if name == "neg":
            return [self._times(args[0], -1.0)]
        if name == "mul":
            factor, form = args if moving[1] else args[::-1]
            return [self._scaled(form, factor, shape)]
        if name == "dot_general":
            return [self._dot(eqn, args, moving)]
        return self._bind(eqn, args, moving)

    def _scaled(self, form, factor, shape):
        # Multiplied out only if that does not increase the number of coefficients.
        if jnp.ndim(factor) and len(form.terms) > max(1, form.num_arrays):
            form = Form({self.variable(form, shape): None})
        return self._times(form, factor)

    def _times(self, form, factor):
        terms = form.terms.items()
        return Form({i: self._pool.product(c, factor) for i, c in terms})

    def _bind(self, eqn, args, moving):
        """The unchanged equation, applied to variables."""
        avals = [v.aval for v in eqn.invars]
        variables = [
            self.variable(arg, aval)
            for arg, aval, moves in zip(args, avals, moving, strict=True)
            if moves
        ]
        fixed = [arg for arg, moves in zip(args, moving, strict=True) if not moves]

        def function(*values):
            moved, still = (
                iter(values[: len(variables)]),
                iter(values[len(variables) :]),
            )
            operands = [next(moved) if moves else next(still) for moves in moving]
            return _evaluate(eqn, operands)

        results = self._step(function, variables, fixed, len(eqn.outvars))
        return [Form({i: None}) for i in results]

    def _dot(self, eqn, args, moving):
        """A product of a variable with a constant, laid out in advance."""
        if eqn.params["out_sharding"] is not None:  # of axes in this order
            return self._bind(eqn, args, moving)[0]
        left = moving[0]  # the variable is the left operand
        form, constant = args if left else args[::-1]
        contract, batch = eqn.params["dimension_numbers"]
        if not left:
            contract, batch = contract[::-1], batch[::-1]
        num_contracted = len(contract[0])
        leading = tuple(range(num_contracted))
        weight = not batch[0] and tuple(contract[0]) == tuple(contract[1]) == leading
        inside = tuple(batch[1]) != tuple(range(len(batch[1])))
        ndim = jnp.ndim(constant)
        free = [i for i in range(ndim) if i not in (*contract[1], *batch[1])]
        if all(moving) or not (weight or inside) or not free:
            return self._bind(eqn, args, moving)[0]
        order = (*batch[1], *free, *contract[1])
        laid_out = self._pool.compute(
            ("transpose", order), lambda x: jnp.transpose(x, order), constant
        )
        trailing = tuple(range(ndim - num_contracted, ndim))
        params = eqn.params | {
            "dimension_numbers": (
                (trailing, tuple(contract[0])),
                (tuple(range(len(batch[1]))), tuple(batch[0])),
            )
        }
        num_batch, num_free = len(batch[1]), len(free)

        def function(variable, constant):
            (found,) = _evaluate(eqn.replace(params=params), [constant, variable])
            if not left:
                return [found]
            # batch, constant's, variable's axes: the latter two change places.
            order = list(range(found.ndim))
            middle = num_batch + num_free
            order = order[:num_batch] + order[middle:] + order[num_batch:middle]
            return [jnp.transpose(found, order)]

        variable = self.variable(form, eqn.invars[0 if left else 1].aval)
        (number,) = self._step(function, [variable], [laid_out], 1)
        return Form({number: None})

    def variable(self, value, aval) -> int:
        """The number of a variable that holds a linear combination (or a constant)."""
        if isinstance(value, Fill):
            return self._step(lambda: [value.array()], [], [], 1)[0]
        if not isinstance(value, Form):
            return self._step(lambda x: [x], [], [value], 1)[0]
        if list(value.terms.values()) == [None]:
            return next(iter(value.terms))
        if id(value) in self._made:
            return self._made[id(value)][1]
        variables = list(value.terms)
        coefficients = [value.terms[i] for i in variables]
        fixed = [c for c in coefficients if c is not None]
        plain = [c is None for c in coefficients]
        count = len(variables)

        def function(*values):
            factors = iter(values[count:])
            terms = [
                x if one else scaled(x, next(factors))
                for x, one in zip(values[:count], plain, strict=True)
            ]
            dtype = wider(*(x.dtype for x in terms))
            total = functools.reduce(operator.add, (x.astype(dtype) for x in terms))
            return [total.astype(aval.dtype)]

        (number,) = self._step(function, variables, fixed, 1)
        self._made[id(value)] = (value, number)
        return number

    def _step(self, function, variables, fixed, num_results):
        constants = tuple(map(self._pool.number, fixed))
        results = tuple(range(self._count, self._count + num_results))
        self._count += num_results
        self.steps.append(Step(function, tuple(variables), constants, results))
        return results


def _evaluate(eqn, operands):
    """The results of an equation at these operands, as `jax.core.eval_jaxpr` does it."""
    # Equations that hold functions need other parameters for `bind` than they show.
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*operands, **params)
    return list(found) if eqn.primitive.multiple_results else [found]
