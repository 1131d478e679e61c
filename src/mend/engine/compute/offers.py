"""Makes offers: the delta, its check, the payload and the error of the codec. Runs on workers.

A vector is cut into portions, which threads share. Compiled codecs do all steps of a portion in one
pass (`mend.kernels`), row by row. Other codecs, and the rest of a last row, go through torch, with
one pass per step. The bits do not depend on the number of threads or on the way: all operations are
element-wise, except the sums of squares, which are computed per row and added exactly.

Legend: N elements of a rank's part of a fragment, n elements of a block, r rows of k = ROW_NUMEL
elements, B payload bytes.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import xxhash
from torch import Tensor

from mend.codec import CODECS, BlockCodec, Codec, LayoutCodec
from mend.consensus.records import NORM_MAX
from mend.engine.compute.buffers import Buffers
from mend.engine.compute.digest import DIGEST_BLOCK_BYTES, bytes_of, digest_of_state
from mend.engine.compute.vectors import PORTION_NUMEL, block_numel, blocks, first_unsound, magnitude
from mend.engine.compute.worker_pool import WorkerPool
from mend.errors import NonFinite, ensure, require
from mend.kernels import (
    ROW_NUMEL,
    DeltaKernel,
    OfferKernel,
    delta_kernel,
    offer_kernel,
    squares_kernel,
)
from mend.transport.growth import Growth

Read = Callable[[int, int], None]
"""Copies elements [begin, end) of the model into the snapshot."""

DELTA_NUMEL_MIN = PORTION_NUMEL
"""Shorter vectors of codecs that are not compiled use torch only."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedOffer:
    """An offer's payload (uint8 B), its xxh3_128, and the greatest magnitude `norm` of the encoded
    vector. `pend` (fp32 N): the residual once a commit names the offer. For a lossy codec also the
    lengths of the error (`unsent`) and of the whole vector (`length`). With feedback in the weights
    there is no residual: `sent` (fp32 N) is the decoded payload, if it differs from the delta."""

    payload: Tensor
    checksum: str
    pend: Tensor | None
    sent: Tensor | None = None
    norm: float = 0.0
    unsent: float = 0.0
    length: float = 0.0


CALLS_MAX = 16
"""Most calls of a kernel for one offer, if that leaves every part of the payload at least
DIGEST_BLOCK_BYTES long."""


def compile_kernels(codec: Codec | LayoutCodec, numel: int, *, offers: bool) -> None:
    """Compile the kernels for merges of `numel` elements, and with `offers` those for offers."""
    if isinstance(codec, BlockCodec):
        codec.kernels()
    if not offers:
        return
    if (name := _compiled(codec)) and numel >= ROW_NUMEL:
        offer_kernel(name)
    if _delta_kernel(numel) is not None and not codec.exact:
        squares_kernel()


def make_offer(
    codec: Codec,
    delta_N: Tensor,
    residual_N: Tensor | None,
    anchor_N: Tensor | None,
    in_weights: bool,
    buffers: Buffers,
    pool: WorkerPool,
    read: Read | None = None,
    grows: Callable[[Tensor], Growth] | None = None,
) -> EncodedOffer:
    """See Numerics.encode."""
    numel, block = delta_N.numel(), max(1, codec.block)
    x_N = delta_N if residual_N is None else buffers.empty(numel)
    # x may be overwritten unless it is the delta itself.
    own_x = x_N is not delta_N
    ensure(not (own_x and in_weights), "a residual, although what was left out is in the weights")
    left_N = None if codec.exact else x_N if own_x else buffers.empty(numel)
    portion = max(1, PORTION_NUMEL // block) * block
    wide = 1 if read else _portions_at_once(codec, numel, portion, pool.threads)
    parts = list(blocks(numel, wide * portion))
    payload_B = None
    if codec.block:  # each part can be encoded on its own, while it is in the cache
        payload_B = buffers.empty(codec.payload_bytes(numel), torch.uint8)
    offer = _Offer(codec, delta_N, residual_N, anchor_N, x_N, left_N, in_weights)
    norms, squares = [0.0] * len(parts), [[(0.0, 0.0)]] * max(1, len(parts))

    def fill(position: int) -> None:
        begin, end = parts[position]
        if payload_B is None:
            norms[position] = offer.fill(begin, end)
        else:
            norms[position], squares_r2 = offer.encode(payload_B, begin, end)
            squares[position] = _sums(squares_r2, portion)

    hashing = _hashing(codec, payload_B, x_N, parts)
    growth = _growth(hashing, grows)

    def work(position: int) -> None:
        if read is not None:
            read(*parts[position])
        fill(position)
        if hashing is not None:
            hashing.filled(position, growth.reach)

    compiled = bool(_compiled(codec)) or _delta_kernel(numel) is not None
    with growth:
        pool.each([partial(work, position) for position in range(len(parts))], compiled=compiled)
    if payload_B is None:
        encoded_B = payload_B = codec.encode(x_N)

        def compare(position: int) -> None:
            begin, end = parts[position]
            squares[position] = _sums(offer.compare(encoded_B, begin, end, begin), portion)

        pool.each([partial(compare, position) for position in range(len(parts))])
    norm = max(norms, default=0.0)
    pend_N, sent_N = (None, left_N) if in_weights else (left_N, None)
    checksum = hashing.hexdigest() if hashing is not None else digest_of_state(payload_B)
    return EncodedOffer(payload_B, checksum, pend_N, sent_N, norm, *_lengths(squares))


class _Hashing:
    """The checksum of a payload whose parts are filled by several threads. The thread that closes a
    gap hashes what is contiguous by then, while it is in the cache and the others fill: at least
    DIGEST_BLOCK_BYTES, as each call takes the interpreter's lock. `ends`: ends of the parts, in
    elements of `data`."""

    def __init__(self, data: Tensor, ends: Sequence[int]) -> None:
        self.data, self._ends, self._filled = data, ends, [False] * len(ends)
        self._hash, self._next, self._hashed, self._busy = xxhash.xxh3_128(), 0, 0, False
        self._lock = threading.Lock()

    def filled(self, position: int, reach: Callable[[int], None] = lambda end: None) -> None:
        """A part is filled. `reach` gets the number of bytes that are hashed."""
        with self._lock:
            self._filled[position] = True
            if self._busy:
                return  # that thread will find this part too
            self._busy = True
        while True:
            with self._lock:
                while self._next < len(self._ends) and self._filled[self._next]:
                    self._next += 1
                end = self._ends[self._next - 1] if self._next else 0
                ready = self.data[self._hashed : end]
                last = self._next == len(self._ends)
                if not ready.numel() or (ready.nbytes < DIGEST_BLOCK_BYTES and not last):
                    self._busy = False
                    return
            self._hash.update(bytes_of(ready))
            self._hashed = end
            reach(end * self.data.element_size())

    def hexdigest(self) -> str:
        whole = self.data.numel()
        ensure(self._hashed == whole, "parts are missing", hashed=self._hashed, whole=whole)
        return self._hash.hexdigest()


def _hashing(
    codec: Codec, payload_B: Tensor | None, x_N: Tensor, parts: Sequence[tuple[int, int]]
) -> _Hashing | None:
    """None where the bytes of a part are not known before all of it is encoded."""
    if payload_B is not None:
        return _Hashing(payload_B, [codec.payload_bytes(end) for _, end in parts])
    if type(codec) is CODECS["float32"] and x_N.is_contiguous():  # the payload is x
        return _Hashing(x_N, [end for _, end in parts])
    return None


def _growth(hashing: _Hashing | None, grows: Callable[[Tensor], Growth] | None) -> Growth:
    """The growth to report to while the payload is made; one that nobody reads where the payload is
    not made from front to back, or not served meanwhile."""
    if grows is None or hashing is None:
        return Growth()
    return grows(hashing.data.view(torch.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """Vectors of an offer. x = delta + residual, in `x_N`, which is `delta_N` without a residual.
    With an anchor `delta_N` is a snapshot, and becomes anchor - snapshot. `left_N` takes x -
    decode(payload), or with `in_weights` decode(payload); it may be `x_N`. None: the codec is
    exact."""

    codec: Codec
    delta_N: Tensor
    residual_N: Tensor | None
    anchor_N: Tensor | None
    x_N: Tensor
    left_N: Tensor | None
    in_weights: bool

    def fill(self, begin: int, end: int) -> float:
        """Compute elements [begin, end) of the delta and of x. Returns the greatest magnitude of x,
        which must be below NORM_MAX."""
        kernel, norm = _delta_kernel(self.x_N.numel()), 0.0
        whole = begin if kernel is None else end - (end - begin) % ROW_NUMEL
        if kernel is not None and whole > begin:
            norm = kernel(*self._vectors(begin, whole), NORM_MAX)
            self._check(norm, begin, whole)
        for first, last in blocks(end - whole, block_numel()):
            start, stop = whole + first, whole + last
            delta_n, x_n = self.delta_N[start:stop], self.x_N[start:stop]
            if self.anchor_N is not None:
                torch.sub(self.anchor_N[start:stop], delta_n, out=delta_n)
            if self.residual_N is not None:
                torch.add(delta_n, self.residual_N[start:stop], out=x_n)
            block_norm = magnitude(x_n)
            self._check(block_norm, start, stop)
            norm = max(norm, block_norm)
        return norm

    def encode(self, payload_B: Tensor, begin: int, end: int) -> tuple[float, np.ndarray]:
        """Encode elements [begin, end), cut at blocks of the codec, from the snapshot to their part
        of the payload. Returns the greatest magnitude of x, and the squares of `compare`."""
        norm, squares_r2 = self._whole_rows(payload_B, begin, end)
        whole = begin + len(squares_r2) * ROW_NUMEL
        if whole < end:
            norm = max(norm, self.fill(whole, end))
            part_B = self._part(payload_B, whole, end)
            part_B.copy_(self.codec.encode(self.x_N[whole:end]))
            squares_r2 = np.concatenate([squares_r2, self.compare(part_B, whole, end)])
        return norm, squares_r2

    def _whole_rows(self, payload_B: Tensor, begin: int, end: int) -> tuple[float, np.ndarray]:
        """Encode whole rows, if the codec is compiled. Returns their greatest magnitude and their
        squares."""
        rows = (end - begin) // ROW_NUMEL
        kernel = _kernel(self.codec) if rows else None
        if kernel is None or self.left_N is None:
            return 0.0, np.empty((0, 2), np.float32)
        squares_r2, end = np.empty((rows, 2), np.float32), begin + rows * ROW_NUMEL
        payload_rc = self._part(payload_B, begin, end).view(rows, -1).numpy()
        left_rk, vectors = _rows(self.left_N[begin:end]), self._vectors(begin, end)
        norm = kernel(*vectors, NORM_MAX, payload_rc, left_rk, self.in_weights, squares_r2)
        self._check(norm, begin, end)
        return norm, squares_r2

    def compare(self, payload_B: Tensor, begin: int, end: int, skip: int = 0) -> np.ndarray:
        """Write `left_N` of the elements [begin, end), in the payload after `skip` others. Returns
        per row the squares of the error and of x, fp32 (r, 2), for reports."""
        if self.left_N is None:
            return np.empty((0, 2), np.float32)
        own = payload_B.data_ptr() != self.x_N.data_ptr() or not self.x_N.numel()
        ensure(own, "only an exact payload may be x itself", codec=self.codec.name)
        size, compiled = block_numel(), self.x_N.numel() >= DELTA_NUMEL_MIN
        scratch_n = torch.empty(min(size, end - begin), dtype=torch.float32, device="cpu")
        squares = [np.empty((0, 2), np.float32)]
        for start, stop in blocks(end - begin, size):
            room_n = scratch_n[: stop - start]
            sent_n = self.codec.decode(payload_B, skip + start, skip + stop, room_n)
            x_n = self.x_N[begin + start : begin + stop]
            length_r = _squares(x_n, compiled)
            left_n = torch.sub(x_n, sent_n, out=self.left_N[begin + start : begin + stop])
            unsent_r = _squares(left_n, compiled)
            if not np.isfinite(unsent_r).all() and not magnitude(left_n) < NORM_MAX:
                _refuse(left_n, begin + start, f"the delta rounded to {self.codec.name}")
            squares.append(np.stack([unsent_r, length_r], 1))
            if self.in_weights:
                left_n.copy_(sent_n)
        return np.concatenate(squares)

    def _check(self, norm: float, begin: int, end: int) -> None:
        if not norm < NORM_MAX:
            _refuse(self.x_N[begin:end], begin, "the delta")

    def _part(self, payload_B: Tensor, begin: int, end: int) -> Tensor:
        first = self.codec.payload_bytes(begin)
        return payload_B[first : first + self.codec.payload_bytes(end - begin)]

    def _vectors(
        self, begin: int, end: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The first four arguments of a kernel: whole rows."""
        vectors = (self.delta_N, self.residual_N, self.anchor_N, self.x_N)
        delta, residual, anchor, x = (_rows(None if v is None else v[begin:end]) for v in vectors)
        return delta, residual, anchor, x


def _rows(x_n: Tensor | None) -> np.ndarray:
    """A view as fp32 (r, ROW_NUMEL); None: no row."""
    return np.empty((0, ROW_NUMEL), np.float32) if x_n is None else x_n.view(-1, ROW_NUMEL).numpy()


def _squares(x_n: Tensor, compiled: bool) -> np.ndarray:
    """The sum of the squares of each row, as a tree of halves. The last row is padded with
    zeros."""
    sums_r = np.empty(-(-x_n.numel() // ROW_NUMEL), np.float32)
    whole = x_n.numel() // ROW_NUMEL if compiled else 0
    kernel = squares_kernel() if whole else None
    if kernel is None:
        whole = 0
    else:
        kernel(_rows(x_n[: whole * ROW_NUMEL]), sums_r[:whole])
    rest_n = x_n[whole * ROW_NUMEL :]
    for start, stop in blocks(rest_n.numel(), block_numel()):
        rows = -(-(stop - start) // ROW_NUMEL)
        square_rk = torch.zeros(rows, ROW_NUMEL, dtype=torch.float32, device="cpu")
        torch.mul(rest_n[start:stop], rest_n[start:stop], out=square_rk.view(-1)[: stop - start])
        width = ROW_NUMEL
        while width > 1:
            width //= 2
            square_rk[:, :width].add_(square_rk[:, width : 2 * width])
        first = whole + start // ROW_NUMEL
        sums_r[first : first + rows] = square_rk[:, 0].numpy()
    return sums_r


def _sums(squares_r2: np.ndarray, portion: int) -> list[tuple[float, float]]:
    """The sums of both columns, per portion of so many elements: exact, then rounded once.

    math.fsum holds the interpreter's lock for every element. But all of them are multiples of the
    last place of the least one, and a sum below 2^53 of these is exact in any order."""
    if not len(squares_r2):
        return [(0.0, 0.0)]
    rows = -(-portion // ROW_NUMEL)
    starts = np.arange(0, len(squares_r2), rows)
    sums_p2 = np.add.reduceat(squares_r2, starts, dtype=np.float64)
    positive_r2 = np.where(squares_r2 > 0, squares_r2, np.float32(np.inf))
    least_p2 = np.minimum.reduceat(positive_r2, starts).astype(np.float64)
    for p, column in np.argwhere(~(sums_p2 <= 2.0**29 * least_p2)):
        start = starts[p]
        sums_p2[p, column] = math.fsum(squares_r2[start : start + rows, column].tolist())
    return [(unsent, length) for unsent, length in sums_p2.tolist()]


def _lengths(squares: Sequence[list[tuple[float, float]]]) -> tuple[float, float]:
    """Of the error and of the whole vector, from the `_sums` of all parts."""
    unsent, length = zip(*itertools.chain(*squares), strict=True)
    return math.sqrt(math.fsum(unsent)), math.sqrt(math.fsum(length))


def _portions_at_once(codec: Codec, numel: int, portion: int, threads: int) -> int:
    """Portions that one call of a compiled kernel encodes. Few calls: each takes the interpreter's
    lock away from the training thread. Not too few: the payload is hashed and served call by call.
    So a call makes DIGEST_BLOCK_BYTES of payload, or a CALLS_MAX-th of it where that would take
    more than CALLS_MAX calls; and each thread gets at least two calls."""
    if portion % ROW_NUMEL or numel < 2 * portion:
        return 1
    plain = type(codec) is CODECS["float32"]
    if (_delta_kernel(numel) if plain else _kernel(codec)) is None:
        return 1
    most = numel // portion // (2 * threads)
    by_block = DIGEST_BLOCK_BYTES // codec.payload_bytes(portion)
    return max(1, min(most, max(by_block, math.ceil(numel / portion / CALLS_MAX))))


def _compiled(codec: Codec | LayoutCodec) -> str:
    """The codec's name in mend.kernels; empty: it is not compiled."""
    return getattr(codec, "compiled", "")


def _delta_kernel(numel: int) -> DeltaKernel | None:
    """None for a short vector: loading numba would take longer than it saves."""
    return delta_kernel() if numel >= DELTA_NUMEL_MIN else None


def _kernel(codec: Codec) -> OfferKernel | None:
    name = _compiled(codec)
    return offer_kernel(name) if name else None


def _refuse(block_n: Tensor, start: int, what: str) -> None:
    first = require(first_unsound(block_n), f"{what} is sound")
    raise NonFinite(
        f"element {start + first} of {what} is {block_n[first].item()}: it is not offered. "
        "Look for a loss that is NaN or a learning rate that is too high."
    )
