"""The parts of a rank meet, and nobody waits for one that has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from mend.engine.io.rack import RackGroup
from mend.engine.part_group import Broken, Meeting, PartGroup
from mend.fragment.shards import Shard, holding
from mend.types import Layout, Slot

PARTS = 3


def together(job: Callable[[PartGroup], object]) -> list[object]:
    """What `job` returns for each part of a rack of one rank."""
    meeting, ranks = Meeting(PARTS, 30), RackGroup([0], 30)
    groups = [PartGroup(ranks, [0] * PARTS, part, meeting) for part in range(PARTS)]
    with ThreadPoolExecutor(PARTS) as threads:
        return list(threads.map(job, groups))


def test_parts_of_one_rank_agree_as_ranks_do() -> None:
    def job(group: PartGroup) -> object:
        least = group.minimum([group.rank, -group.rank])
        data_B = torch.full((2,), group.rank, dtype=torch.uint8)
        group.spread(data_B)
        other = group.for_thread("other")
        return least, group.gather_bytes(b"%d" % group.rank), data_B.tolist(), other.minimum([1])

    assert together(job) == [([0, -2], [b"0", b"1", b"2"], [0, 0], [1])] * PARTS


def test_each_part_gets_the_slices_of_all() -> None:
    values = torch.arange(7, dtype=torch.float32)
    layout = Layout(0, (Slot("p", (7,), "float32", 0, 7),), 7)
    boxes = [[Shard((7,), (0,))]] * PARTS

    def job(group: PartGroup) -> object:
        mine = holding(layout, boxes, group.rank)
        group.team_up(mine.teams, cuda=False)
        return group.share(values[slice(*mine.owned.spans[0])].clone(), mine).tolist()

    assert together(job) == [values.tolist()] * PARTS


def test_error_in_the_shared_job_is_raised_by_all_parts() -> None:
    def job(_: list[int]) -> list[int]:
        raise ZeroDivisionError("a bug")

    meeting, errors = Meeting(2, 30), list[str]()

    def part(place: int) -> None:
        with pytest.raises(ZeroDivisionError):
            meeting.meet(place, 0, job)
        errors.append("raised")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(part, range(2)))
    assert errors == ["raised"] * 2


def test_part_that_fails_ends_the_wait_of_the_others_until_they_begin_again() -> None:
    meeting, waits = Meeting(2, 30), threading.Event()

    def wait() -> None:
        waits.set()
        meeting.meet(0, 1, partial(list))

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        assert waits.wait(30)
        meeting.end(ValueError("the other one"))
        with pytest.raises(Broken, match="the other one"):
            waiting.result(30)
        with pytest.raises(Broken):
            meeting.meet(1, 1, partial(list))
        meeting.begin_again()
        first = threads.submit(lambda: meeting.meet(0, 1, partial(list)))
        assert meeting.meet(1, 2, partial(list)) == 2
        assert first.result(30) == 1


def test_part_that_waits_too_long_says_so() -> None:
    with pytest.raises(Broken, match="did nothing for"):
        Meeting(2, 0.01).meet(0, 1, partial(list))
