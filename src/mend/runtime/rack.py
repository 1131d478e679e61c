"""runtime.rack: the ranks of one rack among themselves, over torch.distributed on CPU. No pickle.

Everything here is collective: all ranks of the rack call it together, from their training threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mend.errors import UsageError
from mend.terms import Span, owned_span

_BLOB_BYTES_MAX = 64 << 20


class RackGroup:
    """A rack of one rank needs nobody; a larger one uses a gloo group beside the user's own."""

    def __init__(self) -> None:
        self.rank, self.ranks = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo")

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum over the ranks."""
        if self.ranks == 1:
            return list(values)
        vector = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(vector, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in vector.tolist()]

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        if self.ranks == 1:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        longest = max(int(size) for size in sizes)
        if longest > _BLOB_BYTES_MAX:
            raise UsageError(
                f"a rank of this rack sent {longest} bytes at start; the limit is {_BLOB_BYTES_MAX}"
            )
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(found, padded, group=self._group)
        return [bytes(row[: int(size)].tolist()) for row, size in zip(found, sizes, strict=True)]

    def share(self, slice_N: Tensor, numel: int) -> Tensor:
        """The full fragment (fp32, numel) from every rank's owned slice."""
        if self.ranks == 1:
            return slice_N
        spans = [owned_span(numel, self.ranks, rank) for rank in range(self.ranks)]
        width = max(span.numel for span in spans)
        padded = torch.zeros(width, dtype=torch.float32)
        padded[: slice_N.numel()] = slice_N
        rows = [torch.empty(width, dtype=torch.float32) for _ in spans]
        dist.all_gather(rows, padded, group=self._group)
        return torch.cat([row[: span.numel] for row, span in zip(rows, spans, strict=True)])

    def barrier(self) -> None:
        if self.ranks > 1:
            dist.barrier(group=self._group)

    def own(self, numel: int) -> Span:
        return owned_span(numel, self.ranks, self.rank)

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None
