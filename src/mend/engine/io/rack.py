"""Collectives inside a rack, over torch.distributed on the CPU. No pickle.

Everything here is collective: all ranks of the rack call it together, from their training threads,
or from one other thread with groups of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from mend.errors import UsageError, ensure
from mend.fragment.shards import Holding, put_together, take
from mend.types import owned_span

T = TypeVar("T")

_BLOB_BYTES_MAX = 64 << 20
_SPREAD_BYTES = 64 << 20

_kept: dict[tuple[tuple[int, ...], str, str], tuple[object, dist.ProcessGroup]] = {}
"""(members, backend, thread) -> (the world in which the group was made, the group). A group is kept
until its world ends: torch names a group by its members and by the number of groups, so a new group
in place of a destroyed one would find the old addresses in the store and could not connect."""


def refuse_ungrouped(rack: int | None, ranks: int) -> None:
    """Raise UsageError where the launcher has started several ranks of this rack, but the script
    has made no process group: each process would take itself for the whole rack."""
    if ranks > 1 and not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"this process is one of {ranks} ranks (WORLD_SIZE) of rack {rack}, and has no process "
            "group. Call torch.distributed.init_process_group before mend_init; unset WORLD_SIZE "
            "if the process trains alone"
        )


class RackGroup:
    """The ranks of a rack. With more than one it uses gloo groups besides those of the script.

    `members`: the global ranks of the rack, where one torchrun spans several; else all ranks.
    `limit_s`: how long a rank waits for another one in a collective, before torch raises.
    """

    def __init__(self, members: Sequence[int] | None, limit_s: float) -> None:
        self._limit = timedelta(seconds=limit_s)
        self.rank, self.ranks = 0, 1
        self._group: dist.ProcessGroup | None = None
        self._teams: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        running = dist.is_available() and dist.is_initialized()
        if members is None:
            members = range(dist.get_world_size()) if running else [0]
        self.members = tuple(members)
        if len(self.members) > 1:
            self.rank, self.ranks = self.members.index(dist.get_rank()), len(self.members)
            self._group = self._new(range(self.ranks))

    def _new(
        self, ranks: Sequence[int], backend: str = "gloo", thread: str = ""
    ) -> dist.ProcessGroup:
        """`thread`: the thread that uses the group; empty: the training thread."""
        members = tuple(self.members[rank] for rank in ranks)
        world, group = _kept.get((members, backend, thread), (None, None))
        if group is None or world is not dist.group.WORLD:
            group = dist.new_group(
                list(members),
                backend=backend,
                timeout=self._limit,
                use_local_synchronization=True,  # the other racks of one torchrun do not take part
            )
            _kept[members, backend, thread] = (dist.group.WORLD, group)
        return group

    def for_thread(self, name: str) -> RackGroup:
        """The same ranks for another thread, whose collectives must not mix with those of the
        training thread."""
        group = copy(self)
        group._group = self._new(range(self.ranks), thread=name) if self.ranks > 1 else None
        return group

    def team_up(self, teams: Iterable[tuple[int, ...]], *, cuda: bool) -> None:
        """Make the groups that `share` needs. `teams`: those that this rank is in; all ranks of the
        rack call it, each with its own. `cuda`: also for vectors on a GPU; where the script has no
        NCCL, as its ranks share a GPU, these go over the host."""
        for team in sorted(set(teams)):
            ensure(self.rank in team, "a team without this rank", team=team, rank=self.rank)
            everybody = self._group if len(team) == self.ranks else None
            self._teams[team, "cpu"] = everybody or self._new(team)
            if cuda:
                has_nccl = "nccl" in dist.get_backend_config()
                over_host = self._teams[team, "cpu"]
                self._teams[team, "cuda"] = self._new(team, "nccl") if has_nccl else over_host

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum over the ranks."""
        if self.ranks == 1:
            return list(values)
        vector = torch.tensor(values, dtype=torch.int64, device="cpu")
        dist.all_reduce(vector, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in vector.tolist()]

    def gather(self, mine: T, kind: type[T]) -> list[T]:
        """The values of all ranks, in rank order."""
        blobs = self.gather_bytes(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(blob, type=kind) for blob in blobs]

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, in rank order."""
        if self.ranks == 1:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.ranks)]
        dist.all_gather(
            sizes, torch.tensor([len(mine)], dtype=torch.int64, device="cpu"), group=self._group
        )
        longest = max(int(size) for size in sizes)
        if longest > _BLOB_BYTES_MAX:
            raise UsageError(
                f"a rank of this rack sent {longest} bytes at start; the limit is {_BLOB_BYTES_MAX}"
            )
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(rows, padded, group=self._group)
        return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def share(self, slice_N: Tensor, holding: Holding) -> Tensor:
        """This rank's part of a fragment (fp32), from its slice and those of its replicas, on the
        device of the slice."""

        def gather(team: tuple[int, ...], slots: tuple[int, ...]) -> Sequence[Tensor]:
            mine = take(slice_N, holding.owned, slots)
            sizes = [
                sum(owned_span(holding.local[slot], len(team), i).numel for slot in slots)
                for i in range(len(team))
            ]
            group = self._teams[team, slice_N.device.type]
            over_host = group is self._teams[team, "cpu"]
            device = torch.device("cpu") if over_host else slice_N.device
            padded = torch.zeros(max(sizes), dtype=torch.float32, device=device)
            padded[: mine.numel()] = mine
            rows = [torch.empty_like(padded) for _ in team]
            dist.all_gather(rows, padded, group=group)
            return [row.to(slice_N.device) for row in rows]

        return put_together(holding, slice_N, gather)

    def spread(self, data_B: Tensor) -> None:
        """Overwrite `data_B` (uint8, of one size on all ranks) with that of the first rank."""
        for start in range(0, data_B.numel(), _SPREAD_BYTES):
            piece_B = data_B[start : start + _SPREAD_BYTES]
            dist.broadcast(piece_B, src=self.members[0], group=self._group)

    def barrier(self) -> None:
        if self.ranks > 1:
            dist.barrier(group=self._group)

    def close(self) -> None:
        """Forget the groups; `_kept` has them for the next job of this process."""
        self._group, self._teams = None, {}
