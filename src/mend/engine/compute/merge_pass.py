"""One pass over the payloads of a merge: decode, mean, outer step, digest. Runs on workers.

Where the rule, the outer optimizer and the codec have a compiled form, each thread makes one call
that does not hold the interpreter's lock (`mend.kernels`). Everything else, and the rest of a last
row, goes through torch, block by block, so that a block stays in the cache from decoding to its
digest. The bits depend neither on this choice nor on the size of a block nor on the number of
threads: all operations are element-wise, except the digest, which reads the bytes in order.

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
    name = decoder_name(codec)
    return merge_kernel(name) if ours and name and numel >= PORTION_NUMEL else None


def decoder_name(codec: object) -> str:
    """The name by which mend.kernels decodes this codec; empty: it is not compiled."""
    plain = type(codec) is CODECS["float32"]
    return "float32" if plain else getattr(codec, "compiled", "")


def is_readable(codec: Codec, payload_B: Tensor, numel: int) -> bool:
    """Whether a kernel can read the payload. It cannot read a closing one of another codec."""
    aligned = codec.name != "float32" or payload_B.data_ptr() % 4 == 0
    return payload_B.numel() == codec.payload_bytes(numel) and payload_B.is_contiguous() and aligned


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
        """Write elements [begin, end), where `begin` is a border of digest blocks, and feed them to
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
        """Whether the kernel can take the step (for `Replace` it only copies what was merged) and
        read the payloads."""
        if type(self.outer) is Replace and self.rates.lr != 1.0:
            return False
        return all(is_readable(self.codec, each, self.out_N.numel()) for each in self.payloads)

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
