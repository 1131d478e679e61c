"""A sharded attempt on one rank: pull, merge, serve, pull, slice by slice; and what ends it."""

from __future__ import annotations

from mend.consensus.log import LogState
from mend.coordination.events import FetchSlice, FreeSlices, MergeSlice, SliceFetched, SliceMerged
from mend.coordination.messages import SLICES_EACH, MergeProposal, Sliced
from mend.coordination.slices import KEPT_NS, Slices
from mend.events.kinds import MergeFailed
from mend.types import SECOND, Peer
from tests.unit.coordination.nouns import genesis, member, offer

ME, MINE = Peer(1, 0), member(1)
WEIGHTS = (0.25, 0.25, 0.5)
NAMES = ((member(0), 1), (member(1), 1), (member(2), 1))
COUNT = 6
"""Slices in all: each of three members has two."""
ALL = (SLICES_EACH,) * 3
HOLDERS = tuple(genesis(4).roster[rack].lanes for rack in range(4))


def log() -> LogState:
    state = LogState()
    state.take(genesis(4))
    return state


def proposal(attempt: int = 1, version: int = 1, merged: tuple[int, ...] = (), *,
           sharded: bool = True) -> MergeProposal:  # fmt: skip
    """Of racks 0 to 2; rack 3 is no member."""
    members = tuple(offer(rack) for rack in range(3))
    return MergeProposal(0, version, attempt, members, (), sharded, merged)


def begun(me: Peer = ME) -> Slices:
    slices = Slices()
    assert slices.begin(proposal(), member(me.rack)) == []
    return slices


def moved(slices: Slices, me: Peer = ME, now_ns: int = 0) -> list[FetchSlice | MergeSlice]:
    return slices.move(log(), me, WEIGHTS, now_ns)


def landed(slices: Slices, *pulls: tuple[int, int], error: str = "", now_ns: int = 0) -> None:
    for rack, seq in pulls:
        event = SliceFetched(0, 1, 1, rack, seq, error)
        assert len(slices.on_fetched(event, False, now_ns)) == (error != "")


def fetch(position: int, rack: int, seq: int) -> FetchSlice:
    return FetchSlice(0, 1, 1, position, COUNT, member(rack), seq, HOLDERS[rack])


def merge(position: int) -> MergeSlice:
    return MergeSlice(0, 1, 1, position, COUNT, NAMES, WEIGHTS)


def test_a_member_pulls_its_slices_of_the_others_merges_them_and_then_pulls_theirs() -> None:
    slices = begun()
    assert moved(slices) == [fetch(2, 2, 1), fetch(2, 0, 1)], "of the racks behind this one first"
    assert moved(slices) == [], "they are under way"
    landed(slices, (0, 1))
    assert moved(slices) == [fetch(3, 0, 1)], "one behind the other"
    landed(slices, (2, 1))
    assert moved(slices) == [merge(2), fetch(3, 2, 1)], "merged while the next is pulled"
    landed(slices, (0, 1), (2, 1))
    assert moved(slices) == [], "one merge at a time"
    assert slices.report(0) is None
    assert slices.on_merged(SliceMerged(0, 1, 1), ME) == []
    assert slices.report(0) == Sliced(0, 1, 1, 1)
    assert moved(slices) == [merge(3)]
    assert slices.on_merged(SliceMerged(0, 1, 1), ME) == []
    assert slices.report(0) == Sliced(0, 1, 1, 2)
    assert slices.report(1) is None, "nobody has to know who holds the version"
    assert moved(slices) == [], "the others have not said that they have merged"
    slices.news(proposal(merged=(0, 2, 2)))
    assert moved(slices) == [fetch(4, 2, 0)]
    landed(slices, (2, 0))
    assert moved(slices) == [fetch(5, 2, 0)]
    landed(slices, (2, 0))
    assert moved(slices) == []
    assert not slices.whole(1, 1)
    slices.news(proposal(merged=ALL))
    assert moved(slices) == [fetch(0, 0, 0)]
    landed(slices, (0, 0))
    assert not slices.whole(1, 1)
    assert moved(slices) == [fetch(1, 0, 0)]
    landed(slices, (0, 0))
    assert slices.whole(1, 1)
    assert not slices.whole(1, 2)
    assert not slices.whole(2, 1)


def test_merged_slices_wait_while_payloads_of_most_others_are_missing() -> None:
    """All wait for the rack that merges last: what it lacks goes over the links first."""
    slices = begun()
    moved(slices)
    slices.news(proposal(merged=(1, 0, 1)))
    landed(slices, (0, 1))
    assert moved(slices) == [fetch(3, 0, 1)], "half of a payload is none"
    landed(slices, (0, 1))
    assert moved(slices) == [fetch(4, 2, 0), fetch(0, 0, 0)], "beside the payload of one of two"
    landed(slices, (0, 0))
    assert moved(slices) == [], "its second is not merged"


def test_a_payload_that_fails_holds_up_merged_slices_no_longer_than_the_own_merge() -> None:
    slices = begun()
    moved(slices)
    slices.news(proposal(merged=(2, 0, 0)))
    landed(slices, (0, 1), (2, 1), error="stalled")
    retry_ns = max(slices.dues_ns())
    assert moved(slices, now_ns=retry_ns) == [fetch(2, 2, 1), fetch(2, 0, 1)]
    landed(slices, (0, 1), (2, 1), now_ns=retry_ns)
    assert moved(slices) == [merge(2), fetch(3, 2, 1), fetch(3, 0, 1)]
    landed(slices, (2, 1), now_ns=retry_ns)
    assert moved(slices) == [fetch(0, 0, 0)]


def test_rank_outside_the_gather_pulls_merged_slices_and_reports_nothing() -> None:
    me = Peer(3, 0)
    slices = begun(me)
    assert moved(slices, me) == []
    slices.news(proposal(merged=ALL))
    assert moved(slices, me) == [fetch(0, 0, 0), fetch(2, 1, 0), fetch(4, 2, 0)]
    landed(slices, (0, 0), (1, 0), (2, 0))
    assert moved(slices, me) == [fetch(1, 0, 0), fetch(3, 1, 0), fetch(5, 2, 0)]
    landed(slices, (0, 0), (1, 0), (2, 0))
    assert slices.whole(1, 1)
    assert slices.report(0) is None


def test_a_pull_that_fails_is_tried_again_later_each_time() -> None:
    slices = begun()
    moved(slices)
    landed(slices, (0, 1), error="stalled")
    (due_ns,) = slices.dues_ns()
    assert due_ns > 0
    assert moved(slices, now_ns=due_ns - 1) == []
    assert [type(effect) for effect in moved(slices, now_ns=due_ns)] == [FetchSlice]
    assert slices.dues_ns() == [], "a deadline that has passed must not wake us again"
    landed(slices, (0, 1), error="stalled", now_ns=due_ns)
    assert slices.dues_ns()[0] - due_ns == 2 * due_ns
    moved(slices, now_ns=3 * due_ns)
    landed(slices, (0, 1), now_ns=3 * due_ns)
    moved(slices, now_ns=3 * due_ns)
    landed(slices, (0, 1), error="stalled", now_ns=3 * due_ns)
    assert slices.dues_ns()[0] - 3 * due_ns == due_ns, "a slice came through meanwhile"


def test_behind_the_decision_a_pull_that_fails_ends_it_as_the_whole_can_be_copied() -> None:
    slices = begun()
    moved(slices)
    slices.on_fetched(SliceFetched(0, 1, 1, 0, 1, "gone"), True, 0)
    assert not slices.going(1)
    assert moved(slices, now_ns=SECOND) == []


def test_a_member_without_a_seat_or_a_merge_without_a_result_is_a_failure() -> None:
    seats = genesis(4)
    state = LogState()
    state.take(seats)
    del state.seats[2]
    slices = begun()
    assert slices.move(state, ME, WEIGHTS, 0) == []
    assert slices.report(0) == Sliced(0, 1, 1, failed=True)
    slices = begun()
    moved(slices)
    landed(slices, (0, 1), (2, 1))
    moved(slices)
    (note,) = slices.on_merged(SliceMerged(0, 1, 1, "no number"), ME)
    assert note.event == MergeFailed(0, 1, "no number")
    assert slices.report(0) == Sliced(0, 1, 1, failed=True)
    slices = begun()
    slices.failed(1, 2)
    assert slices.going(1), "that was of another attempt"
    slices.failed(1, 1)
    assert slices.report(0) == Sliced(0, 1, 1, failed=True)


def test_slices_of_another_attempt_are_ignored() -> None:
    slices = begun()
    moved(slices)
    assert slices.begin(proposal(attempt=2), MINE) == [FreeSlices(0, 1, 1)]
    landed(slices, (0, 1), (2, 1))
    effects = moved(slices)
    assert [type(effect) for effect in effects] == [FetchSlice, FetchSlice]
    assert {effect.attempt for effect in effects} == {2}
    slices.news(proposal(merged=ALL))
    assert moved(slices) == [], "news of the first"
    slices.on_merged(SliceMerged(0, 1, 1), ME)
    assert slices.report(0) is None


def test_a_mesh_takes_the_place_of_slices() -> None:
    slices = begun()
    assert slices.begin(proposal(attempt=2, sharded=False), MINE) == [FreeSlices(0, 1, 1)]
    assert moved(slices) == []
    assert not slices.going(1)


def test_slices_are_kept_until_all_have_the_result_or_it_is_old() -> None:
    slices = begun()
    assert slices.tidy(0, 0, 0, 2, 5) == [], "nothing is decided"
    assert slices.tidy(0, 1, 0, 2, 10) == []
    assert slices.tidy(0, 1, 0, 2, 10 + KEPT_NS) == []
    assert slices.tidy(0, 1, 0, 2, 11 + KEPT_NS) == [FreeSlices(0, 1, 1)]
    slices = begun()
    assert slices.tidy(0, 1, 1, 2, 10) == [FreeSlices(0, 1, 1)]
    slices = begun()
    assert slices.tidy(0, 2, 0, 2, 10) == []
    assert not slices.going(1), "a newer version is decided"
    assert slices.tidy(0, 3, 0, 2, 10) == [FreeSlices(0, 1, 1)]
    assert begun().undo(0, 0) == [FreeSlices(0, 1, 1)]
    assert begun().undo(0, 1) == []
