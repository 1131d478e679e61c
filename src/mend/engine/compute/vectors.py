"""Cuts long vectors into blocks, and checks that their elements are finite. Runs on workers.

Legend: N elements of a vector, n elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mend.consensus.records import NORM_MAX

# Elements per torch call. Up to its grain of 32 Ki elements torch's CPU loops stay in the calling
# thread whatever its settings; a thread that is serial anyway makes larger calls. Every call
# releases the interpreter's lock and takes it again, and a training thread that launches kernels
# may wait each time: merges with calls of 256 Ki, as fast alone, delayed FSDP2 on a GPU
# (docs/internals/LOG.md).
_SERIAL_NUMEL = 1 << 15
_SINGLE_NUMEL = 1 << 20

PORTION_NUMEL = 1 << 20
"""Elements of one job of the worker pool."""


def block_numel() -> int:
    """Elements per torch call that keep it in this thread."""
    return _SINGLE_NUMEL if torch.get_num_threads() == 1 else _SERIAL_NUMEL


def blocks(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """[0, numel) in blocks of this size; the last one may be shorter."""
    return ((start, min(start + size, numel)) for start in range(0, numel, size))


def magnitude(values_n: Tensor) -> float:
    """The greatest magnitude; NaN if an element is NaN."""
    if not values_n.numel():
        return 0.0
    low, high = (x.item() for x in torch.aminmax(values_n))
    return float(max(-low, high))


def sound(values_n: Tensor) -> bool:
    """Whether the magnitude of every element is below NORM_MAX, and none is NaN. The square of any
    other element is Inf or NaN, which survives every addition. The sum of many valid squares may
    overflow, too: then each value is checked."""
    return math.isfinite(values_n.dot(values_n).item()) or magnitude(values_n) < NORM_MAX


def first_unsound(values_N: Tensor) -> int | None:
    """The first element that is NaN or not below NORM_MAX."""
    for start, stop in blocks(values_N.numel(), _SINGLE_NUMEL):
        block_n = values_N[start:stop]
        if not sound(block_n):
            return start + int((~(block_n.abs() < NORM_MAX)).nonzero()[0])
    return None
