"""The sampler of rows that the log gives out, with its units published by hand."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from mend.consensus.records import UnitBook, Units
from mend.coordination.events import Event, UnitsAsked
from mend.engine.features.data_ledger import ASK_MIN, DataLedger, DataUnits, UnitFeed, shuffled
from mend.engine.state.published_state import NewestOrders
from mend.engine.trainer.trainer_end import NOTE_NS
from mend.errors import GaveUp, UsageError
from mend.types import SECOND
from tests.unit.engine.hand import Hand


class Fed:
    """A feed of a trainer that nobody else moves."""

    def __init__(self, **options: Any) -> None:
        self.hand = Hand(**options)
        self.trainer = self.hand.trainer
        self.asked: list[Event] = []
        self.now_ns = 0
        self.feed = UnitFeed(self.trainer, self.asked.append, lambda: self.now_ns)

    def gives(self, *spans: tuple[int, int], first: int = 0, ended: bool = False) -> None:
        book = UnitBook(self.trainer.member, first, spans, (((0, 0),),))
        self.trainer.published.of(DataUnits).count(Units(1000, (), books=(book,), ended=ended))

    def ledger(self, order: Any, rank: int = 0, ranks: int = 1, **options: int) -> DataLedger:
        made = DataLedger(order, **options)
        made.attach(self.feed, rank, ranks, self.drive)
        return made

    def drive(self, doing: Generator[Any, Any, int | None]) -> int | None:
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


def six_read_four_counted() -> tuple[Fed, DataLedger]:
    fed = Fed()
    fed.gives((0, 10))
    ledger = fed.ledger(range(10))
    rows = iter(ledger)
    assert [next(rows) for _ in range(6)] == list(range(6))
    ledger.count(4)
    return fed, ledger


def test_second_iteration_goes_on_behind_the_counted_rows() -> None:
    fed, ledger = six_read_four_counted()
    fed.trainer.stepped(1, ledger.stepped())
    assert next(iter(ledger)) == 4, "rows 4 and 5 were fetched ahead, and not trained"


def test_rack_whose_rows_have_ended_takes_none_that_become_free_again() -> None:
    """One of its ranks may have ended its loop already, and would wait for the others."""
    fed = Fed()
    fed.gives((0, 2), ended=True)
    fed.gives((0, 4))
    assert list(fed.ledger(range(4))) == [0, 1]
    assert fed.asked == [], "it asks for more, and others wait until it has taken them"


def test_rows_of_a_step_that_waits_stay_with_it() -> None:
    _, ledger = six_read_four_counted()
    ledger.hold()
    assert next(iter(ledger)) == 4, "the rows of the step that waits are given again"
    ledger.count(1)
    assert [ledger.stepped(), ledger.stepped()] == [4, 1]
    ledger.hold()
    with pytest.raises(UsageError, match="without runtime"):
        ledger.stepped()
    ledger.count(2)
    ledger.hold()
    ledger.count(1)
    ledger.unite()
    assert ledger.stepped() == 3


def test_step_without_count_or_with_too_many_rows_is_refused() -> None:
    fed = Fed()
    fed.gives((0, 10))
    ledger = fed.ledger(range(10))
    next(iter(ledger))
    with pytest.raises(UsageError, match="count_rows"):
        ledger.stepped()
    ledger.count(2)
    with pytest.raises(UsageError, match="has given 1"):
        ledger.stepped()


def test_wait_without_a_quorum_gives_up() -> None:
    fed = Fed()
    doing = fed.feed.take(0)
    next(doing)
    fed.now_ns = fed.trainer.options.wait_timeout_ns + SECOND
    with pytest.raises(GaveUp, match="no quorum is heard"):
        next(doing)


def test_wait_in_lockstep_names_who_is_waited_for_and_ends() -> None:
    """A quorum is heard, and a rack does not read its ledger."""
    fed = Fed(lockstep=True)
    doing, why = fed.feed.take(0), "waiting for rack 1 to read the ledger"
    fed.trainer.published.heard(NewestOrders(live=(0, 1), why=(why,)))
    next(doing)
    fed.now_ns = NOTE_NS + 1
    next(doing)
    assert fed.hand.noted("rows-awaited") == [("rows-awaited", {"step": 0, "why": why})]
    fed.now_ns = fed.trainer.options.wait_timeout_ns + 1
    with pytest.raises(GaveUp, match=f"in lockstep, where .*{why}.*: let the loop of every rack"):
        next(doing)


def test_wait_without_lockstep_lasts_while_a_quorum_is_heard() -> None:
    fed = Fed()
    doing = fed.feed.take(0)
    fed.trainer.published.heard(NewestOrders(live=(0, 1)))
    next(doing)
    for waits in range(1, 4):
        fed.now_ns = waits * fed.trainer.options.wait_timeout_ns
        next(doing)
        assert len(fed.hand.noted("rows-awaited")) == waits


def test_job_that_is_over_ends_the_rows() -> None:
    fed = Fed()
    fed.trainer.published.finish()
    assert list(fed.ledger(range(10))) == []


def test_each_iterator_ends_with_its_epoch() -> None:
    """Two passes over four rows; the rack gets three units of the first and all of the second."""
    fed = Fed()
    fed.gives((0, 3), (4, 4), ended=True)
    ledger, passes = fed.ledger(4, epochs=2, seed=7), []
    for epoch in range(ledger.epoch, 2):
        assert ledger.epoch == epoch
        for row in ledger:
            ledger.count(1)
            fed.trainer.stepped(1, ledger.stepped())
            passes.append((epoch, row))
    first, second = (shuffled(4, 7, epoch).tolist() for epoch in (0, 1))
    assert passes == [*((0, row) for row in first[:3]), *((1, row) for row in second)]
    assert ledger.epoch == 2
    with pytest.raises(UsageError, match="epochs=2, and the loop wants more"):
        next(iter(ledger))


def test_rows_that_an_epoch_did_not_train_begin_the_next_one() -> None:
    """As with drop_last; a count whose step is not made yet is not given again."""
    fed = Fed()
    fed.gives((0, 8), ended=True)
    ledger = fed.ledger(4, epochs=2)
    assert len([*ledger]) == 4
    ledger.count(3)
    rows = [*ledger]
    assert rows == [shuffled(4, 0, 0)[3], *shuffled(4, 0, 1)]


def test_life_that_begins_later_says_in_which_epoch() -> None:
    fed = Fed()
    fed.gives((9, 3), ended=True)
    ledger = fed.ledger(4, epochs=3)
    assert ledger.epoch == 2
    assert len([*ledger]) == 3
    ledger.count(3)
    assert ledger.epoch == 3
    assert [*ledger] == [], "a loop over all epochs has empty ones at its end"


def test_order_is_a_permutation_that_no_machine_changes() -> None:
    """The numbers are those of a plain implementation of SplitMix64."""
    assert sorted(shuffled(1000, 3, 5).tolist()) == list(range(1000))
    assert shuffled(8, 1, 2).tolist() == [6, 5, 1, 0, 2, 7, 3, 4]
    orders = [tuple(shuffled(50, *each).tolist()) for each in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len(set(orders)) == 4


def test_ledger_has_no_length() -> None:
    loader = torch.utils.data.DataLoader([0] * 4, sampler=DataLedger(4))
    with pytest.raises(TypeError, match="no len"):
        len(loader)


@pytest.mark.parametrize(
    "options", [{"epochs": 0}, {"epochs": 1001}, {"epochs": True}, {"seed": -1}, {"seed": 0.5}]
)
def test_number_of_epochs_or_seed_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"DataLedger\\({next(iter(options))}="):
        DataLedger(4, **options)


def test_order_that_is_given_has_one_epoch() -> None:
    with pytest.raises(UsageError, match="mend draws"):
        DataLedger([1, 0], epochs=2)


@pytest.mark.parametrize(
    "order", [0, True, [], [0.5], [-1], torch.zeros(2, 2), torch.ones(3), [[1]]]
)
def test_order_of_anything_but_row_numbers_is_refused(order: Any) -> None:
    with pytest.raises(UsageError, match="DataLedger"):
        DataLedger(order)


def test_ledger_before_mend_init_is_refused() -> None:
    with pytest.raises(UsageError, match="before mend_init"):
        next(iter(DataLedger([1, 2])))


def test_fact_tells_orders_apart() -> None:
    assert DataLedger([1, 0]).fact != DataLedger([0, 1]).fact
    assert DataLedger([1, 0]).fact == DataLedger(torch.tensor([1, 0])).fact
    shuffles = [DataLedger(9), DataLedger(8), DataLedger(9, epochs=2), DataLedger(9, seed=1)]
    assert len({each.fact for each in shuffles}) == 4
