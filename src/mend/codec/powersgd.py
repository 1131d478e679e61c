"""codec.powersgd: matrices of low rank. Runs on workers. Touches tensors; never peers, clocks,
files.

PowerSGD (arXiv 1905.13727) in the form that a quorum can merge: all racks share one orthonormal
basis, and each sends the other factor only. The side alternates. A rack that captures against an
anchor of even version sends P = X Q, and the others read P Q^T; the basis of the next version is L
= orth(merged P). Against an odd version it sends S = X^T L, read as L S^T, and the next basis is Q
= orth(merged S): one power iteration, spread over two rounds. (A Q made from the merged matrix
itself would keep its span forever.)

Bits. Every rack decodes and computes the next basis for itself, so both give equal bits on every
machine. Basis and factor are whole numbers of at most 16 bits times a power of two, and products
and sums of so few bits are exact in float64. A matrix product therefore has one result, whatever
library, order, number of threads or fused multiply-add computes it. The same holds for X Q, as X is
rounded first. `orthonormal` uses single operations and sums of a fixed order.

A late offer was encoded with the basis of an older version. The state holds the bases of all
versions that may still be merged, and a payload names its own: version and checksum.

Legend: N elements of a rank's part of a fragment, B payload bytes, S elements of the state, m rows
and n columns of a matrix, r its rank, k the length of a basis (n or m).
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from mend.codec.base import Codec, Feedback, check_row
from mend.errors import ConfigError, WireError, ensure
from mend.kernels import product_kernels
from mend.types import Owned

RANK_MAX = 64
_HEAD = struct.Struct("<4sIQ")  # magic, base version (modulo 2^32), checksum of its bases
_MAGIC = b"mPS1"
_LEVEL_BITS, _LEVELS = 15, (1 << 15) - 1
"""Bits, without the sign, and greatest level of a factor's elements. Their unit is a power of two
as well."""
_BASIS_BITS = 15
"""Bits of a basis's elements, without the sign."""
_EXACT_BITS = 52
"""Whole numbers below 2^53 are exact in float64; the rounding of a basis may reach 2^15."""
_TINY = 2.0**-60
"""A tensor or factor whose greatest magnitude is below this is sent as zero, so that nothing that
is decoded is subnormal."""
_NOISE = 2.0**-10
"""Magnitude, relative to the merged factor, of the random directions that are added to a basis, so
that it always has r directions."""
_COMPILED_RANK_MAX = 8
"""Above this rank a library's matrix product is faster than a compiled loop."""
_STRIP_NUMEL, _SINGLE_NUMEL = 1 << 15, 1 << 16
"""Elements per strip of rows, see codec.blocks."""


class PowerSGD:
    """Tensors of two or more dimensions by `rank` columns, all others as bfloat16.

    A tensor is folded into the matrix whose sides are most alike. If one side is not longer than
    the rank, the tensor is sent as bfloat16, too. A rank encodes what it holds of a tensor: a shard
    as it is."""

    exact = False
    feedback: Feedback = "weights"

    def __init__(self, rank: int = 4) -> None:
        if not 1 <= rank <= RANK_MAX:
            raise ConfigError("rank", rank, f"must be 1 to {RANK_MAX}", "4 is the usual one.")
        self.rank, self.name = rank, f"powersgd-{rank}"

    def of(self, owned: Owned, staleness_max_rounds: int) -> LowRank:
        if self.rank <= _COMPILED_RANK_MAX:
            product_kernels()  # compiled now instead of in the first round
        return LowRank(self.name, self.rank, owned, staleness_max_rounds)


class Matrix(NamedTuple):
    """A tensor of a rank's part: elements [begin, begin + numel) of the vector are elements `lead`
    and following of m rows and n columns. What is missing in the first and the last row counts as
    0."""

    begin: int
    numel: int
    lead: int
    rows: int
    cols: int

    def length(self, side: int) -> int:
        """k of the basis that offers against an anchor of an even (0) or odd (1) version use."""
        return self.rows if side else self.cols


class Raw(NamedTuple):
    """A tensor that is sent as bfloat16."""

    begin: int
    numel: int


def matrix_of(shape: Sequence[int], begin: int, start: int, stop: int) -> Matrix:
    """Elements [start, stop) of a tensor, folded where the two sides are most alike."""
    widths = [math.prod(shape[i:]) for i in range(1, len(shape))] or [max(1, stop)]
    whole = math.prod(shape)
    cols = min(widths, key=lambda width: max(width, whole // max(1, width)))
    first = start // max(1, cols)
    rows = -(-stop // max(1, cols)) - first
    return Matrix(begin, stop - start, start - first * cols, rows, cols)


class LowRank:
    """The FragmentCodec. Its state holds the bases of every version that may still be merged, those
    of all matrices end to end; of version v in slot v modulo `slots`, which is even."""

    varies = True

    def __init__(self, name: str, rank: int, owned: Owned, staleness_max_rounds: int) -> None:
        self.name, self.rank, self.numel = name, rank, owned.numel
        self.matrices: list[Matrix] = []
        self.raws: list[Raw] = []
        shapes = owned.shapes or tuple((span.stop,) for span in owned.spans)
        for shape, span, begin in zip(shapes, owned.spans, owned.cuts, strict=False):
            found = matrix_of(shape, begin, *span)
            if rank < min(found.rows, found.cols):
                self.matrices.append(found)
            elif span.numel:
                self.raws.append(Raw(begin, span.numel))
        self.slots = (staleness_max_rounds + 2) // 2 * 2
        self._slot_numel = [rank * sum(each.length(s) for each in self.matrices) for s in (0, 1)]
        self.state_numel = self.slots // 2 * sum(self._slot_numel)
        self.payload_bytes = max(self.size(0), self.size(1))

    def size(self, side: int) -> int:
        """B of an offer against an anchor of an even (0) or odd (1) version."""
        factors = self.rank * sum(each.length(1 - side) for each in self.matrices)
        raw = sum(each.numel for each in self.raws)
        return _HEAD.size + 4 * len(self.matrices) + 2 * (factors + raw)

    def first(self, state_S: Tensor) -> None:
        for side in (0, 1):
            for number, basis_rk in enumerate(self.bases(state_S, side)):
                noise_rk = _noise(basis_rk.shape, (side, number))
                basis_rk.copy_(rounded(orthonormal(noise_rk)))
        for slot in range(2, self.slots):
            self.slot(state_S, slot).copy_(self.slot(state_S, slot % 2))

    def at(self, state_S: Tensor, version: int) -> Codec:
        return LowRankAt(self, state_S, version)

    def advance(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        state_S: Tensor,
        version: int,
        out_S: Tensor,
    ) -> None:
        """The basis of the other side, from what is merged. Where all offers are a version late, no
        factor of this side is merged, and the newest basis of the other side stays."""
        out_S.copy_(state_S)
        codec, side, after = LowRankAt(self, state_S, version), version % 2, version + 1
        pairs = zip(map(codec.read, payloads), weights, strict=True)
        there = [(each, weight) for each, weight in pairs if each.base % 2 == side]
        self.slot(out_S, after).copy_(self.slot(state_S, after - 2))
        if not there:
            return
        for number, basis_rk in enumerate(self.bases(out_S, after)):
            merged_rk = np.zeros(tuple(basis_rk.shape))
            for each, weight in there:
                merged_rk += each.factors[number].numpy() * weight
            noise_rk = _noise(basis_rk.shape, (side, number, after))
            basis_rk.copy_(rounded(orthonormal(_mix(merged_rk, noise_rk))))

    def slot(self, state_S: Tensor, version: int) -> Tensor:
        """The bases of a version, end to end."""
        number = version % self.slots
        begin = number // 2 * sum(self._slot_numel) + number % 2 * self._slot_numel[0]
        return state_S[begin : begin + self._slot_numel[number % 2]]

    def bases(self, state_S: Tensor, version: int) -> list[Tensor]:
        """The bases of a version, as one view (r, k) per matrix."""
        lengths = [each.length(version % 2) for each in self.matrices]
        cuts = accumulate((self.rank * length for length in lengths), initial=0)
        mine = self.slot(state_S, version)
        return [mine[begin:end].view(self.rank, -1) for begin, end in pairwise(cuts)]


class PayloadContent(NamedTuple):
    """Content of a payload. factors: per matrix float64 (r, k)."""

    base: int
    factors: list[Tensor]
    raw_N: Tensor


class LowRankAt:
    """The Codec of an anchor of one version. Several threads share it."""

    exact = False
    feedback: Feedback = "weights"
    block = 0

    def __init__(self, part: LowRank, state_S: Tensor, version: int) -> None:
        self.name, self._part, self._state_S, self.version = part.name, part, state_S, version
        places: list[tuple[int, int, Matrix | Raw]] = []
        places += [(each.begin, i, each) for i, each in enumerate(part.matrices)]
        places += [(raw.begin, i, raw) for i, raw in enumerate(part.raws)]
        self._places = sorted(places, key=lambda place: place[0])
        self._begins = [begin for begin, _, _ in self._places]
        self._raw_begins = list(accumulate((each.numel for each in part.raws), initial=0))
        self._bases: dict[int, list[Tensor]] = {}
        self._read: dict[tuple[int, int], PayloadContent] = {}

    def payload_bytes(self, numel: int) -> int:
        return self._part.payload_bytes

    # -------------------------------------------------------------- encode

    def encode(self, x_N: Tensor) -> Tensor:
        part, side = self._part, self.version % 2
        payload_B = torch.empty(part.size(side), dtype=torch.uint8, device="cpu")
        head = _HEAD.pack(_MAGIC, self.version & 0xFFFFFFFF, self._checksum(self.version))
        payload_B[: _HEAD.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        scales, factors, raw = self._cut(payload_B, side)
        for number, each in enumerate(part.matrices):
            basis_rk = self._basis(self.version)[number]
            factor_rk = _factor(_whole(x_N, each), basis_rk, side)
            peak = float(factor_rk.abs().max())
            if not _TINY <= peak < math.inf:  # NaN or Inf shows in the scale
                scales[number] = 0.0 if peak < _TINY else math.nan
                factors[number].zero_()
                continue
            power = math.frexp(peak)[1] - _LEVEL_BITS
            scales[number] = 2.0**power
            factor_rk.mul_(2.0**-power).round_().clamp_(-_LEVELS, _LEVELS)
            factors[number].copy_(factor_rk)
        for each_raw, begin in zip(part.raws, self._raw_begins, strict=False):
            for first in range(0, each_raw.numel, _STRIP_NUMEL):
                last = min(first + _STRIP_NUMEL, each_raw.numel)
                span = x_N[each_raw.begin + first : each_raw.begin + last]
                raw[begin + first : begin + last].copy_(span)
        return payload_B

    # -------------------------------------------------------------- decode

    def check(self, payload_B: Tensor, numel: int) -> None:
        part = self._part.numel
        ensure(numel == part, "a payload of another length", numel=numel, part=part)
        self.read(payload_B)

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        part, found = self._part, self.read(payload_B)
        if not 0 <= start <= stop <= part.numel:
            raise WireError(f"elements [{start}, {stop}) are not in {part.numel}")
        at = max(0, bisect_right(self._begins, start) - 1)
        while at < len(self._places) and self._begins[at] < stop:
            _, number, each = self._places[at]
            first, last = max(start, each.begin), min(stop, each.begin + each.numel)
            if first < last:
                span = out[first - start : last - start]
                if isinstance(each, Matrix):
                    self._decode(found, number, first - each.begin, last - each.begin, span)
                else:
                    shift = self._raw_begins[number] - each.begin
                    span.copy_(found.raw_N[first + shift : last + shift])
            at += 1
        return out

    def read(self, payload_B: Tensor) -> PayloadContent:
        """Raises WireError for a payload that does not belong to this part or to a known base."""
        key = (payload_B.data_ptr(), payload_B.numel())  # of memory that `raw_N` keeps
        if (known := self._read.get(key)) is not None:
            return known
        check_row(payload_B)
        if payload_B.numel() < _HEAD.size:
            raise WireError(f"{payload_B.numel()} bytes are too few for {self.name}")
        head = payload_B[: _HEAD.size].cpu().numpy().tobytes()
        magic, low, checksum = _HEAD.unpack(head)
        base = self.version - ((self.version - low) & 0xFFFFFFFF)
        if magic != _MAGIC or not self.version - self._part.slots < base <= self.version:
            raise WireError(f"a payload of {self.name} against version {base} of {self.version}")
        if base < 0 or checksum != self._checksum(base):
            raise WireError(f"a payload of {self.name} with another basis of version {base}")
        if payload_B.numel() != self._part.size(base % 2):
            wanted = self._part.size(base % 2)
            raise WireError(f"{payload_B.numel()} bytes of {self.name}, {wanted} are needed")
        scales, levels, raw_N = self._cut(payload_B, base % 2)
        units = [float(scale) for scale in scales.tolist()]
        if any(math.frexp(unit)[0] not in (0.0, 0.5) for unit in units if math.isfinite(unit)):
            raise WireError(f"a payload of {self.name} whose units are not powers of two")
        factors = [each.double().mul_(unit) for each, unit in zip(levels, units, strict=True)]
        made = PayloadContent(base, factors, raw_N)
        self._read[key] = made
        return made

    def _decode(
        self, found: PayloadContent, number: int, first: int, last: int, out: Tensor
    ) -> None:
        """Elements [first, last) of a matrix."""
        each, side = self._part.matrices[number], found.base % 2
        factor_rk, device = found.factors[number], out.device
        basis_rk = self._basis(found.base)[number].to(device)
        left_rm, right_rn = (basis_rk, factor_rk) if side else (factor_rk, basis_rk)
        room, done = torch.empty(0, dtype=torch.float64, device=device), 0
        for top, bottom, low, high in _boxes(first + each.lead, last + each.lead, each.cols):
            rows, cols = bottom - top, high - low
            if room.numel() < rows * cols:
                room = torch.empty(rows * cols, dtype=torch.float64, device=device)
            box = room[: rows * cols].view(rows, cols)
            # Exact: whole numbers of 16 bits each, and at most 64 of their products are added.
            torch.mm(left_rm[:, top:bottom].T, right_rn[:, low:high], out=box)
            out[done : done + rows * cols].view(rows, cols).copy_(box)
            done += rows * cols

    # -------------------------------------------------------------- parts

    def _cut(self, payload_B: Tensor, side: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """Units (fp32), per matrix the levels (int16, r by k), raw elements (bfloat16)."""
        part, begin = self._part, _HEAD.size
        end = begin + 4 * len(part.matrices)
        scales = payload_B[begin:end].view(torch.float32)
        lengths = [each.length(1 - side) for each in part.matrices]
        middle = end + 2 * part.rank * sum(lengths)
        levels = payload_B[end:middle].view(torch.int16)
        cuts = accumulate((part.rank * length for length in lengths), initial=0)
        cut = [levels[first:last] for first, last in pairwise(cuts)]
        raw = payload_B[middle:].view(torch.bfloat16)
        return scales, [each.view(part.rank, -1) for each in cut], raw

    def _basis(self, version: int) -> list[Tensor]:
        """Per matrix float64 (r, k)."""
        found = self._bases.get(version)
        if found is None:
            bases = self._part.bases(self._state_S, version)
            found = self._bases[version] = [each.double() for each in bases]
        return found

    def _checksum(self, version: int) -> int:
        view = self._part.slot(self._state_S, version).numpy()
        return xxhash.xxh3_64_intdigest(view.tobytes())


def _whole(x_N: Tensor, each: Matrix) -> Tensor:
    """The matrix (m, n), with zeros where a part of its first or last row is missing."""
    values = x_N[each.begin : each.begin + each.numel]
    if each.numel == each.rows * each.cols:
        return values.view(each.rows, each.cols)
    filled = torch.zeros(each.rows * each.cols, dtype=torch.float32, device="cpu")
    filled[each.lead : each.lead + each.numel].copy_(values)
    return filled.view(each.rows, each.cols)


def _factor(x_mn: Tensor, basis_rk: Tensor, side: int) -> Tensor:
    """The transpose of X Q (r, m), or of X^T L (r, n), in float64. X is rounded to whole numbers of
    a common unit, so small that every sum is exact."""
    (rows, cols), rank = x_mn.shape, len(basis_rk)
    out_rk = torch.zeros(rank, cols if side else rows, dtype=torch.float64, device="cpu")
    low, high = (float(value) for value in torch.aminmax(x_mn))
    peak = max(-low, high)
    if peak < _TINY:
        return out_rk
    if not peak < math.inf:
        return out_rk.fill_(math.nan)
    terms = (rows if side else cols) - 1
    bits = min(23, _EXACT_BITS - _BASIS_BITS - terms.bit_length())
    shift = bits - math.frexp(peak)[1]
    kernels = product_kernels() if rank <= _COMPILED_RANK_MAX else None
    if kernels is not None:
        product = kernels.left if side else kernels.right
        product(x_mn.contiguous().numpy(), basis_rk.numpy(), 2.0**shift, out_rk.numpy())
        return out_rk.mul_(2.0**-shift)
    strips = list(_strips(rows, cols))
    height = max(bottom - top for top, bottom in strips)
    rounds = torch.empty(height, cols, dtype=torch.float32, device="cpu")
    units = torch.empty(height, cols, dtype=torch.float64, device="cpu")
    for top, bottom in strips:
        part, unit = rounds[: bottom - top], units[: bottom - top]
        unit.copy_(torch.mul(x_mn[top:bottom], 2.0**shift, out=part).round_())
        if side:
            out_rk.addmm_(basis_rk[:, top:bottom], unit)
        else:
            out_rk[:, top:bottom] = torch.mm(unit, basis_rk.T).T
    return out_rk.mul_(2.0**-shift)


def _strips(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    numel = _SINGLE_NUMEL if torch.get_num_threads() == 1 else _STRIP_NUMEL
    step = max(1, numel // max(1, cols))
    return ((top, min(top + step, rows)) for top in range(0, rows, step))


def _boxes(first: int, last: int, cols: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements [first, last) of a matrix as boxes (rows from, to, columns from, to)."""
    row, low = divmod(first, cols)
    if low:
        high = min(cols, low + last - first)
        yield row, row + 1, low, high
        first, row = first + high - low, row + 1
    whole = (last - first) // cols
    for top, bottom in _strips(whole, cols):
        yield row + top, row + bottom, 0, cols
    if rest := last - first - whole * cols:
        yield row + whole, row + whole + 1, 0, rest


# ------------------------------------------------------------------ the basis


def orthonormal(values_rk: np.ndarray) -> np.ndarray:
    """r orthogonal rows of length 1 with the span of the given rows: Gram-Schmidt, twice. Float64,
    element by element; the sums have a fixed order."""
    rows_rk = values_rk.copy()
    for _ in range(2):
        for i in range(len(rows_rk)):
            length = np.sqrt(_total(rows_rk[i] * rows_rk[i]))
            if not length > 0:
                rows_rk[i], length = 0.0, 1.0
                rows_rk[i, i] = 1.0
            rows_rk[i] /= length
            rest = rows_rk[i + 1 :]
            rest -= _total(rest * rows_rk[i])[:, None] * rows_rk[i]
    return rows_rk


def _total(values: np.ndarray) -> np.ndarray:
    """Sums over the last dimension, as a tree of halves, because a library's order depends on the
    machine."""
    sums = values.copy()
    while (width := sums.shape[-1]) > 1:
        half = (width + 1) // 2
        sums[..., : width - half] += sums[..., half:]
        sums = sums[..., :half]
    return sums[..., 0]


def rounded(values_rk: np.ndarray) -> Tensor:
    """The values rounded to whole multiples, of at most 16 bits, of one unit; as fp32."""
    unit = 2.0 ** (_BASIS_BITS - math.frexp(float(np.abs(values_rk).max()))[1])
    return torch.from_numpy((np.rint(values_rk * unit) / unit).astype(np.float32))


def _mix(merged_rk: np.ndarray, noise_rk: np.ndarray) -> np.ndarray:
    """The merged factor, with enough random directions added that it has r of them."""
    peak = float(np.abs(merged_rk).max())
    if not 0 < peak < math.inf:
        return noise_rk
    return merged_rk / peak + _NOISE * noise_rk


def _noise(shape: Sequence[int], seed: tuple[int, ...]) -> np.ndarray:
    """Float64 from -1 to 1, from the raw bits of a generator whose stream is fixed."""
    rank, length = shape
    bits = np.random.PCG64(list(seed)).random_raw(rank * length) >> np.uint64(11)
    return (bits.astype(np.float64) * 2.0**-52 - 1.0).reshape(rank, length)
