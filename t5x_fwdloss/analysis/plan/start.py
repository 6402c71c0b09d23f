"""The plan of a run that has begun: what is compiled and measured already, in a line each.

Nothing is compiled for it. Where the memory of a device is given, a measurement whose
vectors will not fit is rejected now, not after hours.
"""

import time
from collections.abc import Sequence

import jax
from absl import logging
from jaxtyping import PyTree

from t5x_fwdloss.analysis.measurements.context import Context, Measurement
from t5x_fwdloss.analysis.objective.matrix_product import MatrixProduct
from t5x_fwdloss.analysis.plan.compiled import device_bytes
from t5x_fwdloss.analysis.plan.words import duration, size
from t5x_fwdloss.curvature.vectors import trees


class Timed:
    """A product that keeps the time of its last call.

    Attributes:
        seconds: that time.
        temporary: bytes per device that come and go during a product.
    """

    def __init__(self, product: MatrixProduct):
        """Nothing is known before the first call."""
        self._product = product
        self.seconds = 0.0
        self.temporary = 0

    def __call__(self, v: PyTree) -> PyTree:
        """The product."""
        begin = time.monotonic()
        found = jax.block_until_ready(self._product(v))
        self.seconds = time.monotonic() - begin
        self.temporary = self.temporary or self._product.temporary_bytes(v)
        return found


def announce(
    context: Context,
    measurements: Sequence[Measurement],
    matrix: str,
    timed: Timed,
    limit: int | None,
) -> None:
    """Logs what the products of a matrix take, and each measurement of it.

    Args:
        context: the run.
        measurements: those that are still to be done.
        matrix: the matrix whose products were checked.
        timed: its product, after the checks.
        limit: bytes of a device; None: they are not given.

    Raises:
        ValueError: a measurement does not fit; says what to change.
    """
    standing = device_bytes((context.params, context.objective.batches))
    kept = context.residual_bytes
    vector = device_bytes(trees.float_part(context.params))
    if context.is_primary:
        logging.info(
            "Plan: per device %s of parameters and batches, %s of kept residuals, %s "
            "of temporaries; a product takes %s",
            *map(size, (standing, kept, timed.temporary)),
            duration(timed.seconds),
        )
    for measurement in measurements:
        work = measurement.work(context.params)
        if work is None or work.matrix != matrix:
            continue
        held = (work.basis - work.on_host + work.working) * vector
        if context.is_primary:
            logging.info(
                "Plan: %s: at most %d products, %s; %s of vectors per device",
                measurement.name,
                work.num_products,
                duration(work.num_products * timed.seconds),
                size(held),
            )
        total = standing + kept + timed.temporary + held
        if limit is not None and total > limit:
            settings = [setting for setting, _ in measurement.lighter()]
            settings += [f"MEMORY_BUDGET = {max(kept - total + limit, 0)}"] * bool(kept)
            raise ValueError(
                f"{measurement.name} must fit the {size(limit)} of a device: it takes "
                f"{size(total)} per device ({size(standing)} of parameters and batches, "
                f"{size(kept)} of kept residuals, {size(held)} of vectors, "
                f"{size(timed.temporary)} of temporaries); less is taken with "
                f"{', '.join((*settings, 'NUM_MICROBATCHES'))}, and the flag --plan says "
                "which of these suffices."
            )
