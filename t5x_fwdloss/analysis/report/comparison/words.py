"""The words of a comparison, the same on its page and in its Markdown."""

import math
from collections.abc import Sequence

from t5x_fwdloss.analysis.report.comparison.differences import Difference, Measured
from t5x_fwdloss.analysis.report.comparison.runs import Fact, Run, settings
from t5x_fwdloss.analysis.report.terminal import DASH

# A difference of so many standard errors is emphasized.
LARGE = 3.0
HOW_TO_READ = (
    "A value is followed by its difference from the first run's. The difference's error "
    "is the root of the sum of squares where both errors are standard errors, and the "
    f"difference is also given in units of it, SE, in bold from {LARGE:g} on. Otherwise "
    "its error is the sum of both: a bound if both are bounds. Runs with the same batches, or the same "
    "seed and thus the same random vectors, have correlated errors: that of the "
    "difference is then often smaller than shown. * means not converged."
)


def of_difference(found: Difference) -> tuple[str, bool]:
    """A difference in words, and whether it is large in standard errors."""
    words = _signed(found.value, ".4g")
    if found.error is not None:
        finite = math.isfinite(found.error)
        words += f" ± {found.error:.2g}" if finite else " ± unknown"
    ratio = found.in_standard_errors
    if ratio is None:
        return words, False
    return f"{words}, {_signed(ratio, '.1f')} SE", abs(ratio) >= LARGE


def _signed(value: float, digits: str) -> str:
    return f"{value:+{digits}}" if value else "0"


def of_obstacles(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run whose numbers do not compare with the first run's."""
    return [
        f"{run.label} is not comparable with {runs[0].label}: {', '.join(run.obstacles)}."
        for run in runs
        if run.obstacles
    ]


def of_the_same(facts: Sequence[Fact]) -> str:
    """What is the same in all runs, in one line."""
    same = [f"{x.name} {x.values[0]}" for x in facts if not x.differs]
    known = [words for words in same if not words.endswith(f" {DASH}")]
    return f"The same in all runs: {' · '.join(known)}."


def of_settings(found: Measured, runs: Sequence[Run]) -> list[str]:
    """A sentence for each setting of a measurement that differs."""
    labeled = [x for x in zip(runs, found.results, strict=True) if x[1] is not None]
    sentences = []
    for fact in settings([result for _, result in labeled]):
        if fact.differs:
            pairs = zip(labeled, fact.values, strict=True)
            values = ", ".join(f"{value} in {run.label}" for (run, _), value in pairs)
            sentences.append(f"{fact.name} differs: {values}.")
    return sentences


def of_the_rest(runs: Sequence[Run], shown: Sequence[Measured]) -> list[str]:
    """A sentence for each run with measurements that no other run has, or that failed."""
    names = {x.name for x in shown}
    sentences = []
    for run in runs:
        alone = [name for name in run.results if name not in names]
        if alone:
            sentences.append(f"Only {run.label} has {', '.join(alone)}.")
        sentences += [
            f"{entry['name']} of {run.label} was stopped: {entry['reason']}"
            for entry in run.finished.document["measurements"]
            if entry["status"] == "failed"
        ]
    return sentences
