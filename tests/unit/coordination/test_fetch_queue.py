"""Which payload is fetched when: a few at a time, urgent ones first, failed ones later."""

from __future__ import annotations

from collections import Counter

import pytest

from mend.consensus.records import Offer
from mend.coordination.events import Fetch
from mend.coordination.fetch_queue import (
    FETCHES_MAX,
    RETRY_NS_MAX,
    RETRY_NS_MIN,
    SENDERS_MAX,
    FetchQueue,
    Key,
)
from mend.types import SECOND, Address
from tests.unit.coordination.nouns import offer


def key(of: Offer) -> Key:
    return (of.member, of.fragment, of.seq)


def pulls_of(*offers: Offer) -> FetchQueue:
    pulls = FetchQueue()
    for each in offers:
        pulls.want(key(each), each, mine=False)
    return pulls


def holders(rack: int) -> tuple[Address, ...]:
    return (Address(f"rack{rack}", 1),)


def started(
    pulls: FetchQueue, now_ns: int = 0, named: frozenset[Key] = frozenset(), me: int = 0
) -> list[Offer]:
    fetches: list[Fetch] = pulls.start(now_ns, named, me, holders)
    assert all(fetch.holders == holders(fetch.offer.member.rack) for fetch in fetches)
    return [fetch.offer for fetch in fetches]


def test_wanted_offer_is_fetched_once() -> None:
    pulls = pulls_of(offer(1))
    assert started(pulls) == [offer(1)]
    assert pulls.flying(key(offer(1)))
    assert started(pulls) == []
    assert pulls.end_pull(key(offer(1)), "", 0)
    assert pulls.here(key(offer(1)))
    assert started(pulls) == []
    assert pulls.held() == [key(offer(1))]


def test_own_offers_are_here_from_the_start() -> None:
    pulls = FetchQueue()
    pulls.want(key(offer(0)), offer(0), mine=True)
    assert pulls.here(key(offer(0)))
    assert started(pulls) == []


def test_a_few_at_a_time_rounds_that_gather_first_then_the_oldest() -> None:
    offers = [offer(rack, seq, base=seq) for rack in (3, 2, 1) for seq in (2, 1)]
    pulls = pulls_of(*offers)
    first = started(pulls, named=frozenset({key(offer(3, 2))}))
    assert len(first) == FETCHES_MAX
    assert [(o.member.rack, o.seq) for o in first] == [(3, 2), (1, 1), (2, 1), (3, 1)]
    pulls.end_pull(key(offer(3, 1)), "", 0)
    assert [(o.member.rack, o.seq) for o in started(pulls)] == [(1, 2)]
    pulls.end_pull(key(offer(2, 1)), "", 0)
    assert [(o.member.rack, o.seq) for o in started(pulls)] == [(2, 2)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("racks", [4, 8, SENDERS_MAX + 1])
def test_no_link_is_idle_while_a_rack_lacks_its_payload(racks: int, apart: bool) -> None:
    """Racks that all pulled the same few first would have the links of the others wait: eight took
    twice the time that the bytes need. `apart`: offers become known one by one, in one order."""
    asked = Counter[int]()
    for me in range(racks):
        queue = FetchQueue()
        for rack in range(racks):
            queue.want(key(offer(rack)), offer(rack), mine=rack == me)
            if apart:
                asked.update(o.member.rack for o in started(queue, me=me))
        asked.update(o.member.rack for o in started(queue, me=me))
    assert asked == dict.fromkeys(range(racks), racks - 1)


def test_very_many_racks_are_each_asked_by_equally_many() -> None:
    racks = 2 * SENDERS_MAX
    asked = Counter[int]()
    for me in range(racks):
        pulls = pulls_of(*[offer(rack) for rack in range(racks) if rack != me])
        asked.update(o.member.rack for o in started(pulls, me=me))
    assert asked == dict.fromkeys(range(racks), SENDERS_MAX)


def test_offers_of_several_fragments_are_pulled_around_the_racks() -> None:
    """Three racks, four offers each: all begin with another one, and each is asked for as much."""
    asked = Counter[int]()
    for me in range(3):
        pulls = pulls_of(*[offer(rack, seq) for rack in range(3) if rack != me for seq in range(4)])
        asked.update(o.member.rack for o in started(pulls, me=me))
    assert asked == dict.fromkeys(range(3), FETCHES_MAX + 1)


def test_a_failed_pull_is_tried_again_each_time_twice_as_late() -> None:
    pulls, now_ns, wait_ns = pulls_of(offer(1)), 0, RETRY_NS_MIN
    for _ in range(8):
        assert started(pulls, now_ns) == [offer(1)]
        assert pulls.end_pull(key(offer(1)), "gone", now_ns)
        assert not pulls.here(key(offer(1)))
        assert pulls.dues_ns() == [now_ns + wait_ns]
        assert started(pulls, now_ns + wait_ns - 1) == []
        now_ns, wait_ns = now_ns + wait_ns, min(2 * wait_ns, RETRY_NS_MAX)
    assert wait_ns == RETRY_NS_MAX


def test_a_deadline_that_passed_while_all_lanes_are_busy_wakes_nobody() -> None:
    failed, *others = [offer(1, seq) for seq in range(1, FETCHES_MAX + 2)]
    pulls = pulls_of(failed)
    started(pulls)
    pulls.end_pull(key(failed), "gone", 0)
    for each in others:
        pulls.want(key(each), each, mine=False)
    assert started(pulls, 0) == others
    assert started(pulls, SECOND) == []
    assert pulls.dues_ns() == []
    pulls.end_pull(key(others[0]), "", SECOND)
    assert started(pulls, SECOND) == [failed]


def test_a_newer_header_does_not_start_the_pull_again() -> None:
    pulls = pulls_of(offer(1))
    started(pulls)
    pulls.want(key(offer(1)), offer(1, applied=3), mine=False)
    assert started(pulls) == []
    pulls.end_pull(key(offer(1)), "gone", 0)
    assert started(pulls, SECOND) == [offer(1, applied=3)]


def test_bytes_under_way_are_freed_when_they_land() -> None:
    here, flying = offer(1), offer(2)
    pulls = pulls_of(here, flying)
    started(pulls)
    pulls.end_pull(key(here), "", 0)
    assert pulls.forget(key(here)), "to be freed now"
    assert not pulls.forget(key(flying)), "nothing is here to be freed"
    assert not pulls.end_pull(key(flying), "", 0), "nobody wants it any more"
    assert not pulls.forget(key(flying))
    assert pulls.wanted() == []
