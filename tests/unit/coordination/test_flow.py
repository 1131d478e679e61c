"""What is under way to a reader: once, whole, and no more than it can have read."""

from __future__ import annotations

import pytest

from mend.consensus.log import RECORDS_BYTES_MAX, Log
from mend.consensus.records import Drop
from mend.coordination.flow import (
    BATCH_RACKS,
    UNANSWERED_MAX,
    Flow,
    Portion,
    ResendPolicy,
    batch_ns,
)
from mend.types import SECOND
from tests.unit.coordination.nouns import genesis, lineage, log_of

AGAIN_NS, STRANGE_NS = 1000, 100
BIG = 4_000
"""Bytes of a record, nearly."""


def grown(count: int, *, decided: int, kept: int = 4096) -> Log:
    log = log_of(genesis(), kept=kept)
    for number in range(2, count + 1):
        log.append(Drop(0, (), f"{number:04}" + "x" * BIG))
    for index in range(1, decided + 1):
        log.decide(index)
    return log


class Reader:
    """`serial`: of the newest state that was sent to it."""

    def __init__(self, log: Log) -> None:
        self.log, self.flow, self.serial, self.now_ns = log, Flow(), 0, 0

    def next(self, known: int) -> Portion:
        again = ResendPolicy(AGAIN_NS, STRANGE_NS)
        portion = self.flow.next(self.log, known, self.now_ns, again)
        self.serial += 1
        self.flow.went(portion, self.serial, self.now_ns)
        return portion

    def bytes_of(self, portion: Portion) -> int:
        return sum(len(record.reason) for record in portion.records if isinstance(record, Drop))


def test_each_record_is_sent_once() -> None:
    reader = Reader(grown(3, decided=3))
    assert (reader.next(1).prev, reader.flow.upto) == (1, 3)
    assert reader.next(1) == Portion(3)
    reader.log.append(Drop(0, (), "one more"))
    assert reader.next(1) == Portion(3, (Drop(0, (), "one more"),)), "with two under way"
    assert reader.next(4) == Portion(4)


def test_records_missing_from_an_answer_are_sent_again() -> None:
    reader = Reader(grown(3, decided=3))
    first = reader.next(1)
    reader.next(1)
    reader.flow.hears(0)
    assert not reader.next(1)
    reader.flow.hears(2)
    assert reader.next(1) == first


@pytest.mark.parametrize(("decided", "after_ns"), [(3, AGAIN_NS), (2, STRANGE_NS)])
def test_records_without_an_answer_are_sent_again_after_a_while(
    decided: int, after_ns: int
) -> None:
    """A new lineage soon: without it a reader does not know that it is spoken to."""
    reader = Reader(grown(3, decided=decided))
    if decided == 2:
        reader.log.append(lineage(1 << 33, [0]))
    first = reader.next(1)
    reader.now_ns = after_ns - 1
    assert not reader.next(1)
    reader.now_ns += 1
    assert reader.next(1) == first


def test_decided_records_under_way_are_bounded_in_bytes() -> None:
    """However many states are sent meanwhile. A reader that is far behind gets them piece by
    piece."""
    reader = Reader(grown(300, decided=300))
    known, most = 1, 0
    while known < 300:
        under_way = [reader.next(known) for _ in range(5)]
        taken = sum(map(reader.bytes_of, under_way))
        most = max(most, taken)
        assert [bool(portion) for portion in under_way] == [True, False, False, False, False]
        known = under_way[0].prev + len(under_way[0].records)
        reader.flow.hears(reader.serial)
    assert RECORDS_BYTES_MAX - 2 * BIG < most <= RECORDS_BYTES_MAX


def test_a_record_that_is_greater_than_the_bound_goes_alone() -> None:
    log = grown(1, decided=1)
    for number in range(2):
        log.append(Drop(0, (), str(number) * (RECORDS_BYTES_MAX + 1)))
    log.decide(3)
    reader = Reader(log)
    assert len(reader.next(1).records) == 1
    assert not reader.next(1)
    assert len(reader.next(2).records) == 1


def test_the_undecided_end_is_whole() -> None:
    """A voter takes the end of a log as a whole, or not at all."""
    log = grown(120, decided=2)
    reader = Reader(log)
    assert len(reader.next(1).records) == 119
    assert log.portion(1, 1, 2) == log.after(1, 2)


def test_a_snapshot_is_sent_once_as_well() -> None:
    reader = Reader(grown(9, decided=8, kept=2))
    first = reader.next(1)
    assert first.snapshot is not None
    assert (first.prev, len(first.records)) == (8, 1)
    assert reader.next(1) == Portion(9)
    reader.flow.hears(reader.serial)
    assert reader.next(1).snapshot is not None


def test_a_reader_that_answers_nothing_has_so_many_states_to_read() -> None:
    reader = Reader(grown(1, decided=1))
    for _ in range(UNANSWERED_MAX):
        assert not reader.flow.full
        reader.next(1)
    assert reader.flow.full
    reader.next(1)
    assert len(reader.flow.waiting) == UNANSWERED_MAX, "it does not grow with heartbeats"
    reader.flow.hears(2)
    assert not reader.flow.full


def test_news_waits_for_more_of_it_in_large_jobs_only() -> None:
    assert [batch_ns(racks) for racks in (0, 2, BATCH_RACKS)] == [0, 0, 0]
    assert 0 < batch_ns(16) < batch_ns(64) < SECOND // 10
