"""Byte formats of the sums that ranks exchange for merges weighted by whole tensors.

A partial: head, weights (M float32), then per measured tensor its bins (M int8) and the upper
triangle of its sums, row by row (2M (2M + 1) / 2 integers of INT_BYTES). A total: head, weights,
then per measured tensor its factors (M float32). Everything is big-endian.

Legend: M members of a merge, T tensors that are measured.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mend.consensus.records import SUMS_BYTES_MAX
from mend.errors import ConfigError, WireError, ensure
from mend.merge import Gram, Measuring, nothing
from mend.merge.gram import BIN_MAX, BIN_MIN, BIN_WRONG, BIN_ZERO
from mend.types import Layout, Owned

INT_BYTES = 12
"""Size of a sum: digits are at most 2^23, so sums of 2^48 elements stay below 2^95."""

_HEAD = struct.Struct("!4sHI")
_PARTIAL, _TOTAL = b"mdP1", b"mdT1"

Weights = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Where the tensors of a fragment lie in a rank's part: tensor i is [cuts[i], cuts[i + 1]).

    `plain[i]`: tensor i is merged by the mean, whatever the rule.
    """

    cuts: tuple[int, ...]
    plain: tuple[bool, ...]

    def __post_init__(self) -> None:
        right = len(self.cuts) == len(self.plain) + 1
        ensure(right, "not one flag per tensor", cuts=self.cuts, plain=self.plain)

    @property
    def measured(self) -> list[tuple[int, int]]:
        return [
            span for span, plain in zip(pairwise(self.cuts), self.plain, strict=True) if not plain
        ]

    def runs(self, weights: Weights, factors: Sequence[Weights]) -> list[tuple[int, Weights]]:
        """(end, weights) of the stretches that are merged with the same weights."""
        runs: list[tuple[int, Weights]] = []
        measured = iter(factors)
        for stop, plain in zip(self.cuts[1:], self.plain, strict=True):
            own = weights if plain else next(measured)
            if runs and runs[-1][1] == own:
                runs.pop()
            runs.append((stop, own))
        return runs


def tensors_of(owned: Owned, plain: Sequence[bool] = ()) -> Tensors:
    """The tensors of a rank's part. Empty `plain`: none is merged by the mean."""
    ensure(owned.cuts[-1] == owned.numel, "spans of another number of elements", owned=owned)
    return Tensors(owned.cuts, tuple(plain) or (False,) * len(owned.spans))


def check_room(
    plan: Iterable[Layout], plain: Iterable[Sequence[bool]], racks: int, merge: str
) -> None:
    """Raises ConfigError if the partials of all fragments would not fit a message."""
    measured = sum(len(flags) - sum(flags) for flags in plain)
    slots = sum(len(layout.slots) for layout in plan)
    size = _partial_bytes(racks, measured)
    if size > SUMS_BYTES_MAX:
        rule = f"{racks} racks make {size} bytes of sums of {measured} of {slots} tensors"
        remedy = f"At most {SUMS_BYTES_MAX} can be sent: use merge='mean', or fewer racks."
        raise ConfigError("merge", merge, rule, remedy)


def partial_of(weights: Weights, grams: Sequence[Gram]) -> bytes:
    """The partial of one rank's part, as bytes."""
    parts = [_head(_PARTIAL, weights, len(grams))]
    for gram in grams:
        parts.append(struct.pack(f"!{len(weights)}b", *gram.bins))
        parts += [
            number.to_bytes(INT_BYTES, "big", signed=True)
            for i, row in enumerate(gram.sums)
            for number in row[i:]
        ]
    return b"".join(parts)


def total_of(rule: Measuring, partials: Sequence[bytes]) -> bytes:
    """The total of the partials of all ranks, in any order, as bytes. Raises WireError."""
    (weights, sums), *others = [_read_partial(blob) for blob in partials]
    for other_weights, grams in others:
        if other_weights != weights or len(grams) != len(sums):
            raise WireError("the ranks of this rack have measured different merges")
        sums = [total.plus(gram) for total, gram in zip(sums, grams, strict=True)]
    factors = [rule.factors(gram, weights) for gram in sums]
    parts = [struct.pack(f"!{len(weights)}f", *of_tensor) for of_tensor in factors]
    return b"".join([_head(_TOTAL, weights, len(factors)), *parts])


def factors_in(blob: bytes, weights: Weights, tensors: Tensors) -> list[Weights]:
    """The factors of each measured tensor. Raises WireError when the total is of another merge."""
    theirs, count, at = _read_head(_TOTAL, blob)
    size = 4 * len(theirs)
    if theirs != weights or count != len(tensors.measured) or len(blob) != at + count * size:
        raise WireError(f"{len(blob)} bytes that are not factors of {len(weights)} racks")
    found = [struct.unpack_from(f"!{len(weights)}f", blob, at + i * size) for i in range(count)]
    if not all(math.isfinite(factor) for factors in found for factor in factors):
        raise WireError("a factor of a tensor is not finite")
    return found


def _head(kind: bytes, weights: Weights, tensors: int) -> bytes:
    return _HEAD.pack(kind, len(weights), tensors) + struct.pack(f"!{len(weights)}f", *weights)


def _read_head(kind: bytes, blob: bytes) -> tuple[Weights, int, int]:
    """The weights, the number of tensors, and where the rest begins."""
    if len(blob) < _HEAD.size:
        raise WireError(f"{len(blob)} bytes are too few for sums")
    found, members, tensors = _HEAD.unpack_from(blob)
    at = _HEAD.size + 4 * members
    if found != kind or not members or len(blob) < at:
        raise WireError(f"{len(blob)} bytes that do not begin like sums")
    return struct.unpack_from(f"!{members}f", blob, _HEAD.size), tensors, at


def _read_partial(blob: bytes) -> tuple[Weights, list[Gram]]:
    weights, tensors, at = _read_head(_PARTIAL, blob)
    if len(blob) != _partial_bytes(len(weights), tensors):
        what = f"{len(blob)} bytes are not sums of {tensors} tensors, {len(weights)} racks"
        raise WireError(what)
    size = _gram_bytes(len(weights))
    return weights, [_read_gram(len(weights), blob, at + i * size) for i in range(tensors)]


def _read_gram(members: int, blob: bytes, at: int) -> Gram:
    bins = struct.unpack_from(f"!{members}b", blob, at)
    if any(k not in (BIN_ZERO, BIN_WRONG) and not BIN_MIN <= k <= BIN_MAX for k in bins):
        raise WireError(f"sums of numbers that are not float32: bins {bins}")
    at += members
    sums = [list(row) for row in nothing(members).sums]
    for i in range(2 * members):
        for j in range(i, 2 * members):
            number = int.from_bytes(blob[at : at + INT_BYTES], "big", signed=True)
            sums[i][j] = sums[j][i] = number
            at += INT_BYTES
    gram = Gram(bins, tuple(map(tuple, sums)))
    if any(sums[2 * m][2 * m] < 0 or gram.product(m, m) < 0 for m in range(members)):
        raise WireError("a sum of squares below zero")
    return gram


def _gram_bytes(members: int) -> int:
    digits = 2 * members
    return members + INT_BYTES * digits * (digits + 1) // 2


def _partial_bytes(members: int, tensors: int) -> int:
    return _HEAD.size + 4 * members + tensors * _gram_bytes(members)
