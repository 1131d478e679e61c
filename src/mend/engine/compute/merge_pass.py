"""One pass over the payloads of a merge: decode, mean, outer step, digest. Runs on workers.

Compiled, it is one call per thread that holds no lock of the interpreter (`mend.kernels`). A rule,
an outer optimizer or a codec that is not compiled, and the rest of a last row, go through torch,
block by block, so that a block stays in the cache from decoding to its digest. Bits do not depend
on the way, the size of a block or the number of threads: all is element-wise but for the digest,
which reads bytes in order.

Legend: N elements of a vector, n elements of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mend.codec import CODECS, Codec
from mend.consensus.records import NORM_MAX
from mend.engine.compute.digest import DIGEST_BLOCK_BYTES, StateDigest
from mend.engine.compute.sums import Weights
from mend.engine.compute.vectors import PORTION_NUMEL, block_numel, blocks, sound
from mend.errors import Unmergeable
from mend.kernels import ROW_NUMEL, MergeKernel, merge_kernel
from mend.merge import Average, Made, Merge, Radial
from mend.outer import Nesterov, OuterOptimizer, Rates, Replace

DIGEST_NUMEL = DIGEST_BLOCK_BYTES // 4
_NOTHING = np.empty(0, np.float32)


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
    runs: Sequence[tuple[int, Weights]], begin: int, end: int, size: int
) -> Iterator[tuple[int, int, Weights]]:
    """Blocks of [begin, end) with their weights, cut where the weights change."""
    start = 0
    for stop, weights in runs:
        first, last = max(start, begin), min(stop, end)
        for low, high in blocks(last - first, size):
            yield first + low, first + high, weights
        start = stop


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

    def run(self, begin: int, end: int, digest: StateDigest | None) -> None:
        """Write elements [begin, end), where `begin` ends a block of the digest, and feed them to
        `digest`. Raises Unmergeable when an element is NaN or not below NORM_MAX."""
        kernel = kernel_for(self.rule, self.outer, self.codec, self.out_N.numel())
        start = begin
        if kernel is not None and self._fit():
            start = end - (end - begin) % ROW_NUMEL
            if begin < start:
                self._compiled(kernel, begin, start, digest)
        if start < end:
            self._by_torch(start, end, digest, block_numel())

    def _fit(self) -> bool:
        """Whether the kernel can read the payloads, but for a closing one of another codec, and
        take the step: in place of `Replace` it copies what was merged."""
        if type(self.outer) is Replace and self.rates.lr != 1.0:
            return False
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
        )  # fmt: skip
        if not norm < NORM_MAX:
            raise Unmergeable("", ())
        if digest is not None:
            digest.take(
                lanes, self.out_N[begin:end], [each[begin:end] for each in self.states_out_N]
            )

    def _by_torch(self, begin: int, end: int, digest: StateDigest | None, size: int) -> None:
        delta_n = torch.empty(min(size, end - begin), dtype=torch.float32, device="cpu")
        decode = decoding(self.codec, self.payloads, delta_n.numel())
        for start, stop, weights in _stretches(self.runs, begin, end, size):
            merged, values = delta_n[: stop - start], self.out_N[start:stop]
            before, after = (
                [state[start:stop] for state in states]
                for states in (self.states_N, self.states_out_N)
            )
            self.rule.block(decode(start, stop), weights, merged)
            base = self.anchor_N[start:stop]
            self.outer.block(base, before, merged, values, after, self.rates)
            # NaN and Inf survive every product and sum, so checking the result checks all inputs.
            if not sound(values):
                raise Unmergeable("", ())
            if digest is not None:
                digest.feed(values, after)
