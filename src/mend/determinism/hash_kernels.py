"""A Triton kernel for tensor_hashes.py: hashes any number of tensors of a GPU in one launch, and
reads each word once. Touches tensors only.

Legend: C chunks, k words of a block; _p: pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


# Triton looks names of annotations up: they must be its own.


def _part(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_part
def _high(x: tl.tensor) -> tl.tensor:
    """The upper half, as a shift of numbers without a sign gives it."""
    return (x >> 32) & 0xFFFFFFFF


@_part
def _mixed(words: tl.tensor, place: tl.tensor) -> tl.tensor:
    """The constants of tensor_hashes, as int64."""
    mixed = words + place * -7046029254386353131
    mixed = (mixed ^ _high(mixed)) * -4658895280553007687
    mixed = (mixed ^ _high(mixed)) * -7723592293110705685
    return mixed ^ _high(mixed)


@_part
def _chunk_sums(chunks_p: tl.tensor, sums_p: tl.tensor, BLOCK: tl.constexpr) -> None:
    chunk = tl.program_id(0).to(tl.int64)
    address = tl.load(chunks_p + chunk * 3)
    size = tl.load(chunks_p + chunk * 3 + 1)
    first = tl.load(chunks_p + chunk * 3 + 2)
    words_p = address.to(tl.pointer_type(tl.int64))
    words = size // 8
    k = tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, words, BLOCK):
        inside = start + k < words
        read = tl.load(words_p + start + k, mask=inside, other=0)
        total += tl.where(inside, _mixed(read, first + start + k), 0)
    # The bytes after the last whole word, as if zeros followed them.
    rest = size - words * 8
    b = tl.arange(0, 8).to(tl.int64)
    octets_p = address.to(tl.pointer_type(tl.uint8))
    octets = tl.load(octets_p + words * 8 + b, mask=b < rest, other=0).to(tl.int64)
    last = _mixed(tl.sum(octets << (b * 8), 0), first + words)
    tl.store(sums_p + chunk, tl.sum(total, 0) + tl.where(rest > 0, last, 0))


def chunk_sums(chunks_C3: Tensor) -> Tensor:
    """(C, 3) int64 (address, bytes, number of the first word) -> (C,) int64: as row_sums() of
    tensor_hashes.py. The addresses are on the device of `chunks_C3`, and multiples of 8. Runs on
    the current stream; what is there must live until then."""
    count = chunks_C3.shape[0]
    sums_C = torch.empty(count, dtype=torch.int64, device=chunks_C3.device)
    _chunk_sums[(count,)](chunks_C3, sums_C, _BLOCK, num_warps=4)
    return sums_C
