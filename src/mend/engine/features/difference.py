"""Encodes, without loss, the elements of a vector (fp32) whose bits differ from another vector's.

    DENSE                           no elements: they would save too few bytes, see SPARSE_PCT_MAX
    SPARSE | bitmap | new values    one bit per element, padded to a byte; the values as fp32

Blocks are short: the interpreter's lock is held while one is packed, and the training thread may
wait for it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mend.errors import WireError

DENSE, SPARSE = b"\0", b"\1"
BLOCK_NUMEL = 1 << 18
SAMPLES = 16
"""Blocks that are sampled first: nearly all training changes nearly every element."""

SPARSE_PCT_MAX = 80
"""Maximum percentage of changed elements, and of the vector's bytes, for a difference; above that
the follower pulls the vector itself."""


def difference_of(old_N: Tensor, new_N: Tensor) -> bytes:
    """The encoded difference of two vectors of the same length (fp32, on the CPU)."""
    old, new = (each.view(torch.int32).numpy() for each in (old_N, new_N))
    numel = len(new)
    step = max(BLOCK_NUMEL, numel // SAMPLES)
    few = [slice(start, start + BLOCK_NUMEL // 64) for start in range(0, numel, step)]
    looked = sum(len(new[each]) for each in few)
    differ = sum(int(np.count_nonzero(old[each] != new[each])) for each in few)
    if 100 * differ > SPARSE_PCT_MAX * looked:
        return DENSE
    bitmap, values = [], []
    for start in range(0, numel, BLOCK_NUMEL):
        before, now = old[start : start + BLOCK_NUMEL], new[start : start + BLOCK_NUMEL]
        changed = before != now
        bitmap.append(np.packbits(changed).tobytes())
        values.append(now[changed].tobytes())
    data = b"".join((SPARSE, *bitmap, *values))
    return data if 100 * len(data) <= SPARSE_PCT_MAX * 4 * numel else DENSE


def with_difference(old_N: Tensor, data: bytes) -> Tensor:
    """The new vector (fp32 N), from what `difference_of` returned. Raises WireError for data that
    cannot be a difference of this vector. The caller verifies the bits."""
    numel = old_N.numel()
    split = 1 + -(-numel // 8)
    if data[:1] != SPARSE or len(data) < split or (len(data) - split) % 4:
        raise WireError(f"{len(data)} bytes that are not a difference of {numel} elements")
    packed = np.frombuffer(data, dtype=np.uint8, count=split - 1, offset=1)
    changed = np.unpackbits(packed, count=numel).view(np.bool_)
    values = np.frombuffer(data, dtype=np.int32, offset=split)
    if int(np.count_nonzero(changed)) != len(values):
        raise WireError("a difference with another number of elements than it names")
    new_N = old_N.clone()
    new_N.view(torch.int32).numpy()[changed] = values
    return new_N
