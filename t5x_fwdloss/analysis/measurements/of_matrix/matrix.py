r"""The matrix of a measurement: whole or a group's block, preconditioned, damped.

With $A$ the matrix that is named, $P$ the projection on a parameter group and
$D^2$ the diagonal preconditioner of the checkpoint's optimizer at its step, up to its
learning rate (see `t5x_fwdloss.analysis.optimizer`), it is

$$ P D A D P + \lambda P, \qquad D = I \text{ unless preconditioned}, $$

a map on the group alone, and on the parameters that the optimizer trains. $D A D$ has
the eigenvalues of $D^2 A$, which decide whether steps are stable.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings
from t5x_fwdloss.analysis.measurements.context import Context, Measurement
from t5x_fwdloss.analysis.measurements.rounding import NUM_DRAWS
from t5x_fwdloss.analysis.measurements.work import Work, in_blocks
from t5x_fwdloss.analysis.numbers import Number
from t5x_fwdloss.analysis.objective import matrices
from t5x_fwdloss.curvature.estimators.probe_sums import (
    ProbeEstimates,
    ProbeState,
    probe_estimates,
)
from t5x_fwdloss.curvature.vectors import groups, preconditioning, trees
from t5x_fwdloss.curvature.vectors.trees import Matvec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixMeasurement(Measurement):
    """A measurement of a matrix, transformed by group, optimizer and damping.

    Attributes:
        matrix: 'hessian', 'gauss_newton', 'fisher', 'sampled_fisher' or
            'empirical_fisher' (see `t5x_fwdloss.analysis.objective.matrices`).
        name: name in the results; None: matrix and quantity, such as 'hessian_trace'.
        group: a regular expression for the whole path of parameters, such as
            'decoder/.*': only their diagonal block is measured; None: all of it.
        preconditioned: whether by the checkpoint's optimizer at its step.
        damping: the constant added to every eigenvalue.
    """

    matrix: Annotated[str, settings.one_of(*matrices.WORDS)] = "hessian"
    name: settings.FilledIn[settings.Words] = None  # pyright: ignore[reportAssignmentType]
    group: settings.Pattern | None = None
    preconditioned: bool = False
    damping: float = 0.0

    def __post_init__(self):
        """Fills in the default of the name."""
        if self.name is None:
            quantity = re.sub("(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()
            object.__setattr__(self, "name", f"{self.matrix}_{quantity}")

    def lighter(self) -> Sequence[tuple[str, Measurement]]:
        """With its basis on the host, and with single products, if it can have these."""
        names = {field.name for field in dataclasses.fields(self)}
        values = {"basis_on_host": True, "block_size": 1}
        return [
            self._with(name, value)
            for name, value in values.items()
            if name in names and getattr(self, name) != value
        ]

    def _with(self, name: str, value: Any) -> tuple[str, Measurement]:
        setting = f"{type(self).__name__}.{name} = {value}"
        return setting, dataclasses.replace(self, **{name: value})

    def planned(self, num_products: int, **numbers: Any) -> Work:
        """Its work, with the vectors that the transformed matrix needs beside its own.

        Args:
            num_products: products, counted by single vectors.
            **numbers: the further attributes of `Work`, of the plain matrix.
        """
        # The diagonal is kept, its root and the vector in between are not; a group and
        # damping take one vector each.
        more = 3 * self.preconditioned + (self.group is not None) + bool(self.damping)
        working = numbers.pop("working", 1) + more
        return Work(
            matrix=self.matrix, num_products=num_products, working=working, **numbers
        )

    @property
    def first_matrix(self) -> str:
        """Its matrix."""
        return self.matrix

    @property
    def optimizer_setting(self) -> str:
        """The setting that asks for the preconditioned matrix."""
        return "preconditioned" if self.preconditioned else ""

    @property
    def patterns_of_groups(self) -> Sequence[str]:
        """That of its group."""
        return () if self.group is None else (self.group,)

    def validate(self, context: Context) -> None:
        """Check that the matrix is there, with group and optimizer.

        Raises:
            ValueError: the objective lacks the matrix, the group matches nothing that is
                trained, or the run cannot read an optimizer's state.
        """
        context.objective.check_matrix(self.matrix)
        if self.preconditioned:
            context.check_preconditioner(f"{type(self).__name__}.preconditioned")
        mask = self.mask(context)
        if mask is not None and not any(jax.tree.leaves(mask)):
            trained = jax.tree.leaves(context.preconditioner().trained)
            floats = trees.float_part(context.params)
            names = zip(trees.leaf_paths(floats), trained, strict=True)
            some = ", ".join([name for name, flag in names if flag][:3])
            raise ValueError(
                f"{type(self).__name__}.group must hold parameters that the checkpoint's "
                f"optimizer trains: {self.group!r} holds none, and it trains {some} and "
                "others."
            )

    def mask(self, context: Context) -> PyTree | None:
        """The group as a tree of booleans; None for all parameters."""
        mask = None
        if self.group is not None:
            mask = groups.group_mask(context.params, self.group)
        if not self.preconditioned:
            return mask
        trained = context.preconditioner().trained
        if all(jax.tree.leaves(trained)):
            return mask
        return trained if mask is None else _both(mask, trained)

    def parts(self, context: Context, patterns: Mapping[str, str]) -> dict[str, PyTree]:
        """The masks of groups of the parameters that it is a matrix of.

        Args:
            context: the run.
            patterns: group's name to a regular expression for the whole path.

        Returns:
            The masks by name, without the groups that hold none of the parameters.
        """
        masks, mask = groups.group_masks(context.params, patterns), self.mask(context)
        if mask is not None:
            masks = {name: _both(found, mask) for name, found in masks.items()}
        return {name: x for name, x in masks.items() if any(jax.tree.leaves(x))}

    def dimension(self, context: Context) -> int:
        """The number of parameters it is a matrix of."""
        mask = self.mask(context)
        if mask is None:
            return trees.dimension(context.params)
        return groups.group_dimension(context.params, mask)

    def unit(self, context: Context) -> str:
        """The unit of its eigenvalues."""
        if not self.preconditioned:
            return context.curvature_unit
        # A step is the learning rate times P g: of a unit of parameters.
        return "1" if context.preconditioner().includes_learning_rate else "1/η"

    def stability(self, context: Context) -> dict[str, Number]:
        """The eigenvalue above which the optimizer's steps diverge, if it is known.

        Nothing unless preconditioned, or where damping moves the eigenvalues.
        """
        if not self.preconditioned or self.damping:
            return {}
        found = context.preconditioner()
        if found.threshold is None:
            return {}
        if found.learning_rate:  # steps of a rate of zero never diverge
            threshold = found.threshold / found.learning_rate
            return {
                "stability_threshold": Number(threshold, "1/η"),
                "learning_rate": Number(found.learning_rate, "η"),
            }
        if found.includes_learning_rate:
            return {"stability_threshold": Number(found.threshold, "1")}
        return {"stability_threshold_times_learning_rate": Number(found.threshold, "1")}

    def optimizer_notes(self, context: Context) -> tuple[str, ...]:
        """Notes on the optimizer for a comparison with the threshold."""
        if not self.preconditioned:
            return ()
        found = context.preconditioner()
        notes = [_words(found)]
        if context.objective.normalizer.kind in ("sum", "constant"):
            notes.append(
                "The loss is a sum over the tokens of all analyzed batches: compare with "
                "the threshold at the number of tokens in a batch of the training."
            )
        here = trees.dimension(context.params)
        trained = groups.group_dimension(context.params, found.trained)
        if trained < here:
            notes.append(
                f"The optimizer trains {trained} of {here} parameters; the others are "
                "left out."
            )
        return tuple(notes)

    def vector(self, context: Context, v: PyTree) -> PyTree:
        """A gradient in the coordinates of the matrix, $P D v$."""
        if self.preconditioned:
            root = preconditioning.root(context.preconditioner().diagonal)
            v = preconditioning.apply_diagonal(root, v)
        mask = self.mask(context)
        return v if mask is None else groups.restrict(v, mask)

    def direction(self, context: Context, v: PyTree) -> PyTree:
        """An eigenvector as a direction of the parameters, $D v$."""
        if not self.preconditioned:
            return v
        root = preconditioning.root(context.preconditioner().diagonal)
        return preconditioning.apply_diagonal(root, v)

    def product(
        self, context: Context, block_size: int = 1, at: PyTree | None = None
    ) -> Matvec:
        """The product with the matrix transformed by group, optimizer and damping.

        Args:
            context: the run.
            block_size: 1, or how many vectors are stacked.
            at: other parameters, for products with one vector; None: the checkpoint's.
        """
        found = context.product(self.matrix, block_size, at)
        if self.preconditioned:
            root = preconditioning.root(context.preconditioner().diagonal)
            found = preconditioning.congruent(found, root)
        mask = self.mask(context)
        if mask is not None:
            found = groups.restricted(found, mask)
        if self.damping:
            found = _damped(found, self.damping, mask)
        return found

    def one_probe(
        self, context: Context, at: PyTree | None, **settings: Any
    ) -> ProbeEstimates:
        """The estimate from a single probe: enough to measure the effect of rounding.

        Args:
            context: the run.
            at: parameters, as of `product`.
            **settings: groups and diagonal, as of `probe_estimates`.
        """
        key = context.key(f"{self.matrix}/one_probe")
        product = self.product(context, at=at)
        return probe_estimates(product, context.params, key, num_probes=1, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedMeasurement(MatrixMeasurement):
    """A measurement of a matrix by its products with random signs.

    Attributes:
        num_probes: number of random vectors.
        block_size: probes in one compiled, vmapped product.
    """

    num_probes: settings.Several = 32
    block_size: settings.Positive = 4

    def work(self, params: PyTree) -> Work:
        """A product for each probe; nothing is kept but sums."""
        del params
        return self.planned(
            self.num_probes,
            block_size=self.block_size,
            working=in_blocks(self.block_size),
            rounded_products=NUM_DRAWS + 1,
        )

    def probed(self, context: Context, **settings: Any) -> ProbeEstimates:
        """The estimates from all probes, resumed from the saved sums if there are any.

        Args:
            context: the run.
            **settings: groups, diagonal and confidence, as of `probe_estimates`.
        """
        return context.resumed(
            self.name,
            ProbeState,
            self.num_probes,
            functools.partial(
                probe_estimates,
                self.product(context, self.block_size),
                context.params,
                context.key(f"{self.name}/probes"),
                num_probes=self.num_probes,
                block_size=self.block_size,
                **settings,
            ),
        )


def _words(found) -> str:
    if found.threshold is None:
        return (
            f"Preconditioned by the checkpoint's optimizer, {found.optimizer}, whose "
            "momentum is not one that the threshold of stability is known for."
        )
    words = f"Preconditioned by the checkpoint's optimizer, {found.optimizer}: "
    if found.learning_rate is not None:
        return (
            f"{words}its steps are stable while eigenvalues are below "
            f"{found.threshold:.4g} / η, at its learning rate η = "
            f"{found.learning_rate:.4g} here."
        )
    if found.includes_learning_rate:
        return (
            f"{words}its learning rate, which could not be told apart, is a factor of "
            f"the eigenvalues, and its steps are stable while they are below "
            f"{found.threshold:.4g}."
        )
    return (
        f"{words}its steps are stable while eigenvalues are below "
        f"{found.threshold:.4g} / η; its learning rate η is not known to this run: "
        "LEARNING_RATE_FN gives it."
    )


def _both(one, other):
    return jax.tree.map(lambda x, y: x and y, one, other)


def _damped(product, damping, mask):
    def damped(v):
        inside = v if mask is None else groups.restrict(v, mask)
        return trees.axpy(damping, inside, product(v))

    return damped
