"""Memory of freed vectors, returned to the system where the devices are CPUs.

There arrays are in blocks of the C library, which keeps freed blocks below 32 MiB for
later use, in pieces between those that are in use. Runs that replace many vectors at
once, again and again, grow: top eigenpairs of 22.7 M parameters from 5.3 to 6.4 GiB over
four restarts.
"""

import ctypes
import sys

import jax


def give_back() -> None:
    """Returns freed blocks to the system; does nothing without CPU devices or glibc."""
    if sys.platform == "linux" and jax.default_backend() == "cpu":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
