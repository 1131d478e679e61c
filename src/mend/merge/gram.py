"""Exact lengths and products of vectors that lie in pieces on many ranks. No rounding depends on
how they were cut, and no sum on its order.

A vector is put on a grid that its greatest element decides. With max |x| in [2^(e-1), 2^e), bin
k = floor(e / 24) and step g = 2^(24 (k-1)), every element is rounded to the nearest multiple of g,
ties to even. g is at most one fp32 step of the greatest element. Sums of products of multiples are
integers: they are exact in any order.

The grid of the whole vector is unknown while its pieces are summed. So each piece is split into
two digits of its own bin k, high = round(x / 2^(24 k)) and low = round(x / 2^(24 (k-1))) - 2^24
high. If the whole has bin k + 1, `high` is its low digit; if it has a greater bin, the whole piece
rounds to zero. (A piece of bin k has max |x| < 2^(24 k + 23), half a step of what would then be
its high digit.)

Legend: N elements of a piece, M vectors, D = 2 M digits (high and low of each), C chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mend.errors import ensure

BITS = 24

_CHUNK_NUMEL = 1 << (53 - 2 * (BITS - 1))
"""A digit is at most 2^23, so a sum of this many products is an integer of at most 2^53: every
partial sum is exact in fp64, and a library may add (and fuse) in any order."""

PIECE_NUMEL_MAX = _CHUNK_NUMEL << 9
"""Sums of chunks are added as int64. Each is at most 2^53, so 512 of them are far from its
limit."""

ROW_NUMEL = 512
"""Elements that a kernel reads at once."""

BIN_ZERO, BIN_WRONG = -128, 127
"""The bins of a vector of zeros (or of no elements), and of one with a NaN or an infinity."""

BIN_MIN, BIN_MAX = -7, 5
"""The bins of the least fp32 number, 2^-149, and of the greatest."""


@dataclass(frozen=True, slots=True)
class Gram:
    """bins: one per vector (M). sums: D x D, symmetric; sums[i][j] is of digits i and j, where
    vector m has the high digit 2m and the low digit 2m + 1."""

    bins: tuple[int, ...]
    sums: tuple[tuple[int, ...], ...]

    def plus(self, other: Gram) -> Gram:
        """The sums of both pieces together. Exact, so associative and commutative."""
        alike = len(self.bins) == len(other.bins)
        ensure(alike, "sums of another number of vectors", mine=self.bins, theirs=other.bins)
        bins = tuple(map(max, self.bins, other.bins))
        mine, theirs = self._on(bins), other._on(bins)
        rows = zip(mine, theirs, strict=True)
        return Gram(bins, tuple(tuple(map(int.__add__, a, b)) for a, b in rows))

    def _on(self, bins: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The sums as digits of these bins, none of which is less than the own one."""
        if bins == self.bins:
            return self.sums
        source: list[int | None] = []
        for m, (mine, new) in enumerate(zip(self.bins, bins, strict=True)):
            high, low = {0: (2 * m, 2 * m + 1), 1: (None, 2 * m)}.get(new - mine, (None, None))
            source += [high, low]
        return tuple(
            tuple(0 if i is None or j is None else self.sums[i][j] for j in source) for i in source
        )

    def product(self, m: int, other: int) -> int:
        """x_m . x_other on their grids, in units of 2^(step(m) + step(other))."""
        high, low = self.sums[2 * m], self.sums[2 * m + 1]
        hh, hl, lh, ll = (row[2 * other + digit] for row in (high, low) for digit in (0, 1))
        return (hh << 2 * BITS) + ((hl + lh) << BITS) + ll

    def step(self, m: int) -> int:
        """The grid of vector m has steps of 2^this."""
        return BITS * (self.bins[m] - 1)


def nothing(vectors: int) -> Gram:
    """The sums of no elements: what `plus` begins with."""
    return Gram((BIN_ZERO,) * vectors, ((0,) * (2 * vectors),) * (2 * vectors))


def gram_of(delta_N: Sequence[Tensor]) -> Gram:
    """The sums of one piece (M vectors of fp32, N), of at most PIECE_NUMEL_MAX elements."""
    vectors, numel = len(delta_N), delta_N[0].numel()
    ensure(numel <= PIECE_NUMEL_MAX, "too long a piece for exact sums", numel=numel)
    whole = numel - numel % _CHUNK_NUMEL
    if 0 < whole < numel:
        return gram_of([d[:whole] for d in delta_N]).plus(gram_of([d[whole:] for d in delta_N]))
    if numel == 0:
        return nothing(vectors)
    bins = tuple(_bin(delta) for delta in delta_N)
    size = min(numel, _CHUNK_NUMEL)
    digits_CDN = torch.empty(numel // size, 2 * vectors, size, dtype=torch.float64, device="cpu")
    for m, (k, delta) in enumerate(zip(bins, delta_N, strict=True)):
        _split(delta, k, digits_CDN[:, 2 * m], digits_CDN[:, 2 * m + 1])
    # A library reduction is exact here: every number in it is an integer of at most 2^53.
    sums_CDD = torch.bmm(digits_CDN, digits_CDN.transpose(1, 2))
    return Gram(bins, tuple(map(tuple, sums_CDD.to(torch.int64).sum(0).tolist())))


def gram_by(kernel: Callable[..., int], delta_N: Sequence[Tensor]) -> Gram:
    """`gram_of` by a `mend.kernels.GramKernel`, for a piece of any length."""
    vectors, numel = len(delta_N), delta_N[0].numel()
    rows = -(-numel // ROW_NUMEL)
    bins_RM = np.empty((rows, vectors), np.int64)
    sums_R2DD = np.zeros((rows, 2, 2 * vectors, 2 * vectors), np.int64)
    places = np.array([delta.data_ptr() for delta in delta_N], np.uint64)
    gram = nothing(vectors)
    for record in range(kernel(places, numel, bins_RM, sums_R2DD)):
        high, low = sums_R2DD[record].tolist()
        pairs = (zip(*row, strict=True) for row in zip(high, low, strict=True))
        half = [[(above << 32) + below for above, below in row] for row in pairs]
        digits = range(2 * vectors)
        sums = tuple(tuple(half[min(i, j)][max(i, j)] for j in digits) for i in digits)
        gram = gram.plus(Gram(tuple(bins_RM[record].tolist()), sums))
    return gram


def _bin(delta_N: Tensor) -> int:
    low, high = (x.item() for x in torch.aminmax(delta_N))
    greatest = max(-low, high)
    if not math.isfinite(low) or not math.isfinite(high):
        return BIN_WRONG
    return math.frexp(greatest)[1] // BITS if greatest else BIN_ZERO


def _split(delta_N: Tensor, k: int, high_CN: Tensor, low_CN: Tensor) -> None:
    """The two digits for bin k, in fp32, where every operation is exact: scaling by a power of two
    (except for numbers that round to zero anyway), rounding, and the rest of it, at most a half."""
    if k in (BIN_ZERO, BIN_WRONG):
        high_CN.zero_()
        low_CN.zero_()
        return
    half_way = 2.0 ** (-BITS // 2 * k)  # 2^(-24 k) itself may be no fp32 number
    rest_N = (delta_N * half_way).mul_(half_way)
    high_N = torch.round(rest_N)
    high_CN.copy_(high_N.view(high_CN.shape))
    low_CN.copy_(rest_N.sub_(high_N).mul_(2.0**BITS).round_().view(low_CN.shape))
