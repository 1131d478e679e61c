"""Who is in: one change at a time, and never one that could cost bytes which are decided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mend.consensus.log import LogState, voters_of
from mend.consensus.quorum import hold
from mend.consensus.records import EVICTED, Mitigation, Record, Roster
from mend.coordination.member_view import MemberView
from mend.coordination.membership import SILENT_DETECTS, MembershipContext, next_roster
from mend.types import SECOND, WITNESS, Member
from tests.unit.coordination.nouns import (
    commit,
    genesis,
    hello,
    lineage,
    log_of,
    member,
    offer,
    report,
    roster,
    seat,
)

NOW_NS, SEAT_TIMEOUT_NS, DETECT_NS = 1000 * SECOND, 60 * SECOND, 2 * SECOND
LONG_NS = SILENT_DETECTS * DETECT_NS
DONE: dict[str, Any] = {"leaving": True, "idle": True}


class House:
    """A job of three racks: all live, none wants anything. Version 1 is decided."""

    def __init__(self, *records: Record, racks: int = 3, witness: bool = False) -> None:
        named = not witness or racks % 2 == 0
        begin = replace(genesis(racks, witness=witness), non_voters=() if named else (WITNESS,))
        self.log: LogState = log_of(begin, commit(1, [offer(0)]), *records).appended
        self.views = {
            rack: MemberView(seat.member, NOW_NS, NOW_NS, report(1, versions=(1,)))
            for rack, seat in self.log.seats.items()
        }
        if witness:
            self.views[WITNESS] = MemberView(member(WITNESS), NOW_NS, NOW_NS)
        self.absent: set[int] = set()
        self.fields: dict[str, Any] = {
            "offers": (), "joining": {}, "seat_timeout_ns": SEAT_TIMEOUT_NS, "detect_ns": DETECT_NS,
            "demotes": False, "ready": [view.member for view in self.views.values()],
        }  # fmt: skip

    def say(self, rack: int, **changes: Any) -> None:
        view = self.views[rack]
        view.report = report(2, **{"versions": (1,), **changes})
        view.gone = view.report.gone
        if view.gone:
            self.absent.add(rack)

    def silent(self, rack: int, since_ns: int) -> None:
        self.views[rack].lively_ns = NOW_NS - since_ns
        self.absent.add(rack)

    def joins(self, rack: int, life: int = 1) -> None:
        self.fields["joining"] = {**self.fields["joining"], rack: hello(rack, racks=3, life=life)}

    def next(self) -> Roster | None:
        live = frozenset(self.views.keys() - self.absent)
        return next_roster(
            MembershipContext(
                log=self.log, views=self.views, live=live, now_ns=NOW_NS, **self.fields
            )
        )


def seats_of(change: Roster | None) -> list[Member]:
    return [seat.member for seat in change.members]


# -------------------------------------------------------------- leaving


def test_nothing_changes_without_a_reason() -> None:
    assert House().next() is None


def test_the_job_ends_when_every_live_rack_is_done_and_holds_everything() -> None:
    house = House()
    for rack in range(3):
        house.say(rack, **DONE)
    end = house.next()
    assert (end.members, end.number, end.reason) == ((), 1, "all racks are done")
    house.say(1, **DONE, versions=(0,))
    assert house.next() is None, "one of them still needs what is decided"
    house.silent(1, LONG_NS)
    assert seats_of(house.next()) == [], "the dead are not waited for"
    house.fields["offers"] = [(2, 0)]
    assert house.next() is None, "an open offer is work that would be lost"
    house.fields["offers"] = [(1, 0)]
    assert seats_of(house.next()) == [], "that of a dead rack is lost anyhow"


def test_the_end_waits_for_a_rack_that_fell_silent_a_moment_ago_until_one_is_in_a_hurry() -> None:
    """Its link may flap: it would keep its last steps for itself, and end unmerged."""
    house = House()
    for rack in (0, 2):
        house.say(rack, **DONE)
    house.silent(1, LONG_NS - 1)
    assert house.next() is None, "it may be back with its last offers"
    house.say(1, **DONE)
    end = house.next()
    assert (end.members, end.non_voters) == ((), (1,)), "it has all, and may not hear of the end"
    house.say(1)
    house.silent(1, LONG_NS)
    assert seats_of(house.next()) == []
    house.silent(1, 0)
    house.say(0, **DONE, hurry=True)
    assert seats_of(house.next()) == [], "it has waited for as long as its script allows"


def test_end_behind_take_over_waits_for_silent_former_coordinator() -> None:
    """The new one has never had a report of it. It ended the job at once, and the work of a rack
    whose link was away for three seconds stayed unmerged."""
    house = House()
    for rack in (0, 2):
        house.say(rack, **DONE)
    house.views[1].report = None
    house.silent(1, LONG_NS - 1)
    assert house.next() is None
    house.silent(1, LONG_NS)
    assert seats_of(house.next()) == []


def test_the_job_does_not_end_where_those_that_are_heard_cannot_decide_it() -> None:
    """Its end would be decided when the silent are back, in the middle of their work."""
    house = House()
    house.say(0, **DONE)
    for rack in (1, 2):
        house.silent(rack, LONG_NS)
    assert house.next() is None
    house.absent.remove(2)
    assert house.next() is None, "it is back, and trains"
    house.say(2, **DONE)
    assert seats_of(house.next()) == []


def test_rack_that_is_gone_or_in_a_hurry_leaves_alone() -> None:
    for said in ({"gone": True}, {**DONE, "hurry": True}):
        house = House()
        house.say(1, **said)
        change = house.next()
        assert seats_of(change) == [member(0), member(2)], said
        assert change.reason == "rack 1 left"
    for said in ({**DONE, "hurry": True, "idle": False}, {"hurry": True, "idle": True}):
        house = House()
        house.say(1, **said)
        assert house.next() is None, said


# -------------------------------------------------------------- coming


def test_a_newcomer_is_seated_as_a_learner() -> None:
    """It holds nothing: a vote of it would make quorums without the bytes."""
    house = House(roster(1, [0, 1]))
    house.joins(2)
    change = house.next()
    assert seats_of(change) == [member(0), member(1), member(2, life=1)]
    assert (change.non_voters, change.number) == ((2,), 2)
    assert change.reason == "rack 2 joins"


def test_a_rack_that_comes_back_loses_the_vote_of_its_former_life() -> None:
    house = House()
    house.joins(1)
    change = house.next()
    assert seats_of(change) == [member(0), member(1, life=1), member(2)]
    assert (change.non_voters, change.reason) == ((1,), "rack 1 is back")


def test_a_learner_votes_when_it_holds_what_is_decided_and_is_live() -> None:
    learning = roster(1, [0, 1, 2], non_voters=[2])
    """Nearly: what is decided this very moment comes to it a moment later, every time."""
    for versions, present, votes in (((1,), True, True), ((0,), True, True), ((-1,), True, False),
                                     ((1,), False, False)):  # fmt: skip
        house = House(learning)
        house.say(2, versions=versions)
        if not present:
            house.silent(2, 0)
        change = house.next()
        assert (change is not None) is votes, (versions, present)
        if change is not None:
            assert (change.non_voters, change.reason) == ((), "rack 2 holds everything")
            assert len(change.members) == 3
    unheard = House(learning)
    unheard.views[2].report = None
    assert unheard.next() is None


# -------------------------------------------------------------- silence


def test_silence_costs_the_seat_after_evict_ns() -> None:
    house = House()
    house.silent(2, SEAT_TIMEOUT_NS - 1)
    assert house.next() is None
    house.silent(2, SEAT_TIMEOUT_NS)
    change = house.next()
    assert seats_of(change) == [member(0), member(1)]
    assert change.reason == "rack 2 was absent for too long"


def test_silent_rack_with_eviction_off_keeps_its_seat() -> None:
    """0 is said by the settings, and in lockstep by the coordinator."""
    house = House()
    house.fields["seat_timeout_ns"] = 0
    house.silent(2, 1000 * SEAT_TIMEOUT_NS)
    assert house.next() is None


def test_a_silent_witness_keeps_its_seat() -> None:
    house = House(witness=True)
    house.silent(WITNESS, SEAT_TIMEOUT_NS)
    assert house.next() is None


# -------------------------------------------------------------- never at the cost of bytes


def test_silent_rack_keeps_its_seat_while_the_remaining_quorum_lacks_the_bytes() -> None:
    """Racks 0 and 1 hold version 1. Without rack 0, rack 2 is not the lower of two, but 1 is."""
    house = House()
    house.say(2, versions=(0,))
    house.silent(0, SEAT_TIMEOUT_NS)
    assert seats_of(house.next()) == [member(1), member(2)]
    house = House()
    house.say(1, versions=(0,))
    house.silent(0, SEAT_TIMEOUT_NS)
    assert house.next() is None, "rack 1 alone could decide without version 1"
    house.say(1, versions=(1,))
    assert seats_of(house.next()) == [member(1), member(2)], "once it has it"


def test_every_fragment_counts() -> None:
    begin = genesis(3, fragments=2)
    house = House()
    house.log = log_of(begin, commit(1, [offer(0, fragment=1)], fragment=1)).appended
    for rack, versions in ((0, (0, 1)), (1, (0, 0)), (2, (0, 1))):
        house.say(rack, versions=versions)
    house.silent(0, SEAT_TIMEOUT_NS)
    assert house.next() is None
    house.say(1, versions=(0, 1))
    assert house.next() is not None


def test_the_bytes_of_a_former_life_are_gone_with_it() -> None:
    """Racks 0 and 1 hold version 1, rack 1 was started again: only rack 0 has it now."""
    house = House(racks=3)
    house.say(2, versions=(0,))
    house.joins(1)
    change = house.next()
    assert change is not None, "voters 0 and 2: rack 0 is in every quorum"
    house = House(racks=3)
    house.say(0, versions=(0,))
    house.joins(1)
    assert house.next() is None, "voters 0 and 2: rack 0 alone could decide without version 1"


def test_the_last_voter_stays() -> None:
    house = House(roster(1, [0]))
    house.say(0, gone=True)
    assert house.next() is None
    witnessed = House(roster(1, [0], witness=True), witness=True)
    witnessed.say(0, gone=True)
    assert witnessed.next() is None, "a witness alone holds nothing"


RACKS = st.integers(0, 2)


@given(
    st.lists(st.tuples(RACKS, st.integers(0, 1)), max_size=3), st.sets(RACKS), st.sets(RACKS),
    st.sets(RACKS), st.sets(RACKS, max_size=2), st.booleans(),
)  # fmt: skip
def test_any_change_moves_few_votes_and_keeps_every_decided_version_reachable(
    held: Iterable[tuple[int, int]],
    silent: set[int],
    gone: set[int],
    joining: set[int],
    non_voters: set[int],
    witness: bool,
) -> None:
    """One rack's, or those of all that are silent, and the witness's, which follows the rule."""
    house = House(
        roster(1, range(3), non_voters=sorted(non_voters), witness=witness), witness=witness
    )
    house.fields["demotes"] = True
    for rack, version in held:
        house.say(rack, versions=(version,))
    for rack in sorted(gone):
        house.say(rack, gone=True, versions=house.views[rack].report.versions)
    for rack in sorted(silent):
        house.silent(rack, SEAT_TIMEOUT_NS)
    for rack in sorted(joining):
        house.joins(rack)
    change = house.next()
    if change is None or not change.members:
        return
    log = log_of(genesis(3, witness=witness), commit(1, [offer(0)])).appended
    log.take(replace(change, number=1))
    changed = {acceptor for acceptor in log.voters ^ house.log.voters if acceptor.rack != WITNESS}
    former = {acceptor.rack for acceptor in changed if acceptor not in log.voters}
    assert len(changed) <= 1 or former <= silent
    holders = {
        house.views[seat.member.rack].member
        for seat in change.members
        if (known := house.views[seat.member.rack]).member == seat.member
        and known.report is not None
        and known.report.versions == (1,)
    }
    assert hold(holders, log.voters)
    assert change.number == house.log.roster_number + 1
    assert [seat.member.rack for seat in change.members] == sorted(log.seats)
    assert seat(0) in change.members or 0 in joining | silent | gone


# -------------------------------------------------------------- votes


class Votes(House):
    """Votes move. Everybody has been steady for long."""

    def __init__(self, *records: Record, racks: int = 3, witness: bool = False) -> None:
        super().__init__(*records, racks=racks, witness=witness)
        self.fields["demotes"] = True

    def voters(self) -> list[int] | None:
        """Of the next roster; None: nothing changes."""
        change = self.next()
        if change is None:
            return None
        return sorted(m.rack for m in voters_of(change.members, change.non_voters, change.witness))


def test_a_silent_rack_loses_its_vote_at_once_where_hold_needs_it() -> None:
    """Two racks and a witness: the other rack alone is held by no quorum of the three."""
    for lost, left in ((0, 1), (1, 0)):
        house = Votes(racks=2, witness=True)
        house.silent(lost, DETECT_NS)
        change = house.next()
        assert seats_of(change) == [member(0), member(1)], "it keeps its seat"
        assert change.non_voters == (lost, WITNESS), "beside one rack a witness is of no use"
        assert change.reason == f"rack {lost} is silent"
        assert house.voters() == [left]


def test_racks_of_a_lineage_decide_with_a_quorum_once_each_quorum_holds_everything() -> None:
    anew = replace(lineage(5, [0, 1], dead=[2], versions=[1]), unanimous=True)
    house = Votes(anew)
    house.say(0, versions=(0,))
    assert house.next() is None, "rack 0 is the lower of two"
    house.say(0, versions=(1,))
    house.silent(1, LONG_NS)
    assert house.next() is None, "rack 0 alone cannot decide it"
    house.absent.clear()
    change = house.next()
    assert (seats_of(change), change.non_voters) == ([member(0), member(1)], ())
    assert change.reason == "every quorum holds all decided versions"


def test_elsewhere_it_keeps_its_vote_for_a_while() -> None:
    """One more death should not stop the others, but a pause of seconds is not worth a record."""
    for witness, left in ((False, [1, 2]), (True, [1, 2, WITNESS])):
        house = Votes(witness=witness)
        house.silent(0, LONG_NS - 1)
        assert house.next() is None
        house.silent(0, LONG_NS)
        assert house.voters() == left


def test_all_that_are_silent_go_together() -> None:
    """Without one of them alone the other and the witness would be a quorum."""
    house = Votes(roster(1, range(3), witness=True), witness=True)
    house.silent(1, DETECT_NS)
    house.silent(2, DETECT_NS)
    change = house.next()
    assert (change.non_voters, change.reason) == ((1, 2, WITNESS), "racks 1,2 are silent")


def test_nothing_is_proposed_that_those_who_are_heard_cannot_decide() -> None:
    """It would be decided when the silent are back, and take their votes then."""
    house = Votes()
    house.silent(1, LONG_NS)
    house.silent(2, LONG_NS)
    assert house.next() is None
    house = Votes(racks=2, witness=True)
    house.silent(0, LONG_NS)
    house.silent(WITNESS, LONG_NS)
    assert house.next() is None


def test_in_lockstep_no_vote_is_taken() -> None:
    house = Votes(racks=2, witness=True)
    house.fields["demotes"] = False
    house.silent(0, SEAT_TIMEOUT_NS - 1)
    assert house.next() is None


def test_no_vote_is_taken_at_the_cost_of_bytes() -> None:
    """Rack 2, which is silent, and rack 0 hold version 1. First rack 1 must have it."""
    house = Votes(roster(1, range(3), non_voters=[WITNESS], witness=True), witness=True)
    house.say(1, versions=(0,))
    house.silent(2, LONG_NS)
    assert house.voters() == [0, 1], "with the witness rack 1 would be a quorum without it"
    house.say(0, versions=(0,))
    assert house.next() is None
    house.say(0, versions=(1,))
    house.say(1, versions=(1,))
    assert house.voters() == [0, 1, WITNESS]


def test_a_slow_rack_loses_its_vote_where_the_others_can_go_on_without_it() -> None:
    house = Votes(racks=2, witness=True)
    house.fields["slow"] = frozenset({1})
    change = house.next()
    assert (change.non_voters, change.reason) == ((1, WITNESS), "rack 1 is slow")
    house = Votes()
    house.fields["slow"] = frozenset({1})
    assert house.next() is None, "two results of three are held by every quorum"


def test_a_vote_is_given_back_to_who_is_steady_and_close() -> None:
    learning = roster(1, [0, 1], non_voters=[1, WITNESS], witness=True)
    house = Votes(learning, racks=2, witness=True)
    assert house.voters() == [0, 1, WITNESS], "two votes in one record"
    house.views[1].vote_ns = NOW_NS + 1
    assert house.next() is None, "not yet"
    house.views[1].vote_ns = NOW_NS
    house.fields["slow"] = frozenset({1})
    assert house.next() is None
    house.fields["slow"] = frozenset()
    house.fields["ready"] = [member(0), member(WITNESS)]
    assert house.next() is None, "it has not read the log to its end"
    house.fields["ready"] = [member(0), member(1)]
    assert house.voters() == [0, 1], "the witness has not"


def test_the_witness_votes_where_that_makes_the_number_of_voters_odd() -> None:
    house = Votes(roster(1, [0, 1], non_voters=[WITNESS], witness=True), racks=2, witness=True)
    assert house.voters() == [0, 1, WITNESS]
    change = house.next()
    assert change.reason == "the witness votes"
    house.views[WITNESS].vote_ns = NOW_NS + 1
    assert house.next() is None
    house = Votes(roster(1, range(3), witness=True), witness=True)
    assert house.voters() == [0, 1, 2]
    house = Votes(racks=2, witness=True)
    house.silent(WITNESS, LONG_NS - 1)
    assert house.next() is None
    house.silent(WITNESS, LONG_NS)
    assert house.voters() == [0, 1]


def test_a_retired_rack_that_was_evicted_and_is_not_back_is_awaited_no_more() -> None:
    """It has no seat: the roster stays as it is, and says so."""
    left = roster(1, [0, 2])
    house = House(Mitigation(1, EVICTED, "slow"), left)
    assert house.log.away == {1: member(1)}
    house.fields["retired"] = (1,)
    change = house.next()
    assert (change.members, change.non_voters) == (left.members, ())
    assert (change.reason, change.retired) == ("a person has retired rack 1", (1,))
    house.log.take(change)
    assert house.log.away == house.log.mitigations == {}
    assert house.next() is None, "once"


def test_a_rack_that_waits_for_a_donors_state_has_no_vote_yet() -> None:
    """The others would wait for it in rounds and checkpoints, and its donor for them."""
    house = House(roster(1, [0, 1, 2], non_voters=[2]))
    house.say(2, wants=True)
    assert house.next() is None
    house.say(2)
    change = house.next()
    assert (change.non_voters, change.reason) == ((), "rack 2 holds everything")
