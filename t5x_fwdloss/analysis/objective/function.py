"""The function that is analyzed: which loss of which network, and its matrices.

Its sum over batches and that sum's derivatives are in `sum_over_batches`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from t5x_fwdloss.analysis import settings as settings_lib
from t5x_fwdloss.analysis.objective import batches as batches_lib
from t5x_fwdloss.analysis.objective import matrices, normalization, parameters
from t5x_fwdloss.analysis.objective.finite import by_batch, check_finite
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct, in_layout
from t5x_fwdloss.analysis.objective.normalization import Normalizer, total_normalizer
from t5x_fwdloss.analysis.objective.of_outputs.any_loss import AnyLoss
from t5x_fwdloss.analysis.objective.of_outputs.token_loss import TokenLoss
from t5x_fwdloss.analysis.objective.sum_over_batches import SumOverBatches
from t5x_fwdloss.curvature.products.linearized import CompiledMap
from t5x_fwdloss.loss_mixin import check_no_other_loss
from t5x_fwdloss.losses import LossSettings

LoadBatches = Callable[[str], Sequence[Mapping[str, Any]]]


class Objective(SumOverBatches):
    """The loss over a fixed list of batches, with its derivatives and matrices.

    Attributes:
        normalizer: W, its kind, its unit.
        num_tokens: target tokens whose loss counts; losses that count, where the loss is
            not one of tokens.
        loss_settings: settings of the loss; None where it is not the cross entropy of
            tokens.
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
        any_loss: AnyLoss | None = None,
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
            outputs: `(params, batch, key)` to the logits, or what `any_loss` is a loss
                of; None: the Hessian is the only matrix.
            predictions: `(params, batch, key)` to the numerator and the most likely
                class of each target token; None: the accuracy is not known.
            loss_settings: the loss as a function of the logits.
            any_loss: the loss as a function of the outputs, where it is not the cross
                entropy of tokens.
            dropout_seed: one fixed dropout key per batch; None turns dropout off.
            precision: 'highest', 'high' or 'default', as `jax.default_matmul_precision`.
            counted: a batch to the mask of target tokens that the loss counts.

        No batch, batches that differ, microbatches that do not divide them, microbatches
        with dropout, and an unknown precision raise `ValueError`.
        """
        found = batches_lib.checked(batches)
        super().__init__(
            numerator,
            found,
            total=normalizer.total,
            num_microbatches=num_microbatches,
            dropout_seed=dropout_seed,
            precision=precision,
        )
        self.num_tokens = batches_lib.num_tokens(map(counted, found))
        self.normalizer = normalizer
        self.loss_settings = loss_settings
        self.model: Any = None
        self._outputs = outputs
        self._predictions = predictions
        self._counted = counted
        self._of_outputs = any_loss
        if loss_settings is not None:
            self._of_outputs = TokenLoss(loss_settings)
        self._linear_maps = matrices.linear_maps(
            self.batch_loss,
            None
            if outputs is None
            else lambda p, batch, key, _: outputs(p, batch, key),
            self._of_outputs,
            normalizer.total,
        )
        # Kept for the next checkpoint of a sweep: nothing is compiled twice.
        self._compiled_maps: dict[Any, CompiledMap] = {}
        self._with_losses: dict[Any, Objective] = {}
        self._load_batches: LoadBatches | None = None
        self._on_splits: dict[str, Objective] = {}

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

    @classmethod
    def from_loss(
        cls,
        apply: Callable[..., Any],
        loss: Callable[..., Any],
        batches: Sequence[Mapping[str, Any]],
        *,
        weights: str | None = None,
        num_microbatches: int = 1,
        precision: str = "highest",
    ) -> "Objective":
        r"""Any loss of the outputs of any network: $\sum_i w_i \ell_i / \sum_i w_i$.

        It has the Hessian and the Gauss-Newton matrix, for which the loss is
        differentiated twice in the outputs; that matrix is positive semidefinite only
        where the loss is convex in them. The Fisher matrices and the accuracy need a
        loss of tokens: `from_model`.

        Args:
            apply: `(params, batch)` to the outputs, a tree of float arrays, such as
                `lambda params, batch: module.apply({"params": params}, batch["x"])` of a
                Flax module; without dropout.
            loss: `(outputs, batch)` to the losses, one for each example of the batch;
                no sum or mean of them, which raises `ValueError` before anything is
                compiled. Its derivatives must be JAX's.
            batches: dictionaries of arrays, all of the same names, shapes and dtypes,
                whose first axis is that of the examples.
            weights: the feature that has the losses' weights, in the losses' shape, zero
                for padding; None: one loss for each example, all of weight one.
            num_microbatches: pieces that every batch is cut into, to save memory.
            precision: matmul precision of every derivative.

        Batches without examples, a feature that is not there, and weights whose sum is
        not positive raise `ValueError`.
        """
        settings_lib.check("weights", weights, settings_lib.Words | None)
        found, any_loss = batches_lib.checked(batches), AnyLoss(loss, weights)
        return cls(
            lambda params, batch, _: any_loss.total(apply(params, batch), batch),
            found,
            normalizer=any_loss.normalizer(found),
            num_microbatches=num_microbatches,
            outputs=lambda params, batch, _: apply(params, batch),
            any_loss=any_loss,
            precision=precision,
            counted=any_loss.counted,
        )

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

    @property
    def loss_record(self) -> dict[str, Any]:
        """The settings of the loss as JSON holds them; empty where there are none."""
        return {} if self.loss_settings is None else self.loss_settings.record

    def num_labels_outside(self, params: PyTree) -> int | None:
        """The number of counted labels outside the classes of the logits.

        The loss of such a label has no target in it. None where the objective does not
        know logits of tokens.
        """
        if self._outputs is None or not isinstance(self._of_outputs, TokenLoss):
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

    def _semidefinite(self, matrix, params):
        """Whether the matrix must be so, to be called; None where any sign is right."""
        of_outputs, outputs = self._of_outputs, self._outputs
        if matrix == "hessian" or not isinstance(of_outputs, TokenLoss):
            return None
        if matrix != "gauss_newton":
            return lambda: True

        def least_scale(params, batch, key, index):
            del index
            assert outputs is not None
            return of_outputs.least_scale(outputs(params, batch, key), batch)

        name = "the loss's convexity"
        return lambda: min(self._scalars(name, least_scale, params)) >= 0

    def check_matrix(self, matrix: str) -> None:
        """Reject a matrix that this objective does not have.

        Raises:
            ValueError: names those there are, or says what is missing.
        """
        if matrix not in matrices.WORDS:
            raise ValueError(
                f"matrix must be one of {', '.join(matrices.WORDS)}: got {matrix!r}."
            )
        if matrix in self._linear_maps:
            return
        if "gauss_newton" in self._linear_maps:
            raise ValueError(
                f"{matrices.WORDS[matrix]} needs the likelihood of tokens, which a loss "
                "of Objective.from_loss does not have: choose hessian or gauss_newton."
            )
        raise ValueError(
            f"{matrices.WORDS[matrix]} needs the model's logits: this objective "
            "was built without outputs and loss_settings."
        )
