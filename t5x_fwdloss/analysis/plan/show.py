"""The command `--plan`: prints what a run will take, and whether it fits."""

import jax

from t5x_fwdloss import progress
from t5x_fwdloss.analysis.measurement_list import check_groups
from t5x_fwdloss.analysis.plan import fits, plan, words
from t5x_fwdloss.analysis.plan.plan import Planned
from t5x_fwdloss.analysis.report.terminal import print_line
from t5x_fwdloss.curvature.vectors import trees


def show(planned: Planned, *, tflops: float | None = None) -> int:
    """Prints the plan; returns the exit status, 0 if the run fits.

    Args:
        planned: the run.
        tflops: 10^12 operations of a device per second, for the times.

    Raises:
        ValueError: it does not fit; says what to change.
    """
    check_groups(planned.measurements, planned.params)
    with progress.stage("Compiling the run's functions from shapes"):
        rows = plan.rows(planned)
    devices = {
        device
        for leaf in jax.tree.leaves(planned.params)
        for device in getattr(leaf.sharding, "device_set", ())
    }
    print_line(
        f"{trees.dimension(planned.params):,} parameters on {max(len(devices), 1)} "
        f"{jax.default_backend()} devices, {planned.num_batches} batches"
        f"{_pieces(planned)}; bytes and operations of each device:"
    )
    print_line(words.table(rows, tflops))
    for row in rows:
        if row.num_products is not None and row.num_linearized < planned.num_pieces:
            print_line(
                f"{row.name}: {row.num_linearized} of {planned.num_pieces} (micro)batches "
                "linearized, the others are differentiated anew in each product."
            )
    reason = fits.refusal(planned, rows)
    if reason is not None:
        raise ValueError(reason)
    most = words.size(fits.largest(rows).total)
    if planned.device_bytes is None:
        print_line(f"At most {most} per device; DEVICE_MEMORY_GB says what there is.")
    else:
        print_line(f"At most {most} of {words.size(planned.device_bytes)} per device.")
    return 0


def _pieces(planned) -> str:
    count = planned.objective.num_microbatches
    return "" if count == 1 else f" of {count} microbatches"
