"""How many elements of an offer have the sign of the outer momentum, and how many the other one.

Both are counts of what the payload decodes to, so every machine, cut, block and thread gives the
same. Their sums over the ranks of a rack go into the log with the offer, where they decide whether
a merge is made with momentum (`mend.consensus.weights`). Runs on workers.

Legend: N elements of a rank's part of a fragment, n elements of a block, B payload bytes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mend.codec import Codec
from mend.engine.compute.merge_pass import decoder_name, decoding, is_readable
from mend.engine.compute.vectors import PORTION_NUMEL, block_numel, blocks
from mend.engine.compute.worker_pool import WorkerPool
from mend.kernels import ROW_NUMEL, SignsKernel, signs_kernel


def kernel_of(codec: object, numel: int) -> SignsKernel | None:
    """None for a codec that is not compiled, and for a short vector: loading numba would take
    longer than it saves."""
    name = decoder_name(codec)
    return signs_kernel(name) if name and numel >= PORTION_NUMEL else None


def count_signs(
    codec: Codec, payload_B: Tensor, momentum_N: Tensor, pool: WorkerPool
) -> tuple[int, int]:
    """(along, against): the elements that are nonzero in both vectors, with equal and with opposite
    signs. `payload_B`: uint8; `momentum_N`: fp32."""
    numel = momentum_N.numel()
    kernel = kernel_of(codec, numel) if is_readable(codec, payload_B, numel) else None
    parts = list(blocks(numel, PORTION_NUMEL))
    found = [(0, 0)] * len(parts)

    def count(position: int) -> None:
        begin, end = parts[position]
        whole = begin if kernel is None else end - (end - begin) % ROW_NUMEL
        along = against = 0
        if kernel is not None and whole > begin:
            along, against = kernel(payload_B.data_ptr(), begin, momentum_N[begin:whole].numpy())
        rest = _by_torch(codec, payload_B, momentum_N, whole, end)
        found[position] = along + rest[0], against + rest[1]

    pool.each([partial(count, i) for i in range(len(parts))], compiled=kernel is not None)
    return sum(along for along, _ in found), sum(against for _, against in found)


def _by_torch(
    codec: Codec, payload_B: Tensor, momentum_N: Tensor, begin: int, end: int
) -> tuple[int, int]:
    along = against = 0
    size = min(block_numel(), end - begin)
    decode = decoding(codec, [payload_B], size)
    for low, high in blocks(end - begin, size or 1):
        start, stop = begin + low, begin + high
        sign_n = torch.sign(decode(start, stop)[0]).mul_(torch.sign(momentum_N[start:stop]))
        along += int((sign_n > 0).sum())
        against += int((sign_n < 0).sum())
    return along, against
