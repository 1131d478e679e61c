"""One pass over the payloads of a merge: decode, mean, outer step, digest. Runs on workers.

Compiled, it is one call per thread that holds no lock of the interpreter (`mend.kernels`). A rule,
an outer optimizer or a codec that is not compiled, and the rest of a last row, go through torch,
block by block, so that a block stays in the cache from decoding to its digest. Bits do not depend
on the way, the size of a block or the number of threads: all is element-wise but for the digest,
which reads bytes in order, and a sum over rows, each of which has one order of its terms.

Legend: N elements of a vector, n elements of a block, r rows of ROW_NUMEL elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mend.codec import CODECS, Codec
from mend.consensus.records import NORM_MAX
from mend.engine.digest import DIGEST_BLOCK_BYTES, StateDigest
from mend.engine.sums import Weights
from mend.engine.vectors import PORTION_NUMEL, block_numel, blocks, sound
from mend.errors import Unmergeable
from mend.kernels import ROW_NUMEL, MergeKernel, merge_kernel
from mend.merge import Average, Made, Merge, Radial
from mend.outer import Nesterov, OuterOptimizer, Rates, Replace

DIGEST_NUMEL = DIGEST_BLOCK_BYTES // 4
ROWS_SAMPLED, SAMPLE_MAX = 256, 8
"""Rows whose products are enough for a cosine, and the greatest distance between two of them: the
sums of all rows would cost half a pass more."""
_NOTHING, _NO_ROWS = np.empty(0, np.float32), np.empty((3, 0), np.float64)


def kernel_for(rule: Merge, outer: OuterOptimizer, codec: object, numel: int) -> MergeKernel | None:
    """None where one of them is not mend's own or has no compiled form, and for a short vector:
    loading numba would take longer than it saves. The first call may take seconds."""
    ours = type(rule) in (Average, Made, Radial) and type(outer) in (Nesterov, Replace)
    plain = type(codec) is CODECS["float32"]
    name: str = "float32" if plain else getattr(codec, "compiled", "")
    return merge_kernel(name) if ours and name and numel >= PORTION_NUMEL else None


def decoding(
    codec: Codec, payloads: Sequence[Tensor], numel: int
) -> Callable[[int, int], list[Tensor]]:
    """A function that decodes elements [start, stop) of all payloads, at most `numel`, into memory
    that the next call uses again."""
    rooms = [torch.empty(numel, dtype=torch.float32, device="cpu") for _ in payloads]

    def decode(start: int, stop: int) -> list[Tensor]:
        return [
            codec.decode(payload, start, stop, room[: stop - start])
            for payload, room in zip(payloads, rooms, strict=True)
        ]

    return decode


def _stretches(
    runs: Sequence[tuple[int, Weights]], begin: int, end: int
) -> Iterator[tuple[int, int, Weights]]:
    """[begin, end) with its weights, cut where they change."""
    start = 0
    for stop, weights in runs:
        if max(start, begin) < min(stop, end):
            yield max(start, begin), min(stop, end), weights
        start = stop


def product_of(x_rk: Tensor, y_rk: Tensor) -> Tensor:
    """Of each row the sum of x times y, fp64 (r,), as a tree of halves. A product of two fp32
    numbers is exact in fp64."""
    product_rk, width = x_rk.double().mul_(y_rk), ROW_NUMEL
    while width > 1:
        width //= 2
        product_rk[:, :width].add_(product_rk[:, width : 2 * width])
    return product_rk[:, 0]


def _rows_of(x_n: Tensor, first: int, every: int) -> Tensor:
    """Every `every`th row from `first` on, (r, ROW_NUMEL); a last row that is shorter is filled up
    with zeros."""
    if rest := -x_n.numel() % ROW_NUMEL:
        x_n = torch.nn.functional.pad(x_n, (0, rest))
    return x_n.view(-1, ROW_NUMEL)[first::every]


@dataclass(frozen=True, slots=True, eq=False)
class MergePass:
    """`runs`: (end, weights) of stretches with weights of their own. `anchor_N` and `out_N`: the
    anchor and the next one; their states are `states_N` and `states_out_N`."""

    rule: Merge
    outer: OuterOptimizer
    codec: Codec
    payloads: Sequence[Tensor]
    runs: Sequence[tuple[int, Weights]]
    rates: Rates
    anchor_N: Tensor
    out_N: Tensor
    states_N: Sequence[Tensor] = ()
    states_out_N: Sequence[Tensor] = ()
    every: int = field(init=False)
    """Distance of the rows that count for the products, where the rates ask for them; 0: none."""
    products_3r: np.ndarray = field(init=False)
    """Of each of these rows the product of the merged delta and the first state, and their
    squares."""

    def __post_init__(self) -> None:
        asked = self.rates.against is not None and self.states_N
        rows = -(-self.out_N.numel() // ROW_NUMEL)
        every = min(max(1, rows // ROWS_SAMPLED), SAMPLE_MAX) if asked else 0
        products_3r = np.zeros((3, -(-rows // every))) if every else _NO_ROWS
        object.__setattr__(self, "every", every)
        object.__setattr__(self, "products_3r", products_3r)

    @property
    def points_against(self) -> bool:
        """Whether the merged delta points against the first state, when all has been run. Sums over
        the sampled rows are rounded once, in any order; then come a few products of doubles."""
        along, of_delta, of_state = (math.fsum(each_r) for each_r in self.products_3r)
        limit = self.rates.limit
        return along < 0 and along * along > limit * limit * (of_delta * of_state)

    def run(
        self, begin: int, end: int, digest: StateDigest | None, block: int | None = None
    ) -> None:
        """Write elements [begin, end), where `begin` ends a block of the digest, and feed them to
        `digest`. `block`: elements of one call of torch, which then does all. Raises Unmergeable
        when an element is no number below NORM_MAX."""
        kernel = kernel_for(self.rule, self.outer, self.codec, self.out_N.numel())
        start = begin
        if kernel is not None and block is None and self._fit():
            start = end - (end - begin) % ROW_NUMEL
            if begin < start:
                self._compiled(kernel, begin, start, digest)
        if start < end:
            self._by_torch(start, end, digest, block or block_numel())

    def _fit(self) -> bool:
        """Whether the kernel can read the payloads. It cannot read a closing one of another
        codec."""
        size, plain = self.codec.payload_bytes(self.out_N.numel()), self.codec.name == "float32"
        return all(
            each.numel() == size and each.is_contiguous() and not (plain and each.data_ptr() % 4)
            for each in self.payloads
        )

    def _compiled(
        self, kernel: MergeKernel, begin: int, end: int, digest: StateDigest | None
    ) -> None:
        wanted = (end - begin) // DIGEST_NUMEL if digest is not None else 0
        lanes = np.empty((2, wanted, 8), np.uint64)
        replaces = type(self.outer) is Replace
        anchor = _NOTHING if replaces else self.anchor_N[begin:end].numpy()
        before, after = (
            states[0][begin:end].numpy() if states else _NOTHING
            for states in (self.states_N, self.states_out_N)
        )
        rates = self.rates
        norm = kernel(
            np.array([each.data_ptr() for each in self.payloads], np.uint64), begin,
            np.array([stop for stop, _ in self.runs], np.int64),
            np.array([weights for _, weights in self.runs], np.float64),
            anchor, before, rates.decay, rates.share, rates.stretch, rates.momentum, rates.lr,
            NORM_MAX, self.out_N[begin:end].numpy(), after, lanes,
            self.products_3r, self.every,
        )  # fmt: skip
        if not norm < NORM_MAX:
            raise Unmergeable("", ())
        if digest is not None:
            digest.take(
                lanes, self.out_N[begin:end], [each[begin:end] for each in self.states_out_N]
            )

    def _by_torch(self, begin: int, end: int, digest: StateDigest | None, size: int) -> None:
        size = max(size // ROW_NUMEL, 1) * ROW_NUMEL
        delta_n = torch.empty(min(size, end - begin), dtype=torch.float32, device="cpu")
        decode = decoding(self.codec, self.payloads, delta_n.numel())
        for low, high in blocks(end - begin, size):
            start, stop = begin + low, begin + high
            merged, values = delta_n[: stop - start], self.out_N[start:stop]
            before, after = (
                [state[start:stop] for state in states]
                for states in (self.states_N, self.states_out_N)
            )
            for first, last, weights in _stretches(self.runs, start, stop):
                self.rule.block(decode(first, last), weights, merged[first - start : last - start])
            if self.every:
                self._multiply(start, merged, before[0])
            base = self.anchor_N[start:stop]
            self.outer.block(base, before, merged, values, after, self.rates)
            # NaN and Inf survive every product and sum, so checking the result checks all inputs.
            if not sound(values):
                raise Unmergeable("", ())
            if digest is not None:
                digest.feed(values, after)

    def _multiply(self, start: int, delta_n: Tensor, state_n: Tensor) -> None:
        """Write the products of the sampled rows in a block that begins at element `start`."""
        row = start // ROW_NUMEL
        first = -row % self.every
        delta_rk, state_rk = (_rows_of(each, first, self.every) for each in (delta_n, state_n))
        begin = (row + first) // self.every
        pairs = (delta_rk, state_rk), (delta_rk, delta_rk), (state_rk, state_rk)
        self.products_3r[:, begin : begin + len(delta_rk)] = [
            product_of(*pair).numpy() for pair in pairs
        ]
