"""JAX's persistent compilation cache, for a command that is run repeatedly."""

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

# Faster compilations are not cached: reading a file for each would be slower.
LEAST_SECONDS = 0.1


def use(path: str | os.PathLike[str] | None) -> None:
    """Caches all further compilations in a folder.

    The numbers stay the same. A folder that cannot be written or read only costs time:
    JAX warns and compiles.

    Args:
        path: the folder, also a remote one; None: JAX's own settings.
    """
    if path is None:
        return
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    # An earlier compilation has fixed the cache's place.
    compilation_cache.reset_cache()
