"""JAX's persistent compilation cache, for a command that is given again and again."""

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

# What takes less time is compiled anew: a file for each is slower to read than that.
LEAST_SECONDS = 0.1


def use(path: str | os.PathLike[str] | None) -> None:
    """Keeps what is compiled from here on in a folder, and takes it from there.

    The numbers are those of the same compiler. A folder that cannot be written or read
    costs time and nothing else: JAX warns and compiles.

    Args:
        path: the folder, also a remote one; None: what JAX's own settings say.
    """
    if path is None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    # What was compiled before has fixed where the cache is.
    compilation_cache.reset_cache()
