"""The estimators of a trace behind one call, each going on from what it saved."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.context import Context
from t5x_fwdloss.analysis.store.saved_state import SavedState
from t5x_fwdloss.curvature import (
    HutchinsonState,
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
    return _resumed(
        settings,
        context,
        HutchinsonState,
        settings.num_probes,
        lambda on_step, state: hutchinson_trace(
            product,
            context.params,
            key,
            num_probes=settings.num_probes,
            kind=settings.kind,
            relative_error=settings.relative_error,
            confidence=settings.confidence,
            block_size=settings.block_size,
            on_probe=on_step,
            state=state,
        ),
        note=lambda state: f"mean {np.mean(state.samples):.4g}",
    )


def hutchpp(settings: Any, context: Context, product: Product, key: jax.Array):
    """Hutch++; what it saves is its subspace."""
    total = 2 * settings.sketch_size + settings.num_probes
    return _resumed(
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
    return _resumed(
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


def _resumed(
    settings, context, kind, total, estimate, note=lambda _: ""
) -> TraceEstimate:
    saved = SavedState(context.state_path(settings.name), context.is_primary)
    state = saved.restore(trees.zeros_like(context.params), kind)
    counted = 0 if state is None else state.num_products
    progress: Progress
    with context.progress(settings.name, total, counted) as progress:

        def on_step(state):
            nonlocal counted
            progress.update(state.num_products - counted, note(state))
            counted = state.num_products
            context.step(lambda: saved.save(state))

        return estimate(on_step=on_step, state=state)


ESTIMATORS = {
    "hutchinson": hutchinson,
    "hutch++": hutchpp,
    "xtrace": xtrace_estimate,
}
