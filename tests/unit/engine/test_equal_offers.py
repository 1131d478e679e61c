"""Racks that train on the same data make offers of equal bits."""

from __future__ import annotations

from msgspec.structs import replace

from mend.consensus.records import Offer
from mend.engine.loop.equal_offers import EqualOffers
from mend.events.kinds import SameData
from tests.unit.coordination.nouns import offer


def moved(rack: int, seq: int = 1, fragment: int = 0, norm: float = 0.5) -> Offer:
    return replace(offer(rack, seq, fragment=fragment), norm=norm)


def test_equal_offers_in_two_rounds_are_a_warning_with_the_remedy() -> None:
    seen = EqualOffers()
    assert seen.warning([moved(1), moved(0)]) is None
    assert seen.warning([moved(0), moved(1)]) is None, "the same round, looked at again"
    assert seen.warning([moved(1, 2), moved(0, 2), moved(2, 9)]) == SameData((0, 1))
    assert seen.warning([moved(0, 3), moved(1, 3)]) is None, "once"


def test_equal_offers_of_two_fragments_are_two_rounds() -> None:
    seen = EqualOffers()
    assert seen.warning([moved(0), moved(1)]) is None
    assert seen.warning([moved(0, fragment=1), moved(1, fragment=1)])


def test_offers_that_move_nothing_or_differ_are_no_warning() -> None:
    seen = EqualOffers()
    for seq in range(1, 5):
        assert seen.warning([moved(0, seq, norm=0.0), moved(1, seq, norm=0.0)]) is None
        assert seen.warning([moved(0, seq), moved(1, seq + 1)]) is None
