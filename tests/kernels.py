"""What mend compiles, loaded by one process of a run of tests at a time: what the first one has
compiled, which takes 13 s of CPU, the others find in numba's cache."""

from __future__ import annotations

import fcntl
from pathlib import Path

from mend import kernels

BLOCKS = ("int8", "int4", "e3m0", "topk")


def load() -> None:
    """All of them, as long as this process runs. Nothing without numba."""
    with Path(__file__).open() as one:
        fcntl.flock(one, fcntl.LOCK_EX)
        for name in BLOCKS:
            kernels.block_kernels(name)
        for name in ("bfloat16", *BLOCKS):
            kernels.offer_kernel(name)
        kernels.delta_kernel()
        kernels.squares_kernel()
        for name in ("float32", "bfloat16", *BLOCKS):
            kernels.merge_kernel(name)
            kernels.signs_kernel(name)
        kernels.apply_kernel()
        kernels.gram_kernel()
        kernels.product_kernels()
