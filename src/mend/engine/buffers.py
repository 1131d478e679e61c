"""Large vectors that are reused from round to round.

Any thread takes one; the last reader gives it back without knowing.

Fresh memory costs more than what is done with it: the kernel clears every page at its first touch
and takes every page back at the end, the latter while the interpreter waits. A round needs the same
few vectors as the round before it, so a vector whose last reader has let go of it waits here.

Nobody releases anything. A reader is whatever keeps the memory alive in Python: the tensor, a slice
of it, a memoryview that a connection is sending from. When the last of them is gone, the block
comes back.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

POOLED_BYTES_MIN = 1 << 20
"""Smaller vectors come from torch: the allocator below it keeps those itself."""

FIT_PCT = 125
"""A block is used for a vector if it is at most so many percent of its size."""

FIT_LOCKED_PCT = 400
"""The same for locked blocks: making one takes as long as it is large, longer than a round has."""


class Pin(Protocol):
    """Locks memory so that a GPU can copy from and to it while the host goes on."""

    def lock(self, address: int, size: int) -> None: ...
    def unlock(self, address: int) -> None: ...


class Buffers:
    """Unwritten vectors. At most `idle_max` blocks wait to be used again; more are given up.

    With `pin` every block is locked for as long as it exists.
    """

    def __init__(self, idle_max: int, pin: Pin | None = None) -> None:
        self.idle_max, self._pin = idle_max, pin
        self._bytes = 0
        self._idle: list[mmap.mmap] = []
        # Reentrant: a block can come back in a thread that is in here, when the collector runs.
        self._lock = threading.RLock()

    @property
    def total_bytes(self) -> int:
        """Memory in use or waiting."""
        with self._lock:
            return self._bytes

    @property
    def idle_bytes(self) -> int:
        """Memory that waits to be used again."""
        with self._lock:
            return sum(len(block) for block in self._idle)

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous vector on the CPU with whatever is in it."""
        size = numel * dtype.itemsize
        if size < POOLED_BYTES_MIN:
            return torch.empty(numel, dtype=dtype)
        block = self._fitting(size) or self._fresh(size)
        lease = np.frombuffer(block, dtype=np.uint8, count=size)
        # The block outlives the lease by its place among the finalizer's arguments.
        weakref.finalize(lease, self._take_back, block).atexit = False
        return torch.from_numpy(lease).view(dtype)

    def close(self) -> None:
        """Give up what waits, and what comes back from now on."""
        with self._lock:
            self.idle_max = 0
            while self._idle:
                self._give_up(self._idle.pop())

    def _fitting(self, size: int) -> mmap.mmap | None:
        """The smallest idle block that fits, the one used last among equals: it may be in cache."""
        with self._lock:
            most = size * (FIT_PCT if self._pin is None else FIT_LOCKED_PCT) // 100
            fitting = [i for i, b in enumerate(self._idle) if size <= len(b) <= most]
            if not fitting:
                return None
            return self._idle.pop(min(fitting, key=lambda i: (len(self._idle[i]), -i)))

    def _take_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(block)
            if len(self._idle) > self.idle_max:
                self._give_up(self._idle.pop(0))  # unused for longest

    def _fresh(self, size: int) -> mmap.mmap:
        block = _mapped(size)
        if self._pin is not None:
            self._pin.lock(_address(block), len(block))
        with self._lock:
            self._bytes += size
        return block

    def _give_up(self, block: mmap.mmap) -> None:
        if self._pin is not None:
            self._pin.unlock(_address(block))
        self._bytes -= len(block)


def unpooled(size: int) -> Tensor:
    """`size` unwritten bytes that are given back when nobody reads them any more."""
    return torch.from_numpy(np.frombuffer(_mapped(size), dtype=np.uint8))


def _address(block: mmap.mmap) -> int:
    return int(np.frombuffer(block, dtype=np.uint8).ctypes.data)


def _mapped(size: int) -> mmap.mmap:
    """Private memory of the process, in huge pages where the system has them."""
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    block = mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
