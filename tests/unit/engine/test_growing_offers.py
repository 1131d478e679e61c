"""Offers that grow beyond a settled peak are a warning; those of a warm-up are none."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from mend.consensus.records import Commit
from mend.engine.loop.growing_offers import GROWN, ROUNDS, SETTLED_ROUNDS, GrowingOffers
from mend.events.kinds import OffersGrow
from tests.unit.coordination.nouns import commit, offer

LONG = 2 * SETTLED_ROUNDS


def moved(version: int, per_step: float, *, closing: bool = False) -> Commit:
    """A round of two racks, with ten steps and with one."""
    record = commit(version, [offer(0, version), offer(1, version)])
    steps = (10, 1)
    members = tuple(
        replace(each, norm=per_step * count, steps=count, closing=closing)
        for each, count in zip(record.members, steps, strict=True)
    )
    return replace(record, members=members)


def warnings(moves: Iterable[float]) -> list[OffersGrow]:
    seen = GrowingOffers()
    found = [seen.warning(moved(version, each)) for version, each in enumerate(moves, 1)]
    return [each for each in found if each is not None]


def test_offers_beyond_a_settled_peak_are_one_warning_with_their_growth() -> None:
    (warning,) = warnings([4.0] * ROUNDS + [1.0] * LONG + [8.0] * LONG)
    assert warning.growth == 2.0
    assert warning.version == ROUNDS + LONG + ROUNDS // 2 + 1, "when most of the newest are large"


def test_offers_up_to_the_peak_again_are_no_warning() -> None:
    """A learning rate that a schedule raises again."""
    assert not warnings(2 * ([4.0] * ROUNDS + [1.0] * LONG) + [4.0 * GROWN - 0.1] * LONG)


def test_offers_of_a_warm_up_are_no_warning() -> None:
    rising = [step / LONG for step in range(1, LONG + 1)]
    assert not warnings([*rising, *[1.0] * LONG])


def test_offers_that_dip_while_a_rate_warms_up_are_no_warning() -> None:
    dip = [1.0] * ROUNDS + [0.5] * (SETTLED_ROUNDS - 2 * ROUNDS)
    assert not warnings([*dip, *[3.0] * LONG])


def test_single_large_and_closing_offers_are_no_warning() -> None:
    before = [4.0] * ROUNDS + [1.0] * LONG
    assert not warnings([*before, *[9.0] * (ROUNDS // 2)])
    seen = GrowingOffers()
    for version, each in enumerate(before, 1):
        assert seen.warning(moved(version, each)) is None
    for version in range(LONG):
        assert seen.warning(moved(version, 9.0, closing=True)) is None


def test_offers_that_move_nothing_are_no_warning() -> None:
    assert not warnings([0.0] * LONG)
