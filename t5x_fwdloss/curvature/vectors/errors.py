"""The error raised when a computation gives NaN or Inf."""


class NonFiniteError(FloatingPointError):
    """A vector or an inner product holds NaN or Inf; the message says where.

    Attributes:
      step: The name of the computation, such as `"product of Lanczos step 3"`.
      paths: Parameter paths of the leaves that hold NaN or Inf, in tree order; empty
        where every entry is finite and only their sum of squares overflows.
    """

    def __init__(self, step: str, paths: tuple[str, ...]):
        """Composes the message.

        Args:
          step: The name of the computation.
          paths: Parameter paths of the offending leaves.
        """
        self.step = step
        self.paths = paths
        if paths:
            shown = ", ".join(repr(path) for path in paths[:5])
            more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
            where = f"holds NaN or Inf in {shown}{more}"
        else:
            where = "has finite entries, but its norm overflows"
        super().__init__(f"The vector of {step} must be finite: it {where}.")
