"""Base of the codecs that encode a fixed number of elements to a fixed number of bytes. Runs on
workers. Touches tensors; never peers, clocks, files.

A block is self-contained: its bytes follow those of the block before, and the last one is filled
up with zeros. So the bytes of a payload do not depend on where the work is cut.

Legend: N elements of a vector, B payload bytes, b blocks of a strip, k elements of a block, c bytes
of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mend.codec.base import Feedback, check_row
from mend.errors import WireError
from mend.kernels import BlockKernels, block_kernels

_STRIP_NUMEL, _SINGLE_NUMEL = 1 << 15, 1 << 17
"""Elements per torch call. The former is the grain of torch's CPU loops: a call of that size never
starts other threads. Where torch has one thread anyway, a strip is larger, and with its scratch
memory still in the cache."""

TINY = 2.0**-100
"""Magnitudes below this are sent as zero (they stay in the residual), so that no scale and no
decoded number is ever subnormal: whether those are kept depends on the state of a thread."""


def strip_numel() -> int:
    """Limit of the elements per torch call, so that it stays in this thread."""
    return _SINGLE_NUMEL if torch.get_num_threads() == 1 else _STRIP_NUMEL


class BlockCodec(ABC):
    """A lossy codec of `block` elements to `block_bytes` bytes. A new one sets the three names and
    writes `encode_blocks` and `decode_blocks`."""

    name: str
    exact = False
    feedback: Feedback = "buffer"
    block: int
    block_bytes: int

    compiled = ""
    """The name of its compiled form in mend.kernels, which gives equal bits; empty: there is
    none."""

    def kernels(self) -> BlockKernels | None:
        """Compiled forms of the two below, for vectors on the CPU; None: there are none. The first
        call may take seconds."""
        return block_kernels(self.compiled) if self.compiled else None

    @abstractmethod
    def encode_blocks(self, x_bk: Tensor, rows_bc: Tensor) -> None:
        """fp32 (b, k), contiguous -> uint8 (b, c), contiguous, written in place."""

    @abstractmethod
    def decode_blocks(self, rows_bc: Tensor, out_bk: Tensor) -> None:
        """uint8 (b, c), contiguous -> fp32 (b, k), contiguous, written in place."""

    def payload_bytes(self, numel: int) -> int:
        return -(-numel // self.block) * self.block_bytes

    def encode(self, x_N: Tensor) -> Tensor:
        numel = x_N.numel()
        payload_B = torch.empty(self.payload_bytes(numel), dtype=torch.uint8, device="cpu")
        rows, whole = payload_B.view(-1, self.block_bytes), numel // self.block
        if whole:
            x_bk = x_N[: whole * self.block].contiguous().view(-1, self.block)
            if (kernels := self.kernels()) is not None:
                kernels.encode(x_bk.numpy(), rows[:whole].numpy())
            else:
                for first, last in self._strips(whole):
                    self.encode_blocks(x_bk[first:last], rows[first:last])
        if numel > whole * self.block:
            last_k = torch.zeros(1, self.block, dtype=torch.float32, device="cpu")
            last_k[0, : numel - whole * self.block].copy_(x_N[whole * self.block :])
            self.encode_blocks(last_k, rows[whole:])
        return payload_B

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        rows = self._rows(payload_B, start, stop)
        first, last = -(-start // self.block), stop // self.block
        if first > last:  # within one block
            return out.copy_(self._part(rows[last], start - last * self.block, stop - start))
        begin, end = first * self.block - start, last * self.block - start
        if begin:
            out[:begin].copy_(self._part(rows[first - 1], self.block - begin, begin))
        whole_bk = out[begin:end].view(-1, self.block)
        if out.device.type != "cpu":
            self.decode_blocks(rows[first:last], whole_bk)
        elif (kernels := self.kernels()) is not None:
            kernels.decode(rows[first:last].numpy(), whole_bk.numpy())
        else:
            for low, high in self._strips(last - first):
                self.decode_blocks(rows[first + low : first + high], whole_bk[low:high])
        if stop - start > end:
            out[end:].copy_(self._part(rows[last], 0, stop - start - end))
        return out

    def _part(self, row_c: Tensor, offset: int, numel: int) -> Tensor:
        """Elements of one block."""
        whole_k = torch.empty(1, self.block, device=row_c.device, dtype=torch.float32)
        self.decode_blocks(row_c[None], whole_k)
        return whole_k[0, offset : offset + numel]

    def _strips(self, blocks: int) -> list[tuple[int, int]]:
        step = max(1, strip_numel() // self.block)
        return [(first, min(first + step, blocks)) for first in range(0, blocks, step)]

    def _rows(self, payload_B: Tensor, start: int, stop: int) -> Tensor:
        check_row(payload_B)
        blocks, rest = divmod(payload_B.numel(), self.block_bytes)
        if rest or not 0 <= start <= stop <= blocks * self.block:
            raise WireError(
                f"elements [{start}, {stop}) are not in {payload_B.numel()} bytes of {self.name}, "
                f"{self.block_bytes} for each {self.block} elements"
            )
        return payload_B.view(-1, self.block_bytes)


def peaks(x_bk: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitudes, and the greatest of each block (b, 1), which is 0 if it is below TINY."""
    size_bk = x_bk.abs()
    peak_b1 = size_bk.amax(1, keepdim=True)
    return size_bk, torch.where(peak_b1 < TINY, 0.0, peak_b1)


def over(numerator: float, peak_b1: Tensor) -> Tensor:
    """numerator / peak; 0 if the peak is 0."""
    return torch.where(peak_b1 == 0, 0.0, numerator / peak_b1)


def put_scales(scale_b1: Tensor, rows_bc: Tensor) -> None:
    """Write the fp32 scales into the first four bytes of each block."""
    rows_bc[:, :4].copy_(scale_b1.contiguous().view(torch.uint8))


def get_scales(rows_bc: Tensor) -> Tensor:
    """Read the fp32 scales (b, 1)."""
    return rows_bc[:, :4].contiguous().view(torch.float32)
