"""The trace of a matrix by Hutchinson's estimator, with its standard error."""

import dataclasses
from typing import ClassVar

import numpy as np

from t5x_fwdloss.analysis import agreement, files
from t5x_fwdloss.analysis.measurements.context import Context, check_at_least, result
from t5x_fwdloss.analysis.numbers import STANDARD_ERROR, MeasurementResult, Number
from t5x_fwdloss.curvature import hutchinson_trace, trees


@dataclasses.dataclass(frozen=True)
class Trace:
    """What the measurements of a trace share; `matrix` says of which.

    Attributes:
        name: name in the results.
        num_probes: number of random vectors, at most; each costs one product.
        block_size: probes in one compiled, vmapped product.
        kind: 'rademacher' (random signs, less variance) or 'normal'.
        relative_error: stop as soon as half the confidence interval is at most this
            part of the mean; None: use every probe.
        confidence: level of the confidence interval.
    """

    matrix: ClassVar[str]

    name: str
    num_probes: int = 32
    block_size: int = 4
    kind: str = "rademacher"
    relative_error: float | None = None
    confidence: float = 0.95

    def validate(self, context: Context) -> None:
        """Check the counts, the law of the probes and the confidence.

        Raises:
            ValueError: one of them is out of range.
        """
        context.objective.check_matrix(self.matrix)
        title = type(self).__name__
        check_at_least(title, "num_probes", self.num_probes, 2)
        check_at_least(title, "block_size", self.block_size, 1)
        if self.kind not in ("rademacher", "normal"):
            raise ValueError(
                f"{title}.kind must be 'rademacher' or 'normal': got {self.kind!r}."
            )
        if not 0 < self.confidence < 1:
            raise ValueError(
                f"{title}.confidence must lie between 0 and 1: got {self.confidence:g}."
            )

    def run(self, context: Context) -> MeasurementResult:
        """Draw the probes, from the saved samples on if there are any."""
        path = context.state_path(self.name) / "samples.json"
        samples = agreement.from_primary(
            files.read_json(path) if context.is_primary and path.exists() else []
        )
        with context.progress(self.name, self.num_probes, len(samples)) as progress:
            counted = len(samples)

            def on_probe(taken: np.ndarray):
                nonlocal counted
                progress.update(len(taken) - counted, f"mean {taken.mean():.4g}")
                counted = len(taken)
                if context.is_primary:
                    files.write_json(path, taken)

            found = hutchinson_trace(
                context.product(self.matrix, self.block_size),
                context.params,
                context.key(f"{self.name}/probes"),
                num_probes=self.num_probes,
                kind=self.kind,
                relative_error=self.relative_error,
                confidence=self.confidence,
                block_size=self.block_size,
                on_probe=on_probe,
                samples=np.asarray(samples, np.float64),
            )
        size = trees.dimension(context.params)
        converged = found.converged is not False
        low, high = found.interval
        numbers = {
            "trace": Number(
                found.mean,
                context.curvature_unit,
                found.standard_error,
                STANDARD_ERROR,
                converged=converged,
                interval=found.interval,
                count=found.num_probes,
            ),
            "mean_eigenvalue": Number(
                found.mean / size,
                context.curvature_unit,
                found.standard_error / size,
                STANDARD_ERROR,
                converged=converged,
                interval=(low / size, high / size),
                count=found.num_probes,
            ),
        }
        return result(self, numbers, arrays={"samples": found.samples})


@dataclasses.dataclass(frozen=True)
class HessianTrace(Trace):
    """The sum of all eigenvalues of the Hessian."""

    matrix: ClassVar[str] = "hessian"

    name: str = "hessian_trace"


@dataclasses.dataclass(frozen=True)
class GaussNewtonTrace(Trace):
    """The trace of the Gauss-Newton matrix."""

    matrix: ClassVar[str] = "gauss_newton"

    name: str = "gauss_newton_trace"


@dataclasses.dataclass(frozen=True)
class FisherTrace(Trace):
    """The trace of the Fisher matrix, labels in expectation."""

    matrix: ClassVar[str] = "fisher"

    name: str = "fisher_trace"


@dataclasses.dataclass(frozen=True)
class SampledFisherTrace(Trace):
    """The trace of the Fisher matrix at one drawn label a token."""

    matrix: ClassVar[str] = "sampled_fisher"

    name: str = "sampled_fisher_trace"


@dataclasses.dataclass(frozen=True)
class EmpiricalFisherTrace(Trace):
    """The trace of the second moment of the tokens' gradients at the data's labels."""

    matrix: ClassVar[str] = "empirical_fisher"

    name: str = "empirical_fisher_trace"
