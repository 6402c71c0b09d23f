"""A plan in words: a table for the terminal, and sizes and times."""

from collections.abc import Sequence

from t5x_fwdloss.analysis.plan.plan import Row

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
HEADER = (
    "",
    "products",
    "parameters",
    "residuals",
    "basis",
    "temporaries",
    "total",
    "on host",
    "TFLOP",
    "time",
)


def size(count: int) -> str:
    """A number of bytes, such as '31.5 GiB'."""
    for unit, scale in UNITS:
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A time, such as '2.5 h'."""
    for unit, scale in (("h", 3600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.2g} s"


def table(rows: Sequence[Row], tflops: float | None) -> str:
    """The rows with a header; bytes and operations are those of each device.

    Args:
        rows: the rows.
        tflops: 10^12 operations of a device per second; None: without times.
    """
    lines = [HEADER, *(_cells(row, tflops) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row, tflops) -> tuple[str, ...]:
    if row.num_products is None:
        return (row.name, "not planned", size(row.parameters), *[""] * 7)
    operations = row.flops / 1e12
    return (
        row.name,
        str(row.num_products),
        size(row.parameters),
        size(row.residuals),
        size(row.basis),
        size(row.temporaries),
        size(row.total),
        size(row.on_host),
        f"{operations:.3g}",
        duration(operations / tflops) if tflops else "",
    )
