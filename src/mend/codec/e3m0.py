"""codec.e3m0: powers of two in four bits. Runs on workers. Touches tensors; never peers, clocks,
files.

Streaming DiLoCo (arXiv 2501.18512) sends deltas so: a sign, three bits of exponent, no mantissa. A
block of 256 elements is its scale (fp32, the greatest magnitude), then the codes.

Legend: b blocks, k = 256 elements of a block, c bytes of a block.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from mend.codec.blocks import BlockCodec, get_scales, over, peaks, put_scales

_BIAS = 127
_HALF = 1 << 6
"""Half of the mantissa of a bfloat16."""


@final
class E3M0(BlockCodec):
    """Level 0 is 0, level L of 1 to 7 is 2^(L-7) of the scale, the nearest one wins: 4.125 bit per
    element. A code is the sign (8) and the level; the first half of a block lies in the low four
    bits of its bytes."""

    name, block, block_bytes = "e3m0", 256, 4 + 128
    compiled = name

    def encode_blocks(self, x_bk: Tensor, rows_bc: Tensor) -> None:
        part_bk, peak_b1 = peaks(x_bk)
        put_scales(peak_b1, rows_bc)
        torch.mul(x_bk, over(1, peak_b1), out=part_bk)
        # Sign, exponent and 7 bits of mantissa are enough, as every border between two levels is a
        # power of two or 1.5 times one.
        bits = (part_bk.view(torch.int32) >> 16).to(torch.int16)
        sign = (bits >> 12).bitwise_and_(8)
        bits.bitwise_and_(0x7FFF)
        # The lowest level begins at 2^-7, half of itself: one exponent below the others' rule.
        lowest = (bits >> 7).clamp_(max=_BIAS - 7).sub_(_BIAS - 8)
        # .75 * 2^j is 1.5 * 2^(j-1): adding half a mantissa carries into the exponent from there.
        level = bits.add_(_HALF).bitwise_right_shift_(7).sub_(_BIAS - 7)
        code = torch.maximum(level, lowest.clamp_(min=0), out=level).add_(sign)
        low, high = code[:, :128], code[:, 128:]
        rows_bc[:, 4:].copy_(high.bitwise_left_shift_(4).bitwise_or_(low))

    def decode_blocks(self, rows_bc: Tensor, out_bk: Tensor) -> None:
        pair = rows_bc[:, 4:].to(torch.int16)
        self._powers(pair & 15, out_bk[:, :128])
        self._powers(pair >> 4, out_bk[:, 128:])
        out_bk.mul_(2.0 ** (_BIAS - 7)).mul_(get_scales(rows_bc))

    @staticmethod
    def _powers(code: Tensor, out: Tensor) -> None:
        """2^(L - 127) with its sign, made as the bits of a bfloat16; level 0 is zero, not a
        subnormal."""
        sign = (code & 8) << 12
        out.copy_((code.bitwise_and_(7) << 7).bitwise_or_(sign).view(torch.bfloat16))
