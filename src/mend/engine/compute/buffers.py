"""Large vectors that are reused from round to round. Any thread may take one.

Fresh memory costs more than the work on it: the kernel clears every page at its first touch and
takes every page back at the end, the latter while the interpreter waits. Each round needs the same
few vectors, so blocks are kept for the next round.

Vectors are not released explicitly. A block comes back when Python frees the last object that uses
its memory: the tensor, a slice of it, or a memoryview that a connection sends from.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

POOLED_BYTES_MIN = 1 << 20
"""Smaller vectors come from torch, whose allocator reuses them itself."""

FIT_PCT = 125
"""Maximum size of a block for a vector, in percent of the vector's size."""

FIT_LOCKED_PCT = 400
"""The same for locked blocks: locking a new one can take longer than a round."""

ROUNDED_PCT = 105
"""Maximum size that a new block is rounded up to, in percent of the vector's size."""


class Spare(NamedTuple):
    """Large vectors of a run that are kept to be reused."""

    vectors: int = 0
    """Their number."""
    rounds: int = 0
    """Rounds that are between capture and apply at once, at most."""
    residuals: bool = False
    """Whether the host keeps what offers leave out until the next offer."""


NO_SPARE = Spare()


class Pin(Protocol):
    """Page-locks memory, so that a GPU copies from and to it asynchronously."""

    def lock(self, address: int, size: int) -> None: ...
    def unlock(self, address: int) -> None: ...


class Buffers:
    """A pool of uninitialised vectors. At most `idle_max` idle blocks are kept; more are freed.
    With `pin` a block is page-locked from the first use that asks for it (`locked`) until it is
    freed."""

    def __init__(self, idle_max: int, pin: Pin | None = None) -> None:
        self.idle_max, self._pin = idle_max, pin
        self._bytes = 0
        self.sizes: tuple[int, ...] = ()
        """Bytes of the largest vectors of the run. A new block for a slightly smaller vector is
        made this large, so that it fits every fragment."""
        self._unlocked: dict[int, int] = {}
        """Address -> size of the blocks that are not locked yet."""
        self._idle: list[mmap.mmap] = []
        # Reentrant: the garbage collector may return a block in a thread that holds the lock.
        self._lock = threading.RLock()

    @property
    def total_bytes(self) -> int:
        """Size of all blocks, in use or idle."""
        with self._lock:
            return self._bytes

    @property
    def idle_bytes(self) -> int:
        """Size of the idle blocks."""
        with self._lock:
            return sum(len(block) for block in self._idle)

    def empty(
        self, numel: int, dtype: torch.dtype = torch.float32, *, locked: bool = True
    ) -> Tensor:
        """An uninitialised contiguous vector on the CPU. `locked=False`: return without locking
        memory. The loop thread needs this: locking may take longer than heartbeats may wait."""
        size = numel * dtype.itemsize
        if size < POOLED_BYTES_MIN:
            return torch.empty(numel, dtype=dtype, device="cpu")
        block = self._fitting(size, locked) or self._fresh(size, locked)
        lease = np.frombuffer(block, dtype=np.uint8, count=size)
        # The finalizer's arguments keep the block alive after the lease.
        weakref.finalize(lease, self._take_back, block).atexit = False
        return torch.from_numpy(lease).view(dtype)

    def lock(self, vector: Tensor) -> None:
        """Lock the memory of a vector that was made with `locked=False`, if it is not yet."""
        address = vector.data_ptr()
        with self._lock:
            size = self._unlocked.pop(address, 0)
        if size and self._pin is not None:
            self._pin.lock(address, size)

    def close(self) -> None:
        """Free the idle blocks, and those that come back from now on."""
        with self._lock:
            self.idle_max = 0
            while self._idle:
                self._give_up(self._idle.pop())

    def _fitting(self, size: int, locked: bool) -> mmap.mmap | None:
        """Take the smallest idle block that fits; among equals the one used last, which may be in
        the cache. None: no block fits."""
        with self._lock:
            most = size * (FIT_PCT if self._pin is None else FIT_LOCKED_PCT) // 100
            fitting = [
                i
                for i, block in enumerate(self._idle)
                if size <= len(block) <= most
                and not (locked and self._unlocked and _address(block) in self._unlocked)
            ]
            if not fitting:
                return None
            return self._idle.pop(min(fitting, key=lambda i: (len(self._idle[i]), -i)))

    def _take_back(self, block: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(block)
            if len(self._idle) > self.idle_max:
                self._give_up(self._idle.pop(0))  # unused for longest

    def _fresh(self, size: int, locked: bool) -> mmap.mmap:
        size = min((s for s in self.sizes if size <= s <= size * ROUNDED_PCT // 100), default=size)
        block = _mapped(size)
        if self._pin is not None and locked:
            self._pin.lock(_address(block), len(block))
        with self._lock:
            self._bytes += size
            if self._pin is not None and not locked:
                self._unlocked[_address(block)] = size
        return block

    def _give_up(self, block: mmap.mmap) -> None:
        if self._pin is not None and not self._unlocked.pop(_address(block), 0):
            self._pin.unlock(_address(block))
        self._bytes -= len(block)


def unpooled(size: int) -> Tensor:
    """`size` unwritten bytes that are freed after use, and not kept."""
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
