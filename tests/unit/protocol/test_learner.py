"""A rank: pulls, merges, holds; trusts only digests, and frees only what nobody needs."""

from __future__ import annotations

import pytest

from mend.protocol import events as ev
from mend.protocol import messages as msg
from mend.protocol.learner import Learner
from mend.protocol.shelf import LearnerOptions
from mend.terms import MS, SECOND, Address, Member, Peer

ME, MINE, THEIRS = Peer(0, 0), Member(0, 10), Member(1, 11)
SEATS = tuple(
    msg.Seat(member, "tcp://127.0.0.1:1", (Address("h", member.rack),)) for member in (MINE, THEIRS)
)
GENESIS = msg.Genesis(SEATS, True, "ab", (("v0",),))


def offer(member: Member, seq: int = 1, base: int = 0) -> msg.Offer:
    return msg.Offer(member, 0, seq, base, 8, 100, 8, ("cc",), base)


def commit(version: int, *shares: tuple[Member, int], digest: str = "v1") -> msg.Commit:
    members = tuple(msg.Share(member, seq, 0, 8, 100, 8) for member, seq in shares)
    return msg.Commit(0, version, members, (), (digest,), "all-in")


class Driven:
    """A learner with its orders' serial counted for it."""

    def __init__(self) -> None:
        self.learner = Learner(ME, MINE, LearnerOptions(100 * MS, True), ("v0",))
        self.serial = 0
        self.now_ns = SECOND

    def orders(
        self, prev: int, *records: msg.Record, serial: int | None = None, **more: object
    ) -> list[ev.Effect]:
        self.serial += 1
        fields = {
            "offers": (), "gathers": (), "settled": (0,), "live": (0, 1), "discarded": (),
            "why": (), "failure": ("", ""), "finish": False,
        } | more  # fmt: skip
        body = msg.RankOrders(serial or self.serial, prev, records, **fields)
        return self.tell(ev.Heard(ME, MINE.incarnation, body))

    def tell(self, event: ev.Event) -> list[ev.Effect]:
        return self.learner.handle(event, self.now_ns)


@pytest.fixture
def begun() -> Driven:
    driven = Driven()
    effects = driven.orders(0, GENESIS)
    assert ev.Publish(0, 0, 0) in effects
    return driven


def of(kind: type, effects: list[ev.Effect]) -> list[ev.Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def gathered(driven: Driven) -> list[ev.Effect]:
    """Both offers are announced, theirs is pulled, the round gathers."""
    offers = (offer(MINE), offer(THEIRS))
    (fetch,) = of(ev.Fetch, driven.orders(1, offers=offers))
    assert isinstance(fetch, ev.Fetch)
    assert fetch.offer == offers[1]
    driven.tell(ev.Fetched(THEIRS, 0, 1))
    return driven.orders(1, offers=offers, gathers=(msg.Gather(0, 1, 1, offers),))


def test_other_bits_of_version_0_are_copied_by_the_digest_of_the_log() -> None:
    driven = Driven()
    other = msg.Genesis(SEATS, True, "ab", (("theirs",),))
    (copy,) = of(ev.Copy, driven.orders(0, other))
    assert copy == ev.Copy(0, 0, "theirs", (Address("h", 1),))
    assert ev.Publish(0, 0, 0) in driven.tell(ev.Copied(0, 0))


def test_a_merge_starts_when_every_payload_is_here(begun: Driven) -> None:
    (merge,) = of(ev.Merge, gathered(begun))
    assert isinstance(merge, ev.Merge)
    assert merge.members == ((MINE, 1), (THEIRS, 1))
    assert merge.weights == (0.5, 0.5)


def test_a_failed_pull_is_tried_again_later_and_not_at_once(begun: Driven) -> None:
    begun.orders(1, offers=(offer(THEIRS),))
    effects = begun.tell(ev.Fetched(THEIRS, 0, 1, error="gone"))
    assert of(ev.Fetch, effects) == []
    due = begun.learner.deadline_ns()
    assert due is not None
    assert due > begun.now_ns
    begun.now_ns += SECOND
    assert len(of(ev.Fetch, begun.tell(ev.Tick()))) == 1


def test_the_own_result_becomes_the_version_only_with_the_digest_of_the_log(begun: Driven) -> None:
    gathered(begun)
    begun.tell(ev.Merged(0, 1, 1, "v1"))
    assert ev.Publish(0, 1, 1) in begun.orders(1, commit(1, (MINE, 1), (THEIRS, 1)))


def test_a_result_that_differs_is_thrown_away_and_the_state_copied(begun: Driven) -> None:
    gathered(begun)
    begun.tell(ev.Merged(0, 1, 1, "wrong"))
    effects = begun.orders(1, commit(1, (MINE, 1), (THEIRS, 1)))
    assert ev.Forget(0, 1, 1) in effects
    assert of(ev.Publish, effects) == []
    assert of(ev.Copy, effects) == [ev.Copy(0, 1, "v1", (Address("h", 1),))]


def test_a_payload_is_kept_until_every_live_rack_holds_the_result(begun: Driven) -> None:
    gathered(begun)
    begun.tell(ev.Merged(0, 1, 1, "v1"))
    decided = begun.orders(1, commit(1, (MINE, 1), (THEIRS, 1)))
    assert of(ev.Free, decided) == []
    assert of(ev.Free, begun.orders(2, settled=(0,))) == []
    freed = of(ev.Free, begun.orders(2, settled=(1,)))
    assert freed == [ev.Free(MINE, 0, 1), ev.Free(THEIRS, 0, 1)]


def test_records_that_come_twice_count_once(begun: Driven) -> None:
    gathered(begun)
    begun.tell(ev.Merged(0, 1, 1, "v1"))
    first = begun.orders(1, commit(1, (MINE, 1), (THEIRS, 1)))
    again = begun.orders(0, GENESIS, commit(1, (MINE, 1), (THEIRS, 1)))
    assert len(of(ev.Told, first)) == 1
    assert of(ev.Told, again) == []
    assert begun.learner.decided == 2


def test_orders_that_were_overtaken_are_not_read(begun: Driven) -> None:
    begun.orders(1, serial=50)
    assert of(ev.Fetch, begun.orders(1, serial=49, offers=(offer(THEIRS),))) == []


def test_orders_of_a_stranger_or_an_earlier_life_are_not_read(begun: Driven) -> None:
    body = msg.RankOrders(99, 1, (), (offer(THEIRS),), (), (0,), (0, 1), (), (), ("", ""), False)
    assert of(ev.Fetch, begun.tell(ev.Heard(Peer(1, 0), 11, body))) == []
    assert of(ev.Fetch, begun.tell(ev.Heard(ME, 9, body))) == []
    assert len(of(ev.Fetch, begun.tell(ev.Heard(ME, 10, body)))) == 1


def test_an_index_from_the_network_never_reaches_a_list(begun: Driven) -> None:
    wild = msg.Offer(THEIRS, 77, 1, 0, 8, 100, 8, ("cc",), 0)
    assert of(ev.Fetch, begun.orders(1, offers=(wild,))) == []
    assert of(ev.Discard, begun.orders(1, discarded=((77, 1),))) == []


def test_versions_nobody_needs_are_forgotten(begun: Driven) -> None:
    for version in range(1, 5):
        begun.orders(version, commit(version, (THEIRS, version), digest=f"v{version}"))
        begun.tell(ev.Copied(0, version))
    assert begun.learner.shelves[0].held == {0, 3, 4}  # 0 is trained on
    assert ev.Forget(0, 0) in begun.tell(ev.Applied(0, 4, 0))


def test_an_old_offer_that_is_dropped_is_discarded_by_its_rack(begun: Driven) -> None:
    begun.tell(ev.Captured(0, 1, 0, 8, 100, 8))
    drop = msg.Drop(0, (msg.Ended(MINE, 1),), "older than max_age")
    assert ev.Discard(0, 1) in begun.orders(1, drop)
