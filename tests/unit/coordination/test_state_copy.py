"""One rank's side of copying a training state."""

from __future__ import annotations

from typing import Any

from mend.consensus.log import LogState
from mend.coordination.events import (
    AskedState,
    CopyState,
    FreeState,
    NoState,
    StateCopied,
    StateTaken,
)
from mend.coordination.messages import StateCopy
from mend.coordination.state_copy import TRIES_MAX, StateCopies
from mend.types import SECOND, Peer
from tests.unit.coordination.nouns import digest, genesis, log_of, member, rank_orders, roster

JOINER, DONOR = member(2), member(0)


def log(*racks: int) -> LogState:
    seated = racks or (0, 1, 2)
    return log_of(genesis(2), roster(2, seated, non_voters=(2,) if 2 in seated else ())).appended


def copy(donor: int = 0, step: int = 7, refused: str = "") -> StateCopy:
    return StateCopy(JOINER, member(donor), step, (10,), (digest(step),), refused)


def joiner(found: StateCopy | None = None) -> StateCopies:
    made = StateCopies(Peer(2, 0), wants=True)
    made.read(rank_orders(1, copy=found), log())
    return made


def test_a_donor_serves_its_copy_as_long_as_it_is_asked() -> None:
    donor = StateCopies(Peer(0, 0))
    donor.on_taken(StateTaken(JOINER, 7, 10, digest(7)))
    asked: dict[str, Any] = {"asked": (JOINER,)}
    assert donor.read(rank_orders(1, **asked), log()) == [AskedState((JOINER,))]
    assert donor.read(rank_orders(1, **asked), log()) == []
    assert list(donor.given) == [JOINER]
    assert donor.read(rank_orders(2), log()) == [FreeState(JOINER), AskedState(())]
    assert donor.given == {}


def test_a_refusal_is_said_as_long_as_the_rack_is_there() -> None:
    donor = StateCopies(Peer(0, 0))
    donor.on_taken(StateTaken(JOINER, 7, 0, "", "a hook"))
    donor.read(rank_orders(1), log())
    assert [each.refused for each in donor.given.values()] == ["a hook"]
    donor.read(rank_orders(2), log(0, 1))
    assert donor.given == {}


def test_a_joiner_pulls_its_part_once() -> None:
    twin = joiner(copy())
    lane = log().seats[0].lanes[0]
    assert twin.pull(log(), 0) == [CopyState(DONOR, 7, 10, digest(7), lane)]
    assert twin.pull(log(), 0) == [], "it is under way"
    assert twin.on_copied(StateCopied(DONOR, 7, digest(7)), 0) == []
    assert twin.pull(log(), 0) == [], "it is here"


def test_a_joiner_that_asks_once_more_pulls_once_more() -> None:
    """Another rank of its rack has pulled what another donor copied."""
    twin = joiner(copy())
    twin.pull(log(), 0)
    twin.on_copied(StateCopied(DONOR, 7, digest(7)), 0)
    twin.read(rank_orders(2, copy=copy(1, 9)), log())
    assert twin.pull(log(), 0) == []
    twin.set_wanted(True)
    (pull,) = twin.pull(log(), 0)
    assert (pull.donor, pull.step) == (member(1), 9)


def test_joiner_that_does_not_wait_pulls_nothing() -> None:
    twin = joiner(copy())
    twin.wants = False
    assert twin.pull(log(), 0) == []


def test_a_pull_that_fails_is_tried_again_later_and_another_donors_at_once() -> None:
    twin, now_ns = joiner(copy()), 0
    for number in range(TRIES_MAX):
        assert len(twin.pull(log(), now_ns)) == 1
        (note,) = twin.on_copied(StateCopied(DONOR, 7, digest(7), "stalled"), now_ns)
        assert "stalled" in str(note)
        assert twin.pull(log(), now_ns) == []
        assert bool(twin.due_ns()) == (number + 1 < TRIES_MAX)
        now_ns += 10 * SECOND
    assert twin.pull(log(), now_ns) == [], "this one is not to be had"
    twin.read(rank_orders(2, copy=copy(1, 9)), log())
    (pull,) = twin.pull(log(), now_ns)
    assert (pull.donor, pull.step) == (member(1), 9)


def test_a_refusal_ends_it_with_the_reason() -> None:
    twin = joiner(copy(step=9, refused="optimizer['hook'] is a function"))
    (ended,) = twin.pull(log(), 0)
    assert ended == NoState("rack 0 cannot give it: optimizer['hook'] is a function", step=9)
    assert twin.pull(log(), 0) == []


def test_a_donor_that_has_left_is_not_asked() -> None:
    twin = joiner(copy())
    twin.pull(log(), 0)
    twin.on_copied(StateCopied(DONOR, 7, digest(7), "the connection broke"), 0)
    assert twin.due_ns() != []
    assert twin.pull(log(1, 2), 10 * SECOND) == []
    assert twin.due_ns() == [], "or it would be due for ever"


def test_ranks_of_equal_bytes_are_told_that_one_pull_is_enough() -> None:
    """As under DDP."""
    seated = log_of(genesis(2, ranks=2), roster(2, (0, 1, 2), ranks=2, non_voters=(2,))).appended
    for digests, shared in (((digest(1), digest(1)), True), ((digest(1), digest(2)), False)):
        found = StateCopy(JOINER, DONOR, 7, (10, 10), digests)
        twin = StateCopies(Peer(2, 1), wants=True)
        twin.read(rank_orders(1, copy=found), seated)
        (pull,) = twin.pull(seated, 0)
        assert (pull.holder, pull.shared) == (seated.seats[0].lanes[1], shared)
