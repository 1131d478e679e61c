"""Collectives among the parts of a rack, where a rank of a small rack hosts several parts.

Each part has a thread. The parts of a rank meet, and the last one to arrive does the collective of
the rack for all of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mend.engine.io.rack import RackGroup
from mend.errors import MendError, ensure
from mend.fragment.shards import Holding, put_together, take
from mend.types import owned_span

T = TypeVar("T")
R = TypeVar("R")


class Broken(MendError):
    """Another part of this rank has failed."""


class Turn:
    """One meeting of all parts of a rank."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.job: Callable[[list[Any]], Sequence[Any]] = list
        self.results: Sequence[Any] | None = None
        self.error: BaseException | None = None


class Meeting:
    """Where the threads of the `count` parts of a rank meet. `limit_s`: time after which a part
    that waits for the others raises Broken."""

    def __init__(self, count: int, limit_s: float) -> None:
        self.count, self.limit_s = count, limit_s
        self._barrier, self._turn = threading.Barrier(count, self._finish, limit_s), Turn()
        self._why: BaseException | None = None
        """The error after which no part may meet; None: they may."""

    def meet(self, place: int, value: T, job: Callable[[list[T]], Sequence[R]]) -> R:
        """Wait for all parts. The last one does `job` with the values of all, by place, and each
        part gets the result at its place. What `job` raises, all parts raise."""
        turn = self._turn
        turn.values[place], turn.job = value, job
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait()
        if turn.error is not None:
            raise turn.error
        if turn.results is None:
            late = f"did nothing for {self.limit_s:g} s"
            why = f"failed: {self._why!r}" if self._why is not None else late
            raise Broken(f"another part of this rank {why}")
        results: Sequence[R] = turn.results
        return results[place]

    def _finish(self) -> None:
        """Called by the last part to arrive, while the others wait."""
        turn, self._turn = self._turn, Turn()
        try:
            turn.results = turn.job([turn.values[place] for place in range(self.count)])
        except BaseException as error:
            turn.error = error

    def end(self, why: BaseException) -> None:
        """Make every part that waits or arrives raise Broken, until `begin_again`."""
        self._why = self._why or why
        self._barrier.abort()

    def begin_again(self) -> None:
        """Undo `end`. Call it only while no part is in a meeting or about to meet."""
        self._why, self._turn = None, Turn()
        self._barrier.reset()


class PartGroup(RackGroup):
    """The parts of a rack. `ranks`: the group of its ranks. `hosts`: per part, the rank that hosts
    it. `part`: the part of this thread."""

    def __init__(self, ranks: RackGroup, hosts: Sequence[int], part: int, meeting: Meeting) -> None:
        self.rank, self.ranks = part, len(hosts)
        self.members = tuple(ranks.members[host] for host in hosts)
        self._of_ranks, self._hosts, self._meeting = ranks, tuple(hosts), meeting
        self._of_rank = [
            [number for number, host in enumerate(hosts) if host == rank]
            for rank in range(ranks.ranks)
        ]
        """Per rank of the rack, its parts."""
        self._place = self._of_rank[ranks.rank].index(part)

    def _meet(self, value: T, job: Callable[[list[T]], R]) -> R:
        """The result of `job`, the same for all parts of this rank."""
        return self._meeting.meet(
            self._place, value, lambda values: [job(values)] * self._meeting.count
        )

    def for_thread(self, name: str) -> PartGroup:
        def make(_: list[None]) -> tuple[RackGroup, Meeting]:
            meeting = Meeting(self._meeting.count, self._meeting.limit_s)
            return self._of_ranks.for_thread(name), meeting

        ranks, meeting = self._meet(None, make)
        return PartGroup(ranks, self._hosts, self.rank, meeting)

    def team_up(self, teams: Iterable[tuple[int, ...]], *, cuda: bool) -> None:
        wanted = set(teams)
        ensure(wanted <= {tuple(range(self.ranks))}, "a team of some of the parts", teams=wanted)

        def make(_: list[None]) -> None:
            if self._of_ranks.ranks > 1:
                self._of_ranks.team_up([self._everybody], cuda=cuda)

        if wanted:
            self._meet(None, make)

    @property
    def _everybody(self) -> tuple[int, ...]:
        return tuple(range(self._of_ranks.ranks))

    def minimum(self, values: Sequence[int]) -> list[int]:
        def least(of_parts: list[Sequence[int]]) -> list[int]:
            return self._of_ranks.minimum([min(each) for each in zip(*of_parts, strict=True)])

        return list(self._meet(values, least))

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        def gather(of_parts: list[bytes]) -> list[bytes]:
            ranks = self._of_ranks.gather(tuple(of_parts), tuple[bytes, ...])
            return self._by_part(ranks)

        return list(self._meet(mine, gather))

    def _by_part(self, ranks: Sequence[Sequence[T]]) -> list[T]:
        """`ranks`: per rank the values of its parts."""
        found = {
            part: value
            for parts, values in zip(self._of_rank, ranks, strict=True)
            for part, value in zip(parts, values, strict=True)
        }
        return [found[part] for part in range(self.ranks)]

    def share(self, slice_N: Tensor, holding: Holding) -> Tensor:
        def gather(team: tuple[int, ...], slots: tuple[int, ...]) -> Sequence[Tensor]:
            sizes = [
                sum(owned_span(holding.local[slot], len(team), i).numel for slot in slots)
                for i in range(len(team))
            ]
            mine = take(slice_N, holding.owned, slots)
            return self._meet(mine, lambda of_parts: self._gathered(of_parts, max(sizes)))

        return put_together(holding, slice_N, gather)

    def _gathered(self, of_parts: list[Tensor], numel: int) -> list[Tensor]:
        """The vectors of all parts, padded with zeros to `numel` where another rank has sent
        them."""
        if self._of_ranks.ranks == 1:
            return of_parts
        most, like = max(map(len, self._of_rank)), of_parts[0]
        mine = torch.zeros((most, numel), dtype=like.dtype, device=like.device)
        for row, vector_n in zip(mine, of_parts, strict=False):
            row[: vector_n.numel()] = vector_n
        rows = [torch.empty_like(mine) for _ in self._everybody]
        team = self._of_ranks._teams[self._everybody, like.device.type]
        dist.all_gather(rows, mine, group=team)
        pairs = zip(rows, self._of_rank, strict=True)
        return self._by_part([[*row[: len(parts)]] for row, parts in pairs])

    def spread(self, data_B: Tensor) -> None:
        def fill(of_parts: list[Tensor]) -> None:
            if self._of_ranks.ranks > 1:
                self._of_ranks.spread(of_parts[0])
            for other_B in of_parts[1:]:
                other_B.copy_(of_parts[0])

        self._meet(data_B, fill)

    def barrier(self) -> None:
        self._meet(None, lambda _: self._of_ranks.barrier())

    def close(self) -> None:
        """Do nothing: the rank itself closes the group of its ranks."""
