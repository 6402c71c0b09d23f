"""Freed blocks of the C library go back to the system."""

import pathlib
import sys

import numpy as np
import pytest

from t5x_fwdloss.curvature.vectors import freed_memory

BLOCK, COUNT = 100 * 1024, 3000


def resident():
    pages = pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is not glibc")
def test_freed_blocks_between_used_ones_are_returned():
    blocks = [np.ones(BLOCK, np.uint8) for _ in range(COUNT)]
    used, free = blocks[::2], blocks[1::2]
    del blocks, free
    before = resident()
    freed_memory.give_back()
    assert before - resident() > 0.8 * BLOCK * COUNT / 2
    assert all(block[0] == 1 for block in used)
