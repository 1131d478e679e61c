"""Sums over a rack: a rank measures, the leader adds, nobody waits for what will never come."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mend.coordination.events import Measure, Measured, Merge, Sum, Summed
from mend.coordination.messages import Partial, RankReport, Total
from mend.coordination.sums import SumPhase, Sums, Totals
from mend.events.kinds import SumsFailed
from tests.unit.coordination.nouns import member, rank_report

MEMBERS = ((member(0), 1), (member(1), 1))
WEIGHTS = (0.25, 0.75)


def merge(version: int = 1, attempt: int = 1, **changes: Any) -> Merge:
    fields = {"members": MEMBERS, "weights": WEIGHTS, "verify": attempt > 1, **changes}
    return Merge(0, version, attempt, **fields)


# -------------------------------------------------------------- a rank


def test_a_merge_begins_with_a_measurement_and_has_the_total_in_the_end() -> None:
    sums = Sums()
    assert sums.towards(merge()) == Measure(0, 1, 1, MEMBERS, WEIGHTS, verify=False)
    assert sums.partial(0, newest=0) is None
    assert sums.towards(merge()) is None, "one at a time"
    sums.on_measured(Measured(0, 1, 1, b"mine"))
    assert sums.partial(0, newest=0) == Partial(0, 1, 1, b"mine")
    assert sums.towards(merge()) is None, "the leader has not answered"
    sums.take_total(Total(0, 1, 1, b"all"))
    assert sums.towards(merge()) == merge(total=b"all")
    assert sums.partial(0, newest=0) is None, "the leader has what it needs"
    assert sums.towards(merge()) == merge(total=b"all"), "a merge that failed is tried again"


def test_another_attempt_or_another_version_is_measured_anew() -> None:
    sums = Sums()
    sums.towards(merge())
    sums.on_measured(Measured(0, 1, 1, b"mine"))
    sums.take_total(Total(0, 1, 1, b"all"))
    assert sums.towards(merge(attempt=2)) == Measure(0, 1, 2, MEMBERS, WEIGHTS, verify=True)
    sums.on_measured(Measured(0, 1, 1, b"late"))
    assert sums.partial(0, newest=0) is None, "what an earlier attempt measured is nothing now"
    sums.on_measured(Measured(0, 1, 2, b"second"))
    sums.take_total(Total(0, 1, 1, b"all"))
    assert sums.towards(merge(attempt=2)) is None, "nor is its total"
    assert isinstance(sums.towards(merge(version=2)), Measure)


def test_a_measurement_that_failed_is_made_again() -> None:
    sums = Sums()
    sums.towards(merge())
    sums.on_measured(Measured(0, 1, 1, b"", error="an input failed its checksum"))
    assert sums.partial(0, newest=0) is None
    assert isinstance(sums.towards(merge()), Measure)


def test_an_empty_total_is_the_end() -> None:
    sums = Sums()
    sums.towards(merge())
    sums.on_measured(Measured(0, 1, 1, b"mine"))
    sums.take_total(Total(0, 1, 1, b""))
    assert sums.phase is SumPhase.NEVER
    assert sums.towards(merge()) is None
    assert sums.partial(0, newest=0) is None
    assert isinstance(sums.towards(merge(attempt=2)), Measure), "of this attempt only"


def test_a_version_that_is_here_needs_no_sums() -> None:
    sums = Sums()
    sums.towards(merge())
    sums.on_measured(Measured(0, 1, 1, b"mine"))
    assert sums.partial(0, newest=1) is None


def test_a_total_that_was_not_asked_for_is_not_read() -> None:
    sums = Sums()
    sums.take_total(Total(0, 1, 1, b"all"))
    assert isinstance(sums.towards(merge()), Measure)
    sums.take_total(Total(0, 1, 1, b"all"))
    assert sums.phase is SumPhase.MEASURING


# -------------------------------------------------------------- a leader


class Rack:
    """A leader's totals, and what its ranks report."""

    def __init__(self, ranks: int) -> None:
        self.totals = Totals()
        self.reports = [rank_report(1) for _ in range(ranks)]

    def has(self, rank: int, blob: bytes = b"", version: int = 1, attempt: int = 1) -> None:
        partials = (Partial(0, version, attempt, blob or b"rank%d" % rank),)
        self.say(rank, partials=partials)

    def holds(self, rank: int, version: int) -> None:
        self.say(rank, versions=(version,), partials=())

    def say(self, rank: int, **changes: Any) -> None:
        self.reports[rank] = replace(self.reports[rank], **changes)

    def collect(self) -> list[Sum]:
        return self.totals.collect(self.reports)

    def told(self) -> tuple[Total, ...]:
        return self.totals.current(self.reports)


def test_the_leader_adds_once_all_have_measured_in_rank_order() -> None:
    rack = Rack(3)
    for rank in (2, 0):
        rack.has(rank)
        assert rack.collect() == []
    rack.has(1)
    assert rack.collect() == [Sum(0, 1, 1, (b"rank0", b"rank1", b"rank2"))]
    assert rack.collect() == [], "once"
    assert rack.told() == ()
    assert rack.totals.on_summed(Summed(0, 1, 1, b"all")) == []
    assert rack.told() == (Total(0, 1, 1, b"all"),)
    assert rack.collect() == []


def test_partials_of_different_attempts_are_never_added() -> None:
    rack = Rack(2)
    rack.has(0, attempt=1)
    rack.has(1, attempt=2)
    assert rack.collect() == []
    assert rack.told() == (Total(0, 1, 1, b""),), "rank 1 will not go back to the first"
    rack.has(0, attempt=2)
    assert [effect.attempt for effect in rack.collect()] == [2]


def test_the_total_is_repeated_until_every_rank_holds_the_version() -> None:
    """A rank that was first may not take it away from one whose orders were lost."""
    rack = Rack(2)
    rack.has(0)
    rack.has(1)
    rack.collect()
    rack.totals.on_summed(Summed(0, 1, 1, b"all"))
    rack.say(0, partials=())  # has read it
    rack.holds(0, 1)
    assert rack.told() == (Total(0, 1, 1, b"all"),)
    rack.holds(1, 1)
    assert rack.told() == ()


def test_a_total_of_an_attempt_that_is_over_is_not_told() -> None:
    rack = Rack(1)
    rack.has(0, attempt=1)
    rack.collect()
    rack.has(0, attempt=2)
    (second,) = rack.collect()
    assert second.attempt == 2
    rack.totals.on_summed(Summed(0, 1, 1, b"first"))
    assert rack.told() == ()
    rack.totals.on_summed(Summed(0, 1, 2, b"second"))
    assert rack.told() == (Total(0, 1, 2, b"second"),)


def test_total_is_empty_when_the_other_rank_holds_the_merge_already() -> None:
    rack = Rack(2)
    rack.has(0)
    assert rack.told() == (), "rank 1 may still measure"
    rack.holds(1, 1)
    assert rack.told() == (Total(0, 1, 1, b""),)


def test_two_ranks_at_two_attempts_of_a_decided_version_both_end() -> None:
    """Each waited for the other: neither would ever measure the other's attempt."""
    rack = Rack(2)
    rack.has(0, attempt=1)
    rack.has(1, attempt=2)
    assert rack.told() == (Total(0, 1, 1, b""),)
    rack.holds(0, 1)  # so it copies
    assert rack.told() == (Total(0, 1, 2, b""),)


def test_a_rank_that_lost_the_version_after_all_had_it_is_answered() -> None:
    rack = Rack(2)
    rack.has(0)
    rack.has(1)
    rack.collect()
    rack.totals.on_summed(Summed(0, 1, 1, b"all"))
    rack.holds(0, 1)
    rack.holds(1, 1)
    assert rack.told() == ()
    rack.say(0, versions=(0,))  # its bits were spoiled
    rack.has(0)
    assert rack.told() == (Total(0, 1, 1, b""),)
    alone = Rack(1)
    alone.has(0)
    alone.collect()
    alone.totals.on_summed(Summed(0, 1, 1, b"all"))
    alone.holds(0, 1)
    assert alone.told() == ()
    alone.say(0, versions=(0,))
    alone.has(0)
    assert len(alone.collect()) == 1, "nobody else has it: the total is made again"


def test_partials_that_cannot_be_added_are_told_as_nothing() -> None:
    rack = Rack(1)
    rack.has(0, b"garbage")
    rack.collect()
    (note,) = rack.totals.on_summed(Summed(0, 1, 1, b"", error="WireError: no sums"))
    assert note.event == SumsFailed(0, 1, "WireError: no sums")
    assert rack.told() == (Total(0, 1, 1, b""),)
    assert rack.collect() == [], "they would be as wrong again"


@pytest.mark.parametrize("ranks", [1, 3])
def test_nothing_is_told_when_nothing_is_asked(ranks: int) -> None:
    rack = Rack(ranks)
    assert all(isinstance(report, RankReport) for report in rack.reports)
    assert rack.collect() == []
    assert rack.told() == ()
