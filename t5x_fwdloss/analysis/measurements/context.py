"""The context of a measurement, and the protocol that a run reads."""

import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import jax
from etils import epath
from jaxtyping import PyTree

from t5x_fwdloss.analysis import preemption
from t5x_fwdloss.analysis.measurements.rounding import Rounding, setting_of
from t5x_fwdloss.analysis.measurements.work import Work
from t5x_fwdloss.analysis.numbers import MeasurementResult
from t5x_fwdloss.analysis.objective import matrices, preflight
from t5x_fwdloss.analysis.objective.function import Objective
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct
from t5x_fwdloss.analysis.optimizer import Preconditioner
from t5x_fwdloss.analysis.report.plots import Plot
from t5x_fwdloss.analysis.store import multihost, vector_store
from t5x_fwdloss.analysis.store.saved_state import SavedState
from t5x_fwdloss.curvature.vectors import freed_memory, probes, trees
from t5x_fwdloss.progress import Progress

Estimate = TypeVar("Estimate")
# Saving the vectors of a large model takes a minute; a killed run loses this much more.
SAVE_SECONDS = 180


@dataclasses.dataclass
class Context:
    """One run, as its measurements see it.

    Attributes:
        objective: the loss over the fixed list of batches.
        params: the checkpoint's parameters, float32 or wider, on their mesh.
        seed: the run's seed.
        load_params: path of another checkpoint to its parameters.
        state_path: measurement name to the folder of its intermediate state.
        is_primary: whether this process writes and shows progress.
        memory_budget: bytes per device for products; None: half of the free memory.
        fold: whether linearized products are rewritten to read less memory.
        load_preconditioner: loads the preconditioner of the checkpoint's optimizer.
        vectors_path: measurement name to the folder of its vectors.
        vectors: measurement name to the number of its vectors.
        save_seconds: seconds between two saved states of a measurement.
        eigenvectors_dir: where eigenvectors are kept that a measurement does not save;
            None: nowhere.
        checks: the run's own checks of its products, before their use.
    """

    objective: Objective
    params: PyTree
    seed: int
    load_params: Callable[[str], PyTree] | None
    state_path: Callable[[str], epath.Path]
    is_primary: bool = True
    memory_budget: int | None = None
    fold: bool = True
    load_preconditioner: Callable[[], Preconditioner] | None = None
    vectors_path: Callable[[str], epath.Path] | None = None
    vectors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    save_seconds: int = SAVE_SECONDS
    eigenvectors_dir: epath.Path | None = None
    checks: list[preflight.Check] = dataclasses.field(default_factory=list)
    _compared: set[tuple[str, int]] = dataclasses.field(default_factory=set, init=False)
    _saved_at: float = dataclasses.field(
        default_factory=lambda: time.monotonic(), init=False
    )
    _gradient: PyTree | None = dataclasses.field(default=None, init=False)
    _preconditioner: Preconditioner | None = dataclasses.field(default=None, init=False)
    _linear: tuple[str, MatrixProduct] | None = dataclasses.field(
        default=None, init=False
    )
    _products: dict[str, str] = dataclasses.field(default_factory=dict, init=False)

    @property
    def unit(self) -> str:
        """The unit of the loss."""
        return self.objective.normalizer.unit

    @property
    def slope_unit(self) -> str:
        """The unit of a first derivative along a unit vector of parameters."""
        return f"{self.unit} per θ"

    @property
    def curvature_unit(self) -> str:
        """The unit of a second derivative along a unit vector of parameters."""
        return f"{self.unit} per θ²"

    def key(self, purpose: str) -> jax.Array:
        """A key that depends on the run's seed and the purpose only."""
        return jax.random.fold_in(
            probes.as_key(self.seed), zlib.crc32(purpose.encode())
        )

    def gradient(self) -> PyTree:
        """The gradient at the checkpoint, computed once."""
        if self._gradient is None:
            self._gradient = self.objective.gradient(self.params)
        return self._gradient

    def check_preconditioner(self, what: str) -> None:
        """Reject a setting that needs the optimizer's state if it cannot be read.

        The state is read here, before anything is measured.

        Raises:
            ValueError: names `what`.
        """
        if self.load_preconditioner is None:
            raise ValueError(
                f"{what} needs a run that can read the state of the checkpoint's "
                "optimizer: this one cannot."
            )
        self.preconditioner()

    @property
    def loaded_preconditioner(self) -> Preconditioner | None:
        """The preconditioner if a measurement requested it; else None."""
        return self._preconditioner

    def preconditioner(self) -> Preconditioner:
        """The preconditioner of the checkpoint's optimizer, computed once.

        A checkpoint without the state of the optimizer raises `ValueError`.
        """
        if self._preconditioner is None:
            assert self.load_preconditioner is not None
            found = self.load_preconditioner()
            here = trees.float_part(self.params)
            trees.check_like(found.diagonal, here, "preconditioner")
            self._preconditioner = found
        return self._preconditioner

    def saved_vector(self, name: str, number: int) -> PyTree | None:
        """A vector that an earlier measurement of the run saved, in order from 0 on.

        None if there are fewer: a small space has fewer than `vectors` says.
        """
        assert self.vectors_path is not None
        like = probes.random_like(0, self.params)
        return vector_store.restore_one(
            self.vectors_path(name), number, like, is_primary=self.is_primary
        )

    @property
    def products(self) -> dict[str, str]:
        """For each matrix used so far, how its products were computed."""
        if self._linear is None:
            return self._products
        matrix, product = self._linear
        return self._products | {matrix: product.how}

    @property
    def residual_bytes(self) -> int:
        """Bytes per device that the product used last keeps."""
        return 0 if self._linear is None else self._linear[1].residual_bytes

    @functools.cached_property
    def rounding(self) -> Rounding:
        """The network's rounding, with the type that it multiplies in."""
        dtype = self.objective.activation_dtype(self.params)
        setting = setting_of(self.objective.model)
        return Rounding(dtype, self.params, self.key("rounding"), setting)

    def product(
        self, matrix: str, block_size: int = 1, at: PyTree | None = None
    ) -> Callable[[PyTree], PyTree]:
        """The product with a matrix, one vector to one, or stacked ones to as many.

        Args:
            matrix: a name in `matrices.WORDS`.
            block_size: 1, or how many vectors are stacked.
            at: other parameters, for a few products with one vector each; None: the
                checkpoint's.
        """
        if self._linear is None or self._linear[0] != matrix:
            # The product of another matrix is noted, and dropped first.
            self._products = self.products
            self._linear = None
            found = self.objective.product(
                matrix, self.params, self.memory_budget, fold=self.fold
            )
            self._linear = (matrix, found)
        product = self._linear[1]
        if at is not None:
            return product.at(at)
        if block_size == 1:
            return product
        if (matrix, block_size) not in self._compared:
            self.checks.append(
                preflight.check_stacked(
                    matrices.WORDS[matrix],
                    product,
                    self.params,
                    self.key("preflight/stacked"),
                    block_size=block_size,
                    relative=self.objective.tolerance(self.params),
                )
            )
            self._compared.add((matrix, block_size))
        return product.stacked

    def step(self, save: Callable[[], None] | None = None) -> None:
        """The end of one step, the same on every process: a place to save and leave.

        It saves where `save_seconds` have passed since the run last saved or began, by
        the clock of the process that writes, and where the run is told to stop.

        Args:
            save: saves the measurement's state; None: it starts over when resumed.

        Raises:
            Preempted: SIGTERM stopped the run; its state is saved.
        """
        waited = time.monotonic() - self._saved_at >= self.save_seconds
        told, due = multihost.any_process(
            preemption.signaled(), self.is_primary and waited
        )
        if save is not None and (due or told):
            save()
            self._saved_at = time.monotonic()
            freed_memory.give_back()
        if told:
            raise preemption.Preempted

    def progress(self, title: str, total: int, done: int = 0) -> Progress:
        """Progress of `total` steps, shown by process 0."""
        return Progress(title, total, is_primary=self.is_primary, done=done)

    def resumed(
        self,
        name: str,
        state_class: Any,
        total: int,
        estimate: Callable[..., Estimate],
        *,
        note: Callable[[Any], str] = lambda _: "",
    ) -> Estimate:
        """Runs an estimator, from its saved state if any; saves and shows its progress.

        Args:
            name: the measurement's name.
            state_class: the class of the estimator's state; it has `num_products`.
            total: how many products it takes, at most.
            estimate: the estimator; called with `on_step` and `state`.
            note: a state's progress, in a few words.

        Returns:
            The estimator's result.
        """
        saved = SavedState(self.state_path(name), self.is_primary)
        state = saved.restore(trees.float_part(self.params), state_class)
        done = 0 if state is None else state.num_products
        with self.progress(name, total, done) as progress:

            def on_step(state: Any) -> None:
                nonlocal done
                progress.update(state.num_products - done, note(state))
                done = state.num_products
                self.step(lambda: saved.save(state))

            return estimate(on_step=on_step, state=state)


@runtime_checkable
class Measurement(Protocol):
    """A frozen dataclass of settings that gin can bind, and what it measures.

    A measurement inherits from it and overrides the defaults. Its settings are checked
    by their annotations (`t5x_fwdloss.analysis.settings`), and are part of the run's
    identity, as is the name of its class.

    Attributes:
        name: its name in the results and of its files, unique in a run.
        needs_forward_mode: whether the loss must have forward mode.
    """

    name: str
    needs_forward_mode: ClassVar[bool] = False

    @property
    def num_vectors(self) -> int:
        """How many vectors it leaves in the output folder, at most."""
        return 0

    @property
    def first_matrix(self) -> str | None:
        """The matrix whose products it takes first, for the run's checks; None: none."""
        return None

    @property
    def optimizer_setting(self) -> str:
        """The setting that needs the state of the checkpoint's optimizer; '' if none."""
        return ""

    @property
    def other_splits(self) -> Sequence[str]:
        """Splits of the data that it reads besides the run's own batches."""
        return ()

    @property
    def patterns_of_groups(self) -> Sequence[str]:
        """Regular expressions, each of which must match the path of a parameter."""
        return ()

    def work(self, params: PyTree) -> Work | None:
        """What it takes at most, for the plan of a run; None: it is not planned.

        Args:
            params: the parameters, or their shapes.
        """
        del params
        return None

    def lighter(self) -> Sequence[tuple[str, "Measurement"]]:
        """The same measurement with one setting changed so that it takes less memory.

        Each comes with the setting, such as 'Trace.block_size = 1'; the numbers it
        measures stay the same, up to their errors.
        """
        return ()

    def check_settings(self, earlier: Sequence["Measurement"]) -> None:
        """Reject settings that do not fit each other, before anything is read.

        Args:
            earlier: the measurements before it in the run.
        """

    def validate(self, context: Context) -> None:
        """Reject settings that cannot work, before anything is compiled."""

    def run(self, context: Context) -> MeasurementResult:
        """Measure, resuming from the state that `context.step` saved, if any."""
        ...

    def plots(self) -> Sequence[Plot]:
        """Its plots in the report."""
        return ()


def result(
    measurement: Any, numbers: dict[str, Any], **fields: Any
) -> MeasurementResult:
    """The result of a measurement, with its name, class and settings filled in."""
    return MeasurementResult(
        name=measurement.name,
        kind=type(measurement).__name__,
        settings=dataclasses.asdict(measurement),
        numbers=numbers,
        **fields,
    )
