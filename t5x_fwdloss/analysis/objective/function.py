r"""One loss over a fixed list of batches, and its derivatives.

The objective is $L(\theta) = \sum_b n_b(\theta) / W$, where $n_b$ is the weighted sum of
the token losses of batch $b$ and $W$ the total normalizer of all batches: however the
same examples are split into batches, it is the same function, up to rounding. It is
never a mean of batch means.

Every derivative is compiled once and walks over the batches; vectors are trees like the
parameters, keep their shardings, and are summed in float32 or wider. Scalars are summed
on the host in float64.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings as settings_lib
from t5x_fwdloss.analysis.objective import batches as batches_lib
from t5x_fwdloss.analysis.objective import (
    forward_mode,
    matrices,
    normalization,
    parameters,
)
from t5x_fwdloss.analysis.objective.finite import (
    by_batch,
    check_finite,
    check_vector,
)
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct, in_layout
from t5x_fwdloss.analysis.objective.normalization import Normalizer, total_normalizer
from t5x_fwdloss.analysis.objective.programs import Programs
from t5x_fwdloss.analysis.objective.token_loss import TokenLoss
from t5x_fwdloss.curvature.products.derivatives import (
    directional_derivative,
    gradient,
    mixed_directional_derivative,
)
from t5x_fwdloss.curvature.products.linearized import (
    CompiledMap,
    compiled_for,
    summed,
)
from t5x_fwdloss.curvature.vectors import in_flight, probes, trees
from t5x_fwdloss.loss_mixin import check_no_other_loss
from t5x_fwdloss.losses import LossSettings

PRECISIONS = ("default", "high", "highest")
Precision = Annotated[str, settings_lib.one_of(*PRECISIONS)]
LoadBatches = Callable[[str], Sequence[Mapping[str, Any]]]


class Objective:
    r"""$L(\theta) = \sum_b n_b(\theta) / W$ over a fixed list of batches.

    Every method takes the whole parameter tree and, before anything is compiled,
    rejects a direction that does not fit it (`ValueError`). A NaN or an infinity in a
    result raises `NonFiniteLossError`, which names the batch and the parameter block.

    Attributes:
        batches: the batches, or the microbatches they are cut into, on the device.
        num_microbatches: the number of pieces per batch.
        normalizer: W, its kind, its unit.
        num_tokens: target tokens whose loss counts.
        batches_hash: SHA-256 of the batches' names, shapes, dtypes and bytes.
        precision: matmul precision of every derivative.
        loss_settings: settings of the loss; None where it is not a function of logits.
        model: the model it was made from, if there is one.
    """

    def __init__(
        self,
        numerator: Callable[..., Any],
        batches: Sequence[Mapping[str, Any]],
        *,
        normalizer: Normalizer,
        num_microbatches: int = 1,
        outputs: Callable[..., Any] | None = None,
        predictions: Callable[..., Any] | None = None,
        loss_settings: LossSettings | None = None,
        dropout_seed: int | None = None,
        precision: str = "highest",
        counted: Callable[[Any], Any] = batches_lib.counted,
    ):
        """An objective from functions of one batch.

        Args:
            numerator: `(params, batch, key)` to the batch's weighted sum of token
                losses; key is None unless `dropout_seed` is given.
            batches: feature dictionaries, all of the same names, shapes and dtypes.
            normalizer: the divisor of the sum over batches.
            num_microbatches: pieces that every batch is cut into, to save memory; the
                numbers, and the batches' hash, stay the same. Not with dropout, whose
                masks are drawn for a batch as a whole.
            outputs: `(params, batch, key)` to the logits; None: the Hessian is the only
                matrix.
            predictions: `(params, batch, key)` to the numerator and the most likely
                class of each target token; None: the accuracy is not known.
            loss_settings: the loss as a function of the logits.
            dropout_seed: one fixed dropout key per batch; None turns dropout off.
            precision: 'highest', 'high' or 'default', as `jax.default_matmul_precision`.
            counted: a batch to the mask of target tokens that the loss counts.

        Raises:
            ValueError: no batch, batches that differ, microbatches that do not divide
                them, microbatches with dropout, or an unknown precision.
        """
        settings_lib.check("precision", precision, Precision)
        settings_lib.check("num_microbatches", num_microbatches, settings_lib.Positive)
        settings_lib.check("dropout_seed", dropout_seed, settings_lib.Seed | None)
        if dropout_seed is not None and num_microbatches > 1:
            raise ValueError(
                "num_microbatches must be 1 where dropout_seed is given, because "
                "dropout draws its masks for each piece anew and the loss would be "
                f"another: got num_microbatches={num_microbatches}, "
                f"dropout_seed={dropout_seed}; lower the batch size instead."
            )
        found = batches_lib.checked(batches)
        self.num_tokens = batches_lib.num_tokens(map(counted, found))
        self.batches_hash = batches_lib.digest(found)
        pieces = batches_lib.split(found, num_microbatches)
        self.batches = [batches_lib.on_device(batch) for batch in pieces]
        self.num_microbatches = num_microbatches
        self.normalizer = normalizer
        self.precision = precision
        self.dropout_seed = dropout_seed
        self.loss_settings = loss_settings
        self.model: Any = None
        self._numerator = numerator
        self._outputs = outputs
        self._predictions = predictions
        self._counted = counted
        self._activation_dtype: str | None = None
        token_loss = None if loss_settings is None else TokenLoss(loss_settings)
        self._linear_maps = matrices.linear_maps(
            self.batch_loss,
            None
            if outputs is None
            else lambda p, batch, key, _: outputs(p, batch, key),
            token_loss,
            normalizer.total,
        )
        # For the matrices that are positive semidefinite only if the loss is convex.
        self._least_scales: dict[str, Callable[..., Any]] = {}
        if outputs is not None and token_loss is not None:
            self._least_scales["gauss_newton"] = lambda p, batch, key, _: (
                token_loss.least_scale(outputs(p, batch, key), batch)
            )
        self._programs = Programs(precision)
        # Kept for the next checkpoint of a sweep: nothing is compiled twice.
        self._compiled: dict[Any, Any] = {}
        self._compiled_maps: dict[Any, CompiledMap] = {}
        self._with_losses: dict[Any, Objective] = {}
        self._load_batches: LoadBatches | None = None
        self._on_splits: dict[str, Objective] = {}
        if dropout_seed is None:
            self._keys = [None] * len(self.batches)
        else:
            root = probes.as_key(dropout_seed)
            self._keys = [jax.random.fold_in(root, i) for i in range(len(self.batches))]

    @classmethod
    def from_model(
        cls,
        model: Any,
        batches: Sequence[Mapping[str, Any]],
        *,
        num_microbatches: int = 1,
        dropout_seed: int | None = None,
        precision: str = "highest",
        load_batches: LoadBatches | None = None,
    ) -> "Objective":
        """The training loss of a model that has `LossMixin`'s `loss_sum`.

        Args:
            model: a T5X model with this package's loss, or the standalone one.
            batches: the model's features, all of one shape.
            num_microbatches: pieces that every batch is cut into, to save memory.
            dropout_seed: one fixed dropout key per batch; None turns dropout off.
            precision: matmul precision of every derivative.
            load_batches: the name of another split of the data to its batches; None:
                there is no other.

        Raises:
            ValueError: the model has no loss of this package's, or another one besides
                it; or no token of the batches counts.
        """
        check_no_other_loss(model)
        loss_settings = getattr(model, "loss_settings", None)
        if loss_settings is None:
            raise ValueError(
                "The model must have its loss from this package, as "
                "t5x_fwdloss.models.with_loss gives it to T5X's models: got a "
                f"{type(model).__name__}."
            )
        factor = loss_settings.loss_normalizing_factor
        found = batches_lib.checked(batches)
        counted = functools.partial(normalization.counted, factor=factor)
        normalization.check_counted(list(map(counted, found)))
        objective = cls(
            lambda params, batch, key: model.loss_sum(params, batch, key)[0],
            found,
            normalizer=total_normalizer(factor, found),
            num_microbatches=num_microbatches,
            outputs=getattr(model, "_compute_logits", None),
            predictions=getattr(model, "loss_and_predictions", None),
            loss_settings=loss_settings,
            dropout_seed=dropout_seed,
            precision=precision,
            counted=counted,
        )
        objective.model = model
        objective._load_batches = load_batches
        return objective

    def on_split(self, split: str) -> "Objective":
        """The same loss over the batches of another split, which are read once.

        Args:
            split: its name.

        Raises:
            ValueError: it cannot be read.
        """
        if split not in self._on_splits:
            if self._load_batches is None:
                raise ValueError(
                    f"other_split needs a run that can read other splits of its data: "
                    f"got {split!r}, and this one cannot."
                )
            try:
                batches = self._load_batches(split)
            except ValueError as error:
                raise ValueError(
                    "other_split must be a split that the run can read as it reads its "
                    f"own: got {split!r}. {error}"
                ) from error
            self._on_splits[split] = Objective.from_model(
                self.model,
                batches,
                num_microbatches=self.num_microbatches,
                dropout_seed=self.dropout_seed,
                precision=self.precision,
            )
        return self._on_splits[split]

    def with_model(self, model: Any) -> "Objective":
        """The same batches under another model, such as the same with another loss."""
        found = Objective.from_model(
            model,
            self.batches,
            dropout_seed=self.dropout_seed,
            precision=self.precision,
        )
        # The batches are cut already: messages name them as before.
        found.num_microbatches = self.num_microbatches
        found.batches_hash = self.batches_hash
        return found

    def with_loss(self, impl: str, chunk_length: int | None) -> "Objective":
        """The same batches and model under another implementation of the loss."""
        key = impl, chunk_length
        if key not in self._with_losses:
            model = self.model.with_loss(impl, chunk_length)
            self._with_losses[key] = self.with_model(model)
        return self._with_losses[key]

    def compiled(
        self, name: str, function: Callable[..., Any], params: PyTree, *more: Any
    ) -> Any:
        """`function(params, batch, key, *more)` compiled for the first batch, once.

        At this objective's matmul precision; for measuring memory and time.

        Args:
            name: name of its result; the same name must mean the same function.
            function: the function.
            params: parameters.
            *more: further arguments.
        """
        args = (params, self.batches[0], self._keys[0], *more)
        key = name, compiled_for(args)
        if key not in self._compiled:
            with jax.default_matmul_precision(self.precision):
                self._compiled[key] = jax.jit(function).lower(*args).compile()
        return self._compiled[key]

    @property
    def W(self) -> float:
        """The total normalizer."""
        return self.normalizer.total

    @property
    def loss_record(self) -> dict[str, Any]:
        """The settings of the loss as JSON holds them; empty where there are none."""
        return {} if self.loss_settings is None else self.loss_settings.record

    @property
    def num_traces(self) -> dict[str, int]:
        """How often each derivative was traced: once each, unless shapes change."""
        return self._programs.num_traces

    def num_labels_outside(self, params: PyTree) -> int | None:
        """The number of counted labels outside the classes of the logits.

        The loss of such a label has no target in it. None where the objective does not
        know the logits.
        """
        if self._outputs is None:
            return None
        key, batch = self._keys[0], self.batches[0]
        logits = jax.eval_shape(self._outputs, params, batch, key)
        counts = [
            batches_lib.num_labels_outside(
                batch, self._counted(batch), logits.shape[-1]
            )
            for batch in self.batches
        ]
        return sum(int(count) for count in jax.device_get(counts))

    def key(self, number: int) -> jax.Array | None:
        """The fixed dropout key of batch `number`; None where dropout is off."""
        return self._keys[number]

    def batch_loss(
        self, params: PyTree, batch: Any, key: Any = None, index: Any = None
    ) -> jax.Array:
        """One batch's share of the objective, $n_b / W$: traceable, differentiable.

        Args:
            params: parameters.
            batch: one of the batches.
            key: its dropout key.
            index: its number; the loss does not depend on it.
        """
        del index
        return self._share(self._numerator(params, batch, key))

    def _share(self, numerator):
        share = numerator / self.W
        return share.astype(jnp.promote_types(share.dtype, jnp.float32))

    def batch_values(self, params: PyTree) -> np.ndarray:
        """Each batch's share $n_b / W$ of the objective, in order, float64."""
        found = self._scalars("the loss", self.batch_loss, params)
        pieces = np.asarray([float(x) for x in found], np.float64)
        return pieces.reshape(-1, self.num_microbatches).sum(axis=1)

    def value(self, params: PyTree) -> float:
        r"""The loss $L(\theta)$, summed over batches in float64."""
        shares = self.batch_values(params)
        check_finite("the loss", by_batch({"its value": x} for x in shares))
        return math.fsum(shares)

    def value_and_accuracy(self, params: PyTree) -> tuple[float, float | None]:
        """The loss, and the share of tokens that count whose label is most likely.

        Both come from one forward pass. The accuracy is None where the objective knows
        no predictions. A token counts once, whatever its weight.
        """
        if self._predictions is None:
            return self.value(params), None
        found = self._scalars(
            "the loss and the accuracy", self._loss_and_correct, params
        )
        shares = [float(share) for share, _ in found]
        parts = ({"its value": x} for x in shares)
        check_finite("the loss", by_batch(parts, self.num_microbatches))
        correct = sum(int(count) for _, count in found)
        return math.fsum(shares), correct / self.num_tokens

    def _loss_and_correct(self, params, batch, key=None, index=None):
        del index
        assert self._predictions is not None
        numerator, classes = self._predictions(params, batch, key)
        correct = (classes == batch["decoder_target_tokens"]) & self._counted(batch)
        return self._share(numerator), jnp.sum(correct)

    def gradient(self, params: PyTree) -> PyTree:
        """The gradient, a tree like the parameters' floating-point leaves."""
        layout = parameters.shardings(params)
        program = self._programs.compiled(
            "the gradient", gradient(self.batch_loss), layout
        )
        wide = parameters.widened(params)
        parts = lambda: (program(wide, *pair) for pair in self.pairs())
        total = summed(parts())
        check_vector("the gradient", total, parts, self.num_microbatches)
        return total

    def jvp(self, params: PyTree, direction: PyTree) -> tuple[float, float]:
        r"""The loss and its directional derivative $\langle \nabla L, v \rangle$.

        It takes one forward pass; the loss must have forward mode, which a
        `jax.custom_vjp` loss has not.
        """
        trees.check_like(direction, params, "direction")
        found = self._scalars(
            "the jvp", directional_derivative(self.batch_loss), params, direction
        )
        shares = [(float(x), float(y)) for x, y in found]
        parts = ({"its value": x, "its derivative": y} for x, y in shares)
        check_finite("the loss", by_batch(parts, self.num_microbatches))
        value, derivative = zip(*shares, strict=True)
        return math.fsum(value), math.fsum(derivative)

    def mixed(self, params: PyTree, u: PyTree, v: PyTree) -> tuple[float, float]:
        r"""The derivatives $\langle \nabla L, u \rangle$ and $\langle u, H v \rangle$.

        By one jvp through a jvp: the loss must have forward mode.
        """
        for direction in (u, v):
            trees.check_like(direction, params, "direction")
        function = mixed_directional_derivative(self.batch_loss)
        found = self._scalars("the second derivative", function, params, u, v)
        pairs = [(float(x), float(y)) for x, y in found]
        parts = ({"its slope": x, "its curvature": y} for x, y in pairs)
        check_finite("the loss", by_batch(parts, self.num_microbatches))
        slope, curvature = zip(*pairs, strict=True)
        return math.fsum(slope), math.fsum(curvature)

    def product(
        self,
        matrix: str,
        params: PyTree,
        memory_budget: int | None = None,
        *,
        fold: bool = True,
    ) -> MatrixProduct:
        """The product of a matrix at fixed parameters with vectors, one or many.

        The part that does not depend on the vector is computed here, once per batch,
        and kept as far as memory allows.

        Args:
            matrix: its name in `matrices.WORDS`, such as 'hessian' or 'fisher'.
            params: parameters.
            memory_budget: bytes per device that may be kept; None: half of the free
                memory; 0: each product differentiates anew.
            fold: whether to rewrite the linear functions to read less memory; where
                that fails, they are kept as JAX made them.

        A matrix that the objective does not have raises `ValueError`.
        """
        linear_map = self.linear_map(matrix, params)
        return MatrixProduct(
            matrices.WORDS[matrix],
            linear_map,
            parameters.widened(params),
            list(self.pairs()),
            num_microbatches=self.num_microbatches,
            precision=self.precision,
            memory_budget=memory_budget,
            fold=fold,
            is_semidefinite=self._semidefinite(matrix, params),
            rounding=lambda: self.tolerance(params),
        )

    def linear_map(self, matrix: str, params: PyTree) -> CompiledMap:
        """The compiled functions of the product with a matrix, the same in every call.

        Args:
            matrix: its name in `matrices.WORDS`.
            params: parameters, or their shapes, whose shardings the products have.

        A matrix that the objective does not have raises `ValueError`.
        """
        self.check_matrix(matrix)
        layout = parameters.shardings(params)
        key = matrix, tuple(jax.tree.leaves(layout))
        if key not in self._compiled_maps:
            linear_map = self._linear_maps[matrix]
            self._compiled_maps[key] = in_layout(linear_map, layout)
        return self._compiled_maps[key]

    def traced_gradient(self, params: PyTree) -> jax.stages.Traced:
        """The gradient of the first batch, traced, as `gradient` compiles it."""
        return self._programs.traced(
            "the gradient",
            gradient(self.batch_loss),
            parameters.shardings(params),
            *(parameters.widened(params), *next(self.pairs())),
        )

    def tolerance(self, params: PyTree) -> float:
        """The relative error that rounding may leave in a derivative."""
        return forward_mode.TOLERANCES.get(self.activation_dtype(params), 1e-1)

    def _semidefinite(self, matrix, params):
        if matrix == "hessian":
            return None
        if matrix not in self._least_scales:
            return lambda: True
        least = self._least_scales[matrix]
        return lambda: min(self._scalars("the loss's convexity", least, params)) >= 0

    def activation_dtype(self, params: PyTree) -> str:
        """The narrowest type in which the network multiplies matrices; traces, once."""
        if self._activation_dtype is None:
            traced = self.traced_jvp(params)
            self._activation_dtype = forward_mode.narrowest_product(traced)
        return self._activation_dtype

    def traced_jvp(self, params: PyTree) -> Any:
        """The jaxpr of `jvp` for the first batch; a later `jvp` compiles this trace."""
        params = parameters.widened(params)
        return self._programs.traced(
            "the jvp",
            directional_derivative(self.batch_loss),
            parameters.replicated(params),
            *(params, trees.float_part(params), *next(self.pairs())),
        ).jaxpr

    def check_matrix(self, matrix: str) -> None:
        """Reject a matrix that this objective does not have.

        Raises:
            ValueError: names those there are, or says what is missing.
        """
        if matrix not in matrices.WORDS:
            raise ValueError(
                f"matrix must be one of {', '.join(matrices.WORDS)}: got {matrix!r}."
            )
        if matrix not in self._linear_maps:
            raise ValueError(
                f"{matrices.WORDS[matrix]} needs the model's logits: this objective "
                "was built without outputs and loss_settings."
            )

    def pairs(self) -> Iterator[tuple[Any, Any, int]]:
        """The arguments after the parameters and vectors, batch by batch."""
        return zip(self.batches, self._keys, range(len(self.batches)), strict=True)

    def _scalars(self, name, function, params, *directions):
        layout = parameters.replicated(params)
        program = self._programs.compiled(name, function, layout)
        params = parameters.widened(params)
        found = [
            in_flight.limited(number, program(params, *directions, *pair))
            for number, pair in enumerate(self.pairs())
        ]
        return jax.device_get(found)
