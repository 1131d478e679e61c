"""The sampler of rows that the log gives out, with its units published by hand."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from mend.consensus.records import UnitBook, Units
from mend.coordination.events import Event, UnitsAsked
from mend.engine.data_ledger import ASK_MIN, DataLedger, UnitFeed
from mend.errors import GaveUp, UsageError
from mend.types import SECOND
from tests.unit.engine.hand import Hand


class Fed:
    """A feed of a trainer that nobody else moves."""

    def __init__(self) -> None:
        self.hand = Hand()
        self.trainer = self.hand.trainer
        self.asked: list[Event] = []
        self.now_ns = 0
        self.feed = UnitFeed(self.trainer, self.asked.append, lambda: self.now_ns)

    def gives(self, *spans: tuple[int, int], first: int = 0, ended: bool = False) -> None:
        book = UnitBook(self.trainer.member, first, spans, (((0, 0),),))
        self.trainer.published.count_units(Units(1000, (), books=(book,), ended=ended))

    def ledger(self, order: Any, rank: int = 0, ranks: int = 1) -> DataLedger:
        made = DataLedger(order)
        made.attach(self.feed, rank, ranks, self.live)
        return made

    def live(self, doing: Generator[Any, Any, int | None]) -> int | None:
        try:
            next(doing)
        except StopIteration as end:
            unit: int | None = end.value
            return unit
        raise AssertionError("it waits")


def test_ranks_of_a_rack_share_each_unit() -> None:
    fed = Fed()
    fed.gives((2, 2), (0, 1), ended=True)
    order = torch.tensor([9, 8, 7, 6, 5, 4, 3, 2])
    assert list(fed.ledger(order, 0, 2)) == [5, 3, 9]
    assert list(fed.ledger(order, 1, 2)) == [4, 2, 8]


def test_rack_asks_when_it_begins_its_newest_grant() -> None:
    fed = Fed()
    rows = iter(fed.ledger(range(1000)))
    with pytest.raises(AssertionError, match="it waits"):
        next(rows)
    assert fed.asked == [UnitsAsked(0, ASK_MIN, True)]
    fed.gives((0, 2))
    rows = iter(fed.ledger(range(1000)))
    assert [next(rows), next(rows)] == [0, 1]
    assert fed.asked[1:] == [UnitsAsked(2, ASK_MIN, False)]
    fed.gives((0, 4))
    assert next(rows) == 2
    assert fed.asked[2:] == [UnitsAsked(4, ASK_MIN, False)]


def test_second_iteration_goes_on_behind_the_counted_rows() -> None:
    fed = Fed()
    fed.gives((0, 10))
    ledger = fed.ledger(range(10))
    rows = iter(ledger)
    assert [next(rows) for _ in range(6)] == list(range(6))
    fed.trainer.stepped(1, ledger.check(4))
    assert next(iter(ledger)) == 4, "rows 4 and 5 were fetched ahead, and not trained"


def test_step_without_count_or_with_too_many_rows_is_refused() -> None:
    fed = Fed()
    fed.gives((0, 10))
    ledger = fed.ledger(range(10))
    next(iter(ledger))
    with pytest.raises(UsageError, match="count_rows"):
        ledger.check(None)
    with pytest.raises(UsageError, match="has given 1"):
        ledger.check(2)


def test_wait_without_a_quorum_gives_up() -> None:
    fed = Fed()
    doing = fed.feed.take(0)
    next(doing)
    fed.now_ns = fed.trainer.options.give_up_ns + SECOND
    with pytest.raises(GaveUp, match="no quorum is heard"):
        next(doing)


def test_job_that_is_over_ends_the_rows() -> None:
    fed = Fed()
    fed.trainer.published.finish()
    assert list(fed.ledger(range(10))) == []


@pytest.mark.parametrize("order", [[], [0.5], [-1], torch.zeros(2, 2), torch.ones(3), [[1]]])
def test_order_of_anything_but_row_numbers_is_refused(order: Any) -> None:
    with pytest.raises(UsageError, match="DataLedger"):
        DataLedger(order)


def test_ledger_before_mend_init_is_refused() -> None:
    with pytest.raises(UsageError, match="before mend_init"):
        next(iter(DataLedger([1, 2])))


def test_fact_tells_orders_apart() -> None:
    assert DataLedger([1, 0]).fact != DataLedger([0, 1]).fact
    assert DataLedger([1, 0]).fact == DataLedger(torch.tensor([1, 0])).fact
