"""Whole numbers times one scale per block. Runs on workers. Touches tensors; never peers, clocks,
files.

A block of 128 elements is its scale (fp32), then its levels. The scale is the greatest magnitude
over the highest level, so the error of an element is at most half a scale.

Legend: b blocks, k = 128 elements of a block, c bytes of a block.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from mend.codec.blocks import BlockCodec, get_scales, over, peaks, put_scales


@final
class Int8(BlockCodec):
    """Levels -127 to 127, a byte each: 8.25 bit per element."""

    name, block, block_bytes = "int8", 128, 4 + 128
    compiled = name

    def encode_blocks(self, x_bk: Tensor, rows_bc: Tensor) -> None:
        level_bk, peak_b1 = peaks(x_bk)
        put_scales(peak_b1 / 127, rows_bc)
        torch.mul(x_bk, over(127, peak_b1), out=level_bk)
        rows_bc[:, 4:].view(torch.int8).copy_(level_bk.round_())

    def decode_blocks(self, rows_bc: Tensor, out_bk: Tensor) -> None:
        out_bk.copy_(rows_bc[:, 4:].view(torch.int8)).mul_(get_scales(rows_bc))


@final
class Int4(BlockCodec):
    """Levels -7 to 7, two to a byte: 4.25 bit per element. The first half of a block lies in the
    low four bits (level + 8), the second half in the high ones (two's complement)."""

    name, block, block_bytes = "int4", 128, 4 + 64
    compiled = name

    def encode_blocks(self, x_bk: Tensor, rows_bc: Tensor) -> None:
        level_bk, peak_b1 = peaks(x_bk)
        put_scales(peak_b1 / 7, rows_bc)
        torch.mul(x_bk, over(7, peak_b1), out=level_bk).round_()
        low, high = level_bk[:, :64], level_bk[:, 64:]
        high.mul_(16).add_(low).add_(8)  # whole numbers from -111 to 127: exact
        rows_bc[:, 4:].view(torch.int8).copy_(high)

    def decode_blocks(self, rows_bc: Tensor, out_bk: Tensor) -> None:
        pair_bk = rows_bc[:, 4:].view(torch.int8)
        out_bk[:, :64].copy_((pair_bk & 15) - 8)
        out_bk[:, 64:].copy_(pair_bk >> 4)
        out_bk.mul_(get_scales(rows_bc))
