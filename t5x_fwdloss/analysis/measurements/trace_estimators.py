"""The estimators of a trace behind one call, each going on from what it saved."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.context import Context
from t5x_fwdloss.analysis.store import files, multihost, records
from t5x_fwdloss.analysis.store.saved_state import SavedState
from t5x_fwdloss.curvature import (
    HutchppState,
    TraceEstimate,
    XtraceState,
    hutchinson_trace,
    hutchpp_trace,
    xtrace,
)
from t5x_fwdloss.curvature.vectors import trees
from t5x_fwdloss.progress import Progress

Product = Callable[[PyTree], PyTree]


def hutchinson(settings: Any, context: Context, product: Product, key: jax.Array):
    """Hutchinson's estimator; what it saves is its samples."""
    path = context.state_path(settings.name) / "samples.json"

    def saved():
        with files.reading(path):
            there = path.exists()
        return records.read(path)["samples"] if there else []

    found = multihost.from_primary_doing(context.is_primary, saved)
    samples = np.array(found or [], np.float64)
    with context.progress(settings.name, settings.num_probes, len(samples)) as progress:
        counted = len(samples)

        def on_probe(taken: np.ndarray):
            nonlocal counted
            progress.update(len(taken) - counted, f"mean {taken.mean():.4g}")
            counted = len(taken)
            context.step(
                lambda: multihost.from_primary_doing(
                    context.is_primary, lambda: records.write(path, {"samples": taken})
                )
            )

        return hutchinson_trace(
            product,
            context.params,
            key,
            num_probes=settings.num_probes,
            kind=settings.kind,
            relative_error=settings.relative_error,
            confidence=settings.confidence,
            block_size=settings.block_size,
            on_probe=on_probe,
            samples=samples,
        )


def hutchpp(settings: Any, context: Context, product: Product, key: jax.Array):
    """Hutch++; what it saves is its subspace."""
    total = 2 * settings.sketch_size + settings.num_probes
    return _with_subspace(
        settings,
        context,
        HutchppState,
        total,
        lambda **resumed: hutchpp_trace(
            product,
            context.params,
            key,
            sketch_size=settings.sketch_size,
            num_probes=settings.num_probes,
            relative_error=settings.relative_error,
            confidence=settings.confidence,
            block_size=settings.block_size,
            basis_on_host=settings.basis_on_host,
            **resumed,
        ),
    )


def xtrace_estimate(settings: Any, context: Context, product: Product, key: jax.Array):
    """XTrace; what it saves is its subspace, the probes being drawn again."""
    return _with_subspace(
        settings,
        context,
        XtraceState,
        2 * settings.num_probes,
        lambda **resumed: xtrace(
            product,
            context.params,
            key,
            num_probes=settings.num_probes,
            relative_error=settings.relative_error,
            confidence=settings.confidence,
            block_size=settings.block_size,
            basis_on_host=settings.basis_on_host,
            **resumed,
        ),
    )


def _with_subspace(settings, context, state_class, total, estimate) -> TraceEstimate:
    saved = SavedState(context.state_path(settings.name), context.is_primary)
    state = saved.restore(trees.zeros_like(context.params), state_class)
    counted = 0 if state is None else state.num_products
    progress: Progress
    with context.progress(settings.name, total, counted) as progress:

        def on_step(state):
            nonlocal counted
            progress.update(state.num_products - counted)
            counted = state.num_products
            context.step(lambda: saved.save(state, 0))

        return estimate(on_step=on_step, state=state)


ESTIMATORS = {
    "hutchinson": hutchinson,
    "hutch++": hutchpp,
    "xtrace": xtrace_estimate,
}
