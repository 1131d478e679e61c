"""The 64 greatest elements of every chunk of 4096. Runs on workers. Touches tensors; never peers,
clocks, files.

SparseLoCo (arXiv 2508.15706): of 4096 elements the 64 of the greatest magnitude are sent, with two
bits each; the rest stays in the rack. Their indices have 12 bits.

Legend: b chunks, k = 4096 elements of a chunk, c = 116 bytes of a chunk, s = 64 kept.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from mend.codec.base import Feedback
from mend.codec.blocks import TINY, BlockCodec

KEEP = 64
_HALF, _QUARTER = KEEP // 2, KEEP // 4
_LEVELS, _INDICES, _VALUES = 4, 4 + 3 * _HALF, 4 + 3 * _HALF + _QUARTER


@final
class TopK(BlockCodec):
    """64 of 4096 elements: 0.227 bits per element. Ties go to the lower index.

    A chunk is two magnitudes (bfloat16), 64 indices (32 low bytes of the first half, 32 of the
    second, then the high four bits of both), and two bits per index: great or small (1), sign (2).
    The two magnitudes are the means of the kept ones above and below the middle of the greatest and
    the least of them, so the decoded chunk is always nearer to x than zero is.
    """

    name, block, block_bytes = "topk", 4096, _VALUES
    compiled = name
    feedback: Feedback = "weights"

    def encode_blocks(self, x_bk: Tensor, rows_bc: Tensor) -> None:
        index_bs, counts_bs = _without_zeros(x_bk, _greatest(x_bk))
        kept_bs = x_bk.gather(1, index_bs)
        size_bs = kept_bs.abs()
        middle_b1 = (size_bs.amax(1, keepdim=True) + size_bs.amin(1, keepdim=True)) / 2
        great_bs = size_bs >= middle_b1
        small_b1 = _mean(size_bs, counts_bs & ~great_bs)
        means_b2 = torch.cat([small_b1, _mean(size_bs, counts_bs & great_bs)], 1)
        levels_b2 = torch.where(means_b2 < TINY, 0.0, means_b2).bfloat16()
        rows_bc[:, :_LEVELS].copy_(levels_b2.view(torch.uint8))
        _put_indices(index_bs, rows_bc[:, _LEVELS:_INDICES])
        code = great_bs.to(torch.uint8) + 2 * (kept_bs < 0).to(torch.uint8)
        quarters = code.view(-1, 4, _QUARTER)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu").view(1, 4, 1)
        packed = quarters << shifts
        rows_bc[:, _INDICES:].copy_((packed[:, 0] | packed[:, 1]) | (packed[:, 2] | packed[:, 3]))

    def decode_blocks(self, rows_bc: Tensor, out_bk: Tensor) -> None:
        levels_b2 = rows_bc[:, :_LEVELS].contiguous().view(torch.bfloat16).float()
        packed = rows_bc[:, _INDICES:]
        code_bs = torch.cat([packed >> shift for shift in (0, 2, 4, 6)], 1)
        value_bs = levels_b2.gather(1, (code_bs & 1).long())
        value_bs = torch.where((code_bs & 2) != 0, -value_bs, value_bs)
        out_bk.zero_().scatter_(1, _get_indices(rows_bc[:, _LEVELS:_INDICES]), value_bs)


def _greatest(x_bk: Tensor) -> Tensor:
    """Indices of the KEEP greatest magnitudes of each row, ascending.

    The KEEP-th greatest magnitude is one number, however a library finds it; which elements of this
    magnitude are kept is decided here. Magnitudes are compared as whole numbers, which have the
    same order.
    """
    size_bk = (x_bk.view(torch.int32) & 0x7FFFFFFF).numpy()
    place = size_bk.shape[1] - KEEP
    least_b1 = np.partition(size_bk, place, axis=1)[:, place : place + 1]
    kept_bk = size_bk >= least_b1
    found = np.flatnonzero(kept_bk)
    if len(found) > KEEP * len(size_bk):
        rows = kept_bk.sum(1) > KEEP
        greater, equal = size_bk[rows] > least_b1[rows], size_bk[rows] == least_b1[rows]
        missing = KEEP - greater.sum(1, keepdims=True)
        kept_bk[rows] = greater | (equal & (equal.cumsum(1) <= missing))
        found = np.flatnonzero(kept_bk)
    return torch.from_numpy(found.reshape(-1, KEEP) % size_bk.shape[1])


def _without_zeros(x_bk: Tensor, index_bs: Tensor) -> tuple[Tensor, Tensor]:
    """In a chunk with fewer than KEEP nonzero elements, the last of these is sent again in place of
    each 0, which has no code. Also returns which indices count, each element once."""
    counts_bs = x_bk.gather(1, index_bs) != 0
    last_b1 = torch.where(counts_bs, index_bs, 0).amax(1, keepdim=True)
    return torch.where(counts_bs, index_bs, last_b1), counts_bs


def _mean(size_bs: Tensor, chosen_bs: Tensor) -> Tensor:
    """The mean of the chosen, (b, 1); 0 if there are none. Added up as a tree of halves, because a
    library's order of addition depends on the machine."""
    sum_bs, width = torch.where(chosen_bs, size_bs, 0.0), KEEP
    while width > 1:
        width //= 2
        sum_bs = sum_bs[:, :width] + sum_bs[:, width : 2 * width]
    return sum_bs / chosen_bs.sum(1, keepdim=True).clamp(min=1)


def _put_indices(index_bs: Tensor, bytes_: Tensor) -> None:
    first, second = index_bs[:, :_HALF], index_bs[:, _HALF:]
    bytes_[:, :_HALF].copy_(first & 255)
    bytes_[:, _HALF : 2 * _HALF].copy_(second & 255)
    bytes_[:, 2 * _HALF :].copy_((first >> 8) | ((second >> 8) << 4))


def _get_indices(bytes_: Tensor) -> Tensor:
    index = bytes_.long()
    first, second, high = (index[:, i * _HALF : (i + 1) * _HALF] for i in range(3))
    return torch.cat([first | ((high & 15) << 8), second | ((high >> 4) << 8)], 1)
