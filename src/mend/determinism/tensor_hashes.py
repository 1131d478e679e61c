"""Hashes of tensors for recordings. A tensor of the CPU is hashed at once, by xxh3; one of another
device there, and all such hashes are fetched together, so that a step waits for its device once.

On a GPU one launch hashes many tensors (hash_kernels.py, where Triton works); elsewhere torch's
operators do, one tensor at a time. Both make the same hashes.

torch.hash_tensor is not enough: it is the XOR of the elements. Any order of them has the same hash,
and two equal elements cancel, so that all ones and all twos have the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from mend.determinism.coverage import unseen
from mend.determinism.digests import bytes_of

log = logging.getLogger("mend.determinism")

WORDS_MAX = 1 << 22
"""Words of 8 bytes that torch's operators mix at once: bounds the memory beside a large tensor."""

CHUNK_BYTES = 1 << 18
"""Of one program of the kernel; a multiple of 8."""

ASKED_BYTES_MAX = 1 << 28
"""Of tensors until a launch: some are copies, or were gathered from several ranks, and wait."""

_STRIDE, _FIRST, _SECOND = (
    each - (1 << 64) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The odd numbers of splitmix64 (Steele, Lea and Flood 2014), as int64."""

_LOW = (1 << 32) - 1


class Pending:
    """A hash that is still on its device. str() gives it once it was fetched."""

    __slots__ = ("text",)

    def __init__(self) -> None:
        self.text = ""

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class _Asked:
    """A hash that is not started yet. `memory` holds its bytes, row by row."""

    pending: Pending
    memory: Tensor
    rows: int


@dataclass(slots=True)
class _Started:
    """The sums of all rows, as numbers to add; `starts`: the first number of each row."""

    numbers: Tensor
    starts: np.ndarray
    asked: list[tuple[Pending, int]]
    """And how many rows it has."""


Kernel = Callable[[Tensor], Tensor]
"""As chunk_sums() of hash_kernels.py."""


class TensorHashes:
    """Makes hashes in hexadecimal. `on_device`: which tensors are hashed where they are. `kernel`:
    for all devices; None: that of the device."""

    def __init__(
        self,
        on_device: Callable[[Tensor], bool] = lambda tensor: not tensor.is_cpu,
        kernel: Kernel | None = None,
    ) -> None:
        self._on_device, self._kernel = on_device, kernel
        self._asked: list[_Asked] = []
        self._asked_bytes = 0
        self._started: list[_Started] = []

    def whole(self, tensor: Tensor) -> str | Pending:
        """Of all elements in row-major order."""
        if self._on_device(tensor):
            return self._later(tensor, 1)
        return xxhash.xxh3_128_hexdigest(_octets(tensor).numpy().data)

    def rows(self, tensor: Tensor, count: int) -> str | Pending:
        """Of `count` equal parts of the elements, 16 digits for each part."""
        if self._on_device(tensor):
            return self._later(tensor, count)
        octets = _octets(tensor)
        octets_RB = octets.reshape(count, octets.numel() // count)
        return "".join(xxhash.xxh3_64_hexdigest(row.data) for row in octets_RB.numpy())

    def launch(self) -> None:
        """Start the hashes that were asked for. Call it before one of their tensors is written."""
        asked, self._asked, self._asked_bytes = self._asked, [], 0
        for device in dict.fromkeys(each.memory.device for each in asked):
            here = [each for each in asked if each.memory.device == device]
            with unseen():
                numbers, starts = self._start(device, here)
            self._started.append(
                _Started(numbers, starts, [(each.pending, each.rows) for each in here])
            )

    def fetch(self) -> None:
        """Wait for every pending hash; one transfer for each device."""
        self.launch()
        started, self._started = self._started, []
        for device in dict.fromkeys(each.numbers.device for each in started):
            here = [each for each in started if each.numbers.device == device]
            fetched = torch.cat([each.numbers for each in here]).cpu().numpy().view(np.uint64)
            ends = np.cumsum([each.numbers.numel() for each in here])
            for each, numbers in zip(here, np.split(fetched, ends[:-1]), strict=True):
                sums = iter(np.add.reduceat(numbers, each.starts).tolist())
                for pending, rows in each.asked:
                    pending.text = "".join(f"{next(sums):016x}" for _ in range(rows))

    def _later(self, tensor: Tensor, rows: int) -> Pending:
        pending, memory = Pending(), tensor if _is_plain(tensor) else _octets(tensor)
        self._asked.append(_Asked(pending, memory, rows))
        self._asked_bytes += memory.nbytes
        if self._asked_bytes > ASKED_BYTES_MAX:
            self.launch()
        return pending

    def _start(self, device: torch.device, asked: list[_Asked]) -> tuple[Tensor, np.ndarray]:
        """The numbers and starts of _Started."""
        kernel = self._kernel or _kernel_of(device)
        if kernel is None:
            sums = torch.cat([row_sums(_by_row(each.memory, each.rows)) for each in asked])
            return sums, np.arange(sums.numel())
        memories = [(_aligned(each.memory, each.rows), each.rows) for each in asked]
        chunks_C3, starts = chunks_of(
            [(memory.data_ptr(), rows, memory.nbytes // rows) for memory, rows in memories]
        )
        table = torch.from_numpy(chunks_C3)
        if device.type != "cuda":
            return kernel(table), starts
        with torch.cuda.device(device):
            return kernel(table.pin_memory().to(device, non_blocking=True)), starts


def chunks_of(memories: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(address, rows, bytes of a row) of each -> chunks (C, 3), as hash_kernels.py takes them, and
    where those of each row begin. A row without bytes has a chunk without bytes."""
    address_M, rows_M, size_M = np.array(memories, np.int64).T
    size_R, first = np.repeat(size_M, rows_M), np.cumsum(rows_M) - rows_M
    row_R = np.arange(len(size_R)) - np.repeat(first, rows_M)
    address_R = np.repeat(address_M, rows_M) + row_R * size_R
    count_R = np.maximum(1, -(-size_R // CHUNK_BYTES))
    starts_R = np.cumsum(count_R) - count_R
    at_C = (np.arange(count_R.sum()) - np.repeat(starts_R, count_R)) * CHUNK_BYTES
    bytes_C = np.minimum(CHUNK_BYTES, np.repeat(size_R, count_R) - at_C)
    chunks_C3 = np.stack([np.repeat(address_R, count_R) + at_C, bytes_C, at_C // 8], 1)
    return chunks_C3, starts_R


def _kernel_of(device: torch.device) -> Kernel | None:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return _triton_kernel(device)


@cache
def _triton_kernel(device: torch.device) -> Kernel | None:
    """None where Triton is missing, or has no compiler on this machine."""
    try:
        from mend.determinism.hash_kernels import chunk_sums

        with torch.cuda.device(device):
            chunk_sums(torch.zeros(1, 3, dtype=torch.int64, device=device))
    except Exception as error:  # whatever a compiler says; torch's operators do without
        log.warning("hashes on %s are made by torch's operators, which is slow: %s", device, error)
        return None
    return chunk_sums


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are its memory."""
    known = type(tensor) in (Tensor, nn.Parameter)
    return known and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _by_row(memory: Tensor, rows: int) -> Tensor:
    """(R, B) uint8."""
    octets = bytes_of(memory)
    return octets.view(rows, octets.numel() // rows)


def _aligned(memory: Tensor, rows: int) -> Tensor:
    """With rows that begin at multiples of 8; zeros at the end of a row change no hash."""
    if memory.data_ptr() % 8 == 0 and (rows == 1 or memory.nbytes // rows % 8 == 0):
        return memory
    octets_RB = _by_row(memory, rows)
    return functional.pad(octets_RB, (0, -octets_RB.shape[1] % 8)).clone()


def row_sums(octets_RB: Tensor) -> Tensor:
    """(R, B) uint8 -> (R,) int64: the sum, modulo 2^64, of every word of 8 bytes mixed with its
    place. A sum of whole numbers is the same in any order."""
    rows, size = octets_RB.shape
    total_R = torch.zeros(rows, dtype=torch.int64, device=octets_RB.device)
    if not size:
        return total_R
    if size % 8 or octets_RB.storage_offset() % 8:
        octets_RB = functional.pad(octets_RB, (0, -size % 8)).contiguous()
    words_RW = octets_RB.view(torch.int64)
    most = max(1, WORDS_MAX // rows)
    for first in range(0, words_RW.shape[1], most):
        part = words_RW[:, first : first + most]
        place = torch.arange(first, first + part.shape[1], device=part.device)
        mixed = part + place * _STRIDE
        for factor in (_FIRST, _SECOND):
            mixed = mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW)).mul_(factor)
        mixed = mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW))
        total_R += mixed.sum(1)
    return total_R


def texts_of(value: Any) -> Any:
    """`value`, of nested lists and dicts, with every hash that was fetched as its text."""
    if isinstance(value, Pending):
        return str(value)
    if isinstance(value, dict):
        return {key: texts_of(each) for key, each in value.items()}
    return [texts_of(each) for each in value] if isinstance(value, list) else value


def _octets(tensor: Tensor) -> Tensor:
    return bytes_of(tensor.detach().resolve_conj().resolve_neg())
