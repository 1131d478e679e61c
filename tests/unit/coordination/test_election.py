"""When a voter tries to take over: after a silence, one behind the other, asking itself last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import NUMBER_MAX, ballot_of, number_of
from mend.consensus.proposer import Proposer
from mend.consensus.records import Record
from mend.coordination.admission import VISITOR
from mend.coordination.election import STAGGER_HEARTBEATS, Election
from mend.coordination.events import Connect, Effect, Send
from mend.coordination.messages import Challenge, Hello, Orders, Prepare, Refusal, Vote
from mend.types import SECOND, WITNESS, Peer, life_of
from tests.unit.coordination.nouns import (
    DETECT_NS,
    FIRST,
    HEARTBEAT_NS,
    acceptor_state,
    commit,
    digest,
    genesis,
    hello,
    log_of,
    member,
    notes,
    offer,
    orders,
    roster,
)

START_NS = 100 * SECOND
STAGGER_NS = STAGGER_HEARTBEATS * HEARTBEAT_NS
BEGIN = genesis(racks=3, witness=True)


class Candidate:
    """A voter of a job of three racks and a witness that rack 0 began."""

    def __init__(
        self, rack: int = 1, records: Sequence[Record] = (BEGIN,), ballot: int = FIRST
    ) -> None:
        self.me, self.member, self.now_ns = Peer(rack, 0), member(rack), START_NS
        self.acceptor, self.proposer, self.records = Acceptor(), Proposer(), records
        if records:
            count = len(records)
            self.acceptor.append(ballot, 0, "", records, count, count)
        self.election = Election(
            self.me, self.member, self.acceptor, self.proposer, HEARTBEAT_NS, DETECT_NS
        )

    def orders(self, ballot: int = FIRST, **changes: Any) -> bool:
        """Somebody's orders arrive; whether this member must give up."""
        return self.election.heard(self.body(ballot, **changes), self.now_ns)

    def body(self, ballot: int, **changes: Any) -> Orders:
        to = self.member.incarnation
        return replace(orders(1, self.records), **{"to": to, "ballot": ballot, **changes})

    def move(self, after_ns: int = 0) -> list[Effect]:
        self.now_ns += after_ns
        return self.election.move(self.now_ns)

    def stands(self) -> list[Effect]:
        """Wait until it is its turn."""
        self.move()
        due_ns = self.election.due_ns()
        effects = self.move(due_ns - self.now_ns)
        assert self.proposer.standing
        return effects

    def promised(self, rack: int) -> None:
        """That rack's promise, with nothing new in its log."""
        last = len(self.records)
        shown = replace(acceptor_state(last, last), promised=self.proposer.ballot)
        assert self.proposer.hear(member(rack), shown)


def asked(effects: Sequence[Effect]) -> list[int]:
    return [e.to.rack for e in effects if isinstance(e, Send) and isinstance(e.body, Prepare)]


def test_a_candidate_tells_all_that_are_left_that_the_job_is_lost() -> None:
    """With every question that it repeats; in their lives that have the seats."""
    candidate = Candidate(WITNESS)
    candidate.stands()
    candidate.proposer.dead, candidate.proposer.lost = {member(0)}, True
    told = [
        (each.to, each.body.incarnation, each.body.kind)
        for each in candidate.move(HEARTBEAT_NS)
        if isinstance(each, Send) and isinstance(each.body, Refusal)
    ]
    assert told == [(Peer(r, 0), member(r).incarnation, "lost") for r in (1, 2)]
    assert candidate.move(HEARTBEAT_NS // 2) == []
    candidate.proposer.lost = False
    assert not any(isinstance(each.body, Refusal) for each in candidate.move(HEARTBEAT_NS))


# -------------------------------------------------------------- when


def test_a_voter_stands_when_its_coordinator_is_silent_for_long_enough() -> None:
    candidate = Candidate(rack=WITNESS)
    assert not candidate.orders()
    assert candidate.move(DETECT_NS - 1) == []
    assert candidate.election.due_ns() == candidate.now_ns + 1
    effects = candidate.move(1)
    assert notes(effects, "stands") == [{"ballot": 2, "silent_ms": 1000}]
    assert candidate.proposer.ballot == ballot_of(2, WITNESS)


def test_voter_that_heard_nobody_waits_from_its_first_look() -> None:
    candidate = Candidate(rack=WITNESS)
    assert candidate.election.due_ns() is None
    assert candidate.move() == []
    assert candidate.election.due_ns() == START_NS + DETECT_NS


def test_the_witness_goes_first_then_racks_ascending_not_the_one_that_fell_silent() -> None:
    for coordinator, turns in (
        (0, {WITNESS: 0, 1: 1, 2: 2}),
        (1, {WITNESS: 0, 0: 1, 2: 2}),
        (WITNESS, {0: 0, 1: 1, 2: 2}),
    ):
        ballot = ballot_of(1, coordinator)
        for rack, place in turns.items():
            candidate = Candidate(rack, ballot=ballot)
            candidate.orders(ballot)
            due_ns = START_NS + DETECT_NS + place * STAGGER_NS
            assert candidate.election.due_ns() == due_ns, (coordinator, rack)
    assert STAGGER_NS > 2 * HEARTBEAT_NS, "one's question and its answer fit in between"


def test_only_a_voter_of_a_job_that_runs_stands() -> None:
    non_voters = roster(1, [0, 1, 2], non_voters=[1], witness=True)
    others = roster(1, [0, 2], witness=True)
    for records in ([], [BEGIN, non_voters], [BEGIN, others], [BEGIN, roster(1, [], witness=True)]):
        candidate = Candidate(1, records)
        candidate.election.heard_ns = 0
        assert candidate.move(100 * DETECT_NS) == [], records
        assert candidate.election.due_ns() is None
    witness = Candidate(WITNESS, [BEGIN, roster(1, [], witness=True)])
    witness.election.heard_ns = 0
    assert witness.move(100 * DETECT_NS) == [], "the job is over"


def test_a_former_life_has_no_vote_to_stand_with() -> None:
    candidate = Candidate(1)
    candidate.election.member = member(1, life=1)
    candidate.election.heard_ns = 0
    assert candidate.move(100 * DETECT_NS) == []


def test_coordinator_does_not_stand() -> None:
    candidate = Candidate(0)
    candidate.proposer.found(FIRST)
    assert candidate.election.due_ns() is None
    assert candidate.move(100 * DETECT_NS) == []


def test_candidate_that_loses_its_vote_stops() -> None:
    candidate = Candidate(1)
    candidate.stands()
    later = [BEGIN, roster(1, [0, 2], witness=True)]
    candidate.acceptor.append(FIRST, 0, "", later, 2, 2)
    assert candidate.move() == []
    assert candidate.proposer.ballot == 0


# -------------------------------------------------------------- in which ballot


def test_the_new_ballot_is_above_everything_that_was_heard_of() -> None:
    for known in (
        lambda candidate: candidate.election.see(6),
        lambda candidate: candidate.acceptor.prepare(ballot_of(6, 2)),
        lambda candidate: candidate.orders(ballot_of(6, 2)),
    ):
        candidate = Candidate(1)
        known(candidate)
        candidate.stands()
        assert candidate.proposer.ballot == ballot_of(7, 1)


def test_a_number_that_is_nonsense_is_not_counted_on_from() -> None:
    candidate = Candidate(1)
    candidate.election.see(NUMBER_MAX)
    assert not candidate.orders(ballot_of(NUMBER_MAX, 0))
    candidate.stands()
    assert number_of(candidate.proposer.ballot) == 2


# -------------------------------------------------------------- whom it asks


def test_all_voters_are_asked_and_made_reachable_but_not_itself() -> None:
    candidate = Candidate(1)
    effects = candidate.stands()
    assert asked(effects) == [0, 2, WITNESS]
    assert [e.peer.rack for e in effects if isinstance(e, Connect)] == [0, 2]
    prepares = [e.body for e in effects if isinstance(e, Send)]
    ballot, lineage = candidate.proposer.ballot, log_of(BEGIN).lineage
    assert [replace(p, serial=0) for p in prepares] == [
        Prepare(0, ballot, lineage, 1, "tcp://rack1:1")
    ] * 3
    serials = [p.serial for p in prepares]
    assert serials == sorted(set(serials))


def test_candidate_asks_itself_when_that_is_the_last_promise_it_needs() -> None:
    """Alone it bars nobody: cut off, it goes on following the coordinator when that is back."""
    candidate = Candidate(1)
    candidate.stands()
    candidate.promised(2)
    assert asked(candidate.move()) == []
    candidate.promised(0)
    assert asked(candidate.move()) == [1]
    assert candidate.acceptor.promised == FIRST, "it is asked by a message like any other"


def test_the_question_is_repeated_each_heartbeat_and_at_once_when_it_changes() -> None:
    candidate = Candidate(1)
    candidate.stands()
    assert asked(candidate.move(HEARTBEAT_NS - 1)) == []
    assert candidate.election.due_ns() == candidate.now_ns + 1
    assert asked(candidate.move(1)) == [0, 2, WITNESS]
    assert asked(candidate.move()) == []
    more = [BEGIN, commit(1, [offer(0)])]
    candidate.proposer.log.put(1, more[1:])
    candidate.proposer.log.decide(2)
    effects = candidate.move()
    assert asked(effects) == [0, 2, WITNESS]
    assert [e.body.after for e in effects if isinstance(e, Send)] == [2, 2, 2]


def test_candidate_asks_voters_named_by_a_longer_log() -> None:
    candidate = Candidate(1)
    candidate.stands()
    change = replace(roster(1, [0, 1, 2]), members=genesis(racks=5).roster)
    candidate.proposer.log.put(1, [change])
    assert asked(candidate.move()) == [3, 4]


# -------------------------------------------------------------- who gives up


def test_orders_of_a_ballot_not_below_the_promise_end_a_candidacy() -> None:
    """Also of a lower ballot than mine: not even my own vote is promised to mine yet."""
    candidate = Candidate(1)
    candidate.stands()
    assert candidate.orders(FIRST)
    assert candidate.orders(ballot_of(9, 0))


@pytest.mark.parametrize("own", [False, True])
def test_orders_below_my_promise_or_my_own_end_nothing_and_put_nothing_off(own: bool) -> None:
    candidate = Candidate(1)
    candidate.stands()
    ballot = candidate.proposer.ballot
    candidate.acceptor.prepare(ballot)
    before = candidate.election.heard_ns
    candidate.now_ns += 1
    assert not candidate.orders(ballot if own else FIRST)
    assert candidate.election.heard_ns == before


def test_follower_has_no_candidacy_to_give_up() -> None:
    assert not Candidate(1).orders(ballot_of(9, 0))


def test_orders_of_another_job_are_nobodys() -> None:
    candidate = Candidate(1)
    candidate.stands()
    assert not candidate.orders(ballot_of(9, 0), lineage=digest(5))
    assert candidate.election.seen < 9


def test_former_coordinator_stands_again_at_once_and_former_candidate_waits() -> None:
    """The others heard a deposed coordinator; a candidate that lost has a rival on its way."""
    candidate = Candidate(1)
    candidate.stands()
    candidate.proposer.step_down()
    candidate.election.lost(candidate.now_ns, at_once=False)
    due_ns = candidate.election.due_ns()
    assert due_ns >= candidate.now_ns + DETECT_NS
    candidate.election.lost(candidate.now_ns, at_once=True)
    assert candidate.election.due_ns() == due_ns - DETECT_NS
    again = candidate.stands()
    assert asked(again) == [0, 2, WITNESS], "all of them, though they were asked before"


# -------------------------------------------------------------- who is dead


UNATTESTED = replace(BEGIN, policy=replace(BEGIN.policy, restart_attests=False))
"""As BEGIN, and no launcher's word counts."""


def of(rack: int, life: int, **changes: Any) -> Hello:
    return hello(rack, racks=3, life=life, **changes)


def test_nothing_else_attests_a_death() -> None:
    """A life that is declared dead and is not would go on as a job of its own."""
    for reason, candidate, sender, body in (
        ("not configured", Candidate(records=[UNATTESTED]), member(0, life=1), of(0, 1)),
        ("not begun", Candidate(1, []), member(0, life=1), of(0, 1)),
        ("still the same life", Candidate(), member(0), of(0, 0)),
        ("in another's name", Candidate(), member(0, life=1), of(0, 2)),
        ("other settings", Candidate(), member(0, life=1), of(0, 1, staleness_max_rounds=9)),
        ("my own rack's", Candidate(), member(1, life=1), of(1, 1)),
        ("no rack of this job", Candidate(), member(5, life=1), of(5, 1)),
    ):
        candidate.election.attest(sender, body)
        assert candidate.proposer.dead == set(), reason


def answer_in(ballot: int) -> Vote:
    return Vote(1, "", replace(acceptor_state(), promised=ballot), ())


def test_a_witness_that_promises_in_another_life_attests_the_end_of_the_one_with_the_seat() -> None:
    """Rack 0 and the witness died together and were started again: nobody could go on."""
    cast, again = Candidate(), member(WITNESS, 1)
    cast.stands()
    cast.election.meet_witness(again, answer_in(cast.proposer.ballot))
    assert cast.proposer.dead == {member(WITNESS)}
    assert cast.proposer.returned == again


def test_only_its_answer_to_this_candidacy_does_so() -> None:
    """What waited in a queue may be of a life before the one that has the seat."""
    again = member(WITNESS, 1)
    cast = Candidate()
    cast.election.meet_witness(again, answer_in(FIRST))
    cast.stands()
    cast.election.meet_witness(again, answer_in(FIRST))
    cast.election.meet_witness(member(WITNESS), answer_in(cast.proposer.ballot))
    cast.election.meet_witness(member(2, 1), answer_in(cast.proposer.ballot))
    assert (cast.proposer.dead, cast.proposer.returned) == (set(), None)
    cast = Candidate(records=[UNATTESTED])
    cast.stands()
    cast.election.meet_witness(again, answer_in(cast.proposer.ballot))
    assert cast.proposer.dead == set()


def test_a_hello_that_may_be_older_than_the_seated_life_is_asked_about_it() -> None:
    """Rack 0 was started three times; the second life's hello waited in a queue, and the third has
    the seat, alive. It never had a seat, so no list of former members knows it."""
    candidate = Candidate()
    stale = of(0, 2)
    for late in (replace(stale, after=()), replace(stale, after=(life_of(member(0, 7)),))):
        effects = candidate.election.attest(member(0, life=2), late)
        assert candidate.proposer.dead == set()
        way, question = effects
        assert way == Connect(Peer(0, VISITOR), late.seat.address), "not the seated life's way"
        seated = Challenge(late.seat.member.incarnation, life_of(member(0)))
        assert question == Send(Peer(0, VISITOR), seated)
    answer = replace(stale, after=(life_of(member(0, 1)), life_of(member(0))))
    assert candidate.election.attest(member(0, life=2), answer) == []
    assert candidate.proposer.dead == {member(0)}


def test_a_newcomer_without_a_vote_is_attested_as_well() -> None:
    """It may hold what no voter that lives does, so its promise is asked for, in vain."""
    candidate = Candidate()
    learns = roster(1, [0, 1, 2], non_voters=(2,), witness=True)
    log = candidate.acceptor.log
    candidate.acceptor.append(FIRST, 1, log.chain(1), [learns], 2, 2)
    candidate.election.attest(member(2, life=1), of(2, 1))
    assert candidate.proposer.dead == {member(2)}


# -------------------------------------------------------------- seats without a vote


def alone(rack: int) -> Candidate:
    """Rack 0 votes alone, as rack 1 was silent, and the witness is of no use beside one rack."""
    begin = genesis(racks=2, witness=True)
    return Candidate(rack, [begin, roster(1, [0, 1], non_voters=[1, WITNESS], witness=True)])


def test_nonvoter_stands_when_all_voters_are_dead() -> None:
    for rack in (1, WITNESS):
        candidate = alone(rack)
        assert not candidate.election.may_stand()
        candidate.election.attest(member(0, life=1), hello(0, life=1))
        assert candidate.election.may_stand()
        candidate.move()
        effects = candidate.move(10 * DETECT_NS)
        assert candidate.proposer.standing
        assert set(asked(effects)) == {0, 1, WITNESS} - {rack}
