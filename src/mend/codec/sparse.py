"""The elements that are not zero, exactly. Runs on workers. Touches tensors; never peers, clocks,
files.

For deltas that are mostly 0: experts that no token reached, rows of an embedding that no batch
contained, temporarily frozen parameters. A payload is N (u64), for each block of 4096 elements the
number of those with a bit set (u32), then the blocks. A block without such elements is empty. Any
other is a mask (a bit per element, the lowest first) and the elements that it names, or all
elements if that is not longer. A payload exceeds the vector by at most 12 bytes and 4 bytes for
each 4096 elements.

Legend: N elements of a vector, K blocks, B payload bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mend.codec.base import Feedback, check_row
from mend.errors import WireError

BLOCK = 4096
_HEAD = 8


class Sparse:
    """Nothing is lost, not even the sign of a zero, so there is no residual."""

    name = "sparse"
    exact = True
    feedback: Feedback = "buffer"
    block = 0

    def payload_bytes(self, numel: int) -> int:
        return _HEAD + 4 * -(-numel // BLOCK) + 4 * numel

    def encode(self, x_N: Tensor) -> Tensor:
        values_N = x_N.contiguous().numpy()
        numel, blocks = values_N.size, -(-values_N.size // BLOCK)
        payload_B = np.empty(self.payload_bytes(numel), dtype=np.uint8)
        payload_B[:_HEAD].view("<u8")[0] = numel
        counts_K = payload_B[_HEAD : _HEAD + 4 * blocks].view("<u4")
        end = _HEAD + 4 * blocks
        for number in range(blocks):
            part = values_N[number * BLOCK : (number + 1) * BLOCK]
            there = part.view(np.int32) != 0
            count = counts_K[number] = int(np.count_nonzero(there))
            if not count:
                continue
            mask = -(-part.size // 8)
            if mask + 4 * count < 4 * part.size:
                payload_B[end : end + mask] = np.packbits(there, bitorder="little")
                end, part = end + mask, part[there]
            payload_B[end : end + 4 * part.size] = part.view(np.uint8)
            end += 4 * part.size
        return torch.from_numpy(payload_B[:end].copy())

    def check(self, payload_B: Tensor, numel: int) -> None:
        found, counts_K, ends = _table(payload_B)
        if found != numel or ends[-1] != payload_B.numel():
            what = f"{payload_B.numel()} bytes are not a sparse payload of {numel} elements"
            raise WireError(what)
        data = payload_B.numpy()
        for number in counts_K.nonzero()[0]:
            size = min(BLOCK, numel - int(number) * BLOCK)
            body = data[ends[number] : ends[number + 1]]
            if len(body) < 4 * size:
                _mask(body, int(counts_K[number]), size)

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        if out.device.type != "cpu":
            host_n = torch.empty(stop - start, dtype=torch.float32, device="cpu")
            return out.copy_(self.decode(payload_B.cpu(), start, stop, host_n))
        numel, counts_K, ends = _table(payload_B)
        if not 0 <= start <= stop <= numel or ends[-1] != payload_B.numel():
            raise WireError(
                f"elements [{start}, {stop}) are not in a sparse payload of {numel} elements, "
                f"{payload_B.numel()} bytes"
            )
        data = payload_B.numpy()
        target = out.numpy()
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            begin = number * BLOCK
            first, last = max(start, begin), min(stop, begin + BLOCK)
            part = target[first - start : last - start]
            size = min(BLOCK, numel - begin)
            body = data[ends[number] : ends[number + 1]]
            part[:] = _block(body, int(counts_K[number]), size)[first - begin : last - begin]
        return out


def _block(body: np.ndarray, count: int, size: int) -> np.ndarray:
    """The elements of one block."""
    if len(body) == 4 * size:
        return body.view("<f4")
    whole = np.zeros(size, dtype=np.float32)
    if count:
        whole[_mask(body, count, size)] = body[-(-size // 8) :].view("<f4")
    return whole


def _mask(body: np.ndarray, count: int, size: int) -> np.ndarray:
    """Which elements a block with a mask holds."""
    there = np.unpackbits(body[: -(-size // 8)], count=size, bitorder="little").view(bool)
    if np.count_nonzero(there) != count:
        raise WireError("the mask of a sparse block does not hold as many as it says")
    return there


def _table(payload_B: Tensor) -> tuple[int, np.ndarray, np.ndarray]:
    """N, the counts, and where each block ends in the payload (K + 1; the first begins there)."""
    check_row(payload_B)
    data = payload_B.numpy()
    numel = int(data[:_HEAD].copy().view("<u8")[0]) if data.size >= _HEAD else -1
    blocks = -(-numel // BLOCK)
    if numel < 0 or data.size < _HEAD + 4 * blocks:
        raise WireError(f"{data.size} bytes are not a sparse payload")
    counts_K = data[_HEAD : _HEAD + 4 * blocks].copy().view("<u4").astype(np.int64)
    sizes_K = np.full(blocks, BLOCK, dtype=np.int64)
    if blocks:
        sizes_K[-1] = numel - (blocks - 1) * BLOCK
    if (counts_K > sizes_K).any():
        raise WireError("a sparse block says that it holds more than it can")
    bytes_K = np.minimum(-(-sizes_K // 8) + 4 * counts_K, 4 * sizes_K)
    bytes_K[counts_K == 0] = 0
    return numel, counts_K, np.cumsum([_HEAD + 4 * blocks, *bytes_K])
