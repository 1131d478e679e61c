"""Hashes of tensors for recordings. A tensor of the CPU is hashed at once, by xxh3; one of another
device there, and all such hashes are fetched together, so that a step waits for its device once.

torch.hash_tensor is not enough: it is the XOR of the elements. Any order of them has the same hash,
and two equal elements cancel, so that all ones and all twos have the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from mend.determinism.coverage import unseen
from mend.determinism.digests import bytes_of

WORDS_MAX = 1 << 22
"""Words of 8 bytes that are mixed at once: bounds the memory beside a large tensor."""

_STRIDE, _FIRST, _SECOND = (
    each - (1 << 64) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""The odd numbers of splitmix64 (Steele, Lea and Flood 2014), as int64."""

_LOW = (1 << 32) - 1


class Pending:
    """A hash that is still on its device. str() gives it once it was fetched."""

    __slots__ = ("sums", "text")

    def __init__(self, sums: Tensor) -> None:
        self.sums, self.text = sums, ""

    def __str__(self) -> str:
        return self.text


class TensorHashes:
    """Makes hashes in hexadecimal. `on_device`: which tensors are hashed where they are."""

    def __init__(
        self, on_device: Callable[[Tensor], bool] = lambda tensor: not tensor.is_cpu
    ) -> None:
        self._on_device = on_device
        self._pending: list[Pending] = []

    def whole(self, tensor: Tensor) -> str | Pending:
        """Of all elements in row-major order."""
        octets = _octets(tensor)
        if self._on_device(tensor):
            return self._later(octets[None])
        return xxhash.xxh3_128_hexdigest(octets.numpy().data)

    def rows(self, tensor: Tensor, count: int) -> str | Pending:
        """Of `count` equal parts of the elements, 16 digits for each part."""
        octets = _octets(tensor)
        octets_RB = octets.reshape(count, octets.numel() // count)
        if self._on_device(tensor):
            return self._later(octets_RB)
        return "".join(xxhash.xxh3_64_hexdigest(row.data) for row in octets_RB.numpy())

    def fetch(self) -> None:
        """Wait for every pending hash; one transfer for each device."""
        pending, self._pending = self._pending, []
        for device in dict.fromkeys(each.sums.device for each in pending):
            here = [each for each in pending if each.sums.device == device]
            numbers = iter(torch.cat([each.sums for each in here]).tolist())
            for each in here:
                each.text = "".join(
                    f"{next(numbers) & ((1 << 64) - 1):016x}" for _ in range(each.sums.numel())
                )

    def _later(self, octets_RB: Tensor) -> Pending:
        with unseen():
            self._pending.append(Pending(row_sums(octets_RB)))
        return self._pending[-1]


def row_sums(octets_RB: Tensor) -> Tensor:
    """(R, B) uint8 -> (R,) int64: the sum, modulo 2^64, of every word of 8 bytes mixed with its
    place. A sum of whole numbers is the same in any order."""
    rows, size = octets_RB.shape
    if size % 8 or octets_RB.storage_offset() % 8:
        octets_RB = functional.pad(octets_RB, (0, -size % 8)).contiguous()
    words_RW = octets_RB.view(torch.int64)
    total_R = torch.zeros(rows, dtype=torch.int64, device=octets_RB.device)
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
