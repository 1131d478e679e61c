"""A voter becomes the coordinator and stops being it: nothing that was decided is lost, nothing new
opens too early, and who is over says nothing any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import ballot_of, count_of, number_of
from mend.consensus.log import log_state_of
from mend.consensus.records import (
    EVICTED,
    Ballot,
    Commit,
    Lineage,
    Mitigation,
    Offer,
    Record,
    Roster,
)
from mend.coordination.acceptor_host import Follower
from mend.coordination.coordinator import Coordinator, CoordinatorOptions
from mend.coordination.events import Effect, Finished, Heard, Send, Tick
from mend.coordination.messages import MergeProposal, Message, Orders, Prepare, Report, Retire, Vote
from mend.types import PERSON, SECOND, WITNESS, Member, Peer, life_of
from tests.unit.coordination.job import held_of
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
    offer_id,
    orders,
    report,
    roster,
    sent,
)

BEGIN = genesis(racks=3)
MINE = ballot_of(2, 1)
"""The ballot in which rack 1 takes over."""


class Cabinet:
    """The coordinator machine of one voter, and the votes of all that it can reach. Rack 0 began
    the job in the first ballot, and is silent now."""

    def __init__(
        self,
        rack: int = 1,
        *,
        records: Sequence[Record] = (BEGIN,),
        decided: int | None = None,
        reach: Sequence[int] = (1, 2),
    ) -> None:
        self.me, self.now_ns = Peer(rack, 0), 100 * SECOND
        self.reach, self.accepting = set(reach), True
        racks = [seat.member.rack for seat in BEGIN.roster] + [WITNESS]
        self.followers = {r: Follower(member(r), Acceptor(), Peer(0, 0), DETECT_NS) for r in racks}
        for follower in self.followers.values():
            count = len(records)
            follower.acceptor.append(
                FIRST, 0, "", records, count, count if decided is None else decided
            )
        options = CoordinatorOptions(3, HEARTBEAT_NS, DETECT_NS, first=False)
        self.acceptor = self.followers[rack].acceptor
        self.machine = Coordinator(self.me, member(rack), "job", options, self.acceptor)
        to = member(rack).incarnation
        self.reports = {r: report(0, to=to, acceptor_state=acceptor_state(ballot=0)) for r in racks}
        self.orders: dict[int, Orders] = {}
        self.held: tuple[int, ...] = ()
        """Versions that racks say they hold when they promise."""
        self.lives: dict[int, int] = {}

    def born(self, rack: int) -> None:
        """It is started again, and can be reached: it holds nothing and has read nothing."""
        self.lives[rack] = 1
        self.followers[rack] = Follower(member(rack, 1), Acceptor(), Peer(0, 0), DETECT_NS)
        self.reach.add(rack)

    def hear(self, rack: int, body: Message, life: int = 0) -> list[Effect]:
        return self.give(Heard(Peer(rack, 0), member(rack, life).incarnation, body))

    def tick(self, after_ns: int = 0) -> list[Effect]:
        self.now_ns += after_ns
        return self.give(Tick())

    def sleep(self, for_ns: int) -> list[Effect]:
        """The process gets no processor for so long, and then runs."""
        self.now_ns += for_ns
        return self.give(Tick(), awake=False)

    def give(self, event: Heard | Tick, *, awake: bool = True) -> list[Effect]:
        """And what follows from it, as far as voters can be reached. `awake`: it ran until now,
        though nothing came."""
        if awake:
            self.machine.sleep.clock.ran_ns = self.now_ns
        effects = self.machine.handle(event, self.now_ns)
        for effect in list(effects):
            if isinstance(effect, Send) and effect.to.rack in self.reach:
                effects += self._arrives(effect.to.rack, effect.body)
        return effects

    def _arrives(self, rack: int, body: Message) -> list[Effect]:
        follower = self.followers[rack]
        if isinstance(body, Prepare):
            vote, life = follower.asked(self.me, body, self.now_ns), self.lives.get(rack, 0)
            held = (-1,) * len(self.held) if life else self.held
            return self.hear(rack, replace(vote, held=held), life) if vote else []
        assert isinstance(body, Orders)
        self.orders[rack] = body
        if not self.accepting or not follower.addressed(self.me, body):
            return []
        if not follower.follow(self.me, self.machine.member.incarnation, body, self.now_ns, []):
            return []
        if rack != WITNESS:
            return self.say(rack)
        vote = follower.vote(body.serial)
        return self.give(Heard(Peer(rack, 0), follower.member.incarnation, vote))

    def say(self, rack: int, **changes: Any) -> list[Effect]:
        """The rack's report: what it said before, what changes, and its vote's newest ballot."""
        before = self.reports[rack]
        heard = self.orders[rack].serial if rack in self.orders else 0
        changes = {
            "acceptor_state": self.followers[rack].acceptor.acceptor_state(),
            "heard": heard,
            **changes,
        }
        self.reports[rack] = replace(before, **changes, serial=before.serial + 1)
        return self.hear(rack, self.reports[rack], self.lives.get(rack, 0))

    def takes_over(self) -> list[Effect]:
        effects = self.tick()
        for _ in range(100):
            if self.machine.proposer.leading:
                return effects
            effects += self.tick(HEARTBEAT_NS)
        raise AssertionError("nobody won")

    def offered(self, *offers: Offer) -> None:
        for each in offers:
            self.say(each.member.rack, offers=(each,))
        for rack in sorted(self.reach):
            others = tuple(offer_id(each) for each in offers if each.member.rack != rack)
            self.say(rack, got=others)

    @property
    def records(self) -> tuple[Record, ...]:
        return self.machine.log.after(0)

    @property
    def proposals(self) -> tuple[MergeProposal, ...]:
        return self.orders[self.me.rack].proposals


def leading(rack: int = 1, **fields: Any) -> Cabinet:
    cabinet = Cabinet(rack, **fields)
    cabinet.takes_over()
    return cabinet


# -------------------------------------------------------------- becoming it


def test_a_voter_takes_over_from_a_silent_coordinator() -> None:
    cabinet = Cabinet()
    effects = cabinet.takes_over()
    assert [note["ballot"] for note in notes(effects, "stands")] == [2]
    assert notes(effects, "takes-over") == [{"ballot": 2, "record": 2}]
    assert cabinet.records == (BEGIN, Ballot(MINE))
    assert cabinet.machine.log.decided == 2
    assert cabinet.machine.proposer.open
    body = cabinet.orders[2]
    assert (body.ballot, body.to, body.decided) == (MINE, member(2).incarnation, 2)
    cabinet.tick(DETECT_NS)
    assert cabinet.orders[2].live == (), "everybody must report anew"


def test_candidate_without_a_quorum_stands_and_never_leads() -> None:
    cabinet = Cabinet(reach=(1,))
    for _ in range(50):
        effects = cabinet.tick(HEARTBEAT_NS)
    assert cabinet.machine.proposer.standing
    assert cabinet.acceptor.promised == FIRST, "it still would follow rack 0"
    assert not any(isinstance(body, Orders) for body in sent(effects))
    assert cabinet.machine.deadline_ns() == cabinet.machine.election.asked_ns + HEARTBEAT_NS


def test_candidate_waits_for_its_turn() -> None:
    cabinet = Cabinet()
    cabinet.hear(0, orders(1, [BEGIN]))
    due_ns = cabinet.machine.election.due_ns()
    assert due_ns == cabinet.now_ns + DETECT_NS, "the first behind the silent one"
    assert cabinet.tick(DETECT_NS - 1) == []
    assert notes(cabinet.tick(1), "stands")


def test_undecided_records_are_decided_in_the_new_ballot() -> None:
    cabinet = Cabinet(records=[BEGIN, commit(1, [offer(0)])], decided=1)
    effects = cabinet.takes_over()
    assert cabinet.records == (BEGIN, commit(1, [offer(0)]), Ballot(MINE))
    assert notes(effects, "decided") == [{"fragment": 0, "version": 1}]
    assert cabinet.followers[2].acceptor.accepted == MINE


def test_rounds_open_only_behind_the_decided_ballot_record() -> None:
    """Before that a later take-over could bring back a Commit of the ballot before, and its bytes
    would be gone if they had been freed for a merge of this one."""
    cabinet = Cabinet()
    cabinet.accepting = False
    cabinet.takes_over()
    cabinet.offered(offer(1), offer(2))
    cabinet.sleep(20 * SECOND)
    cabinet.offered(offer(1), offer(2))
    assert cabinet.proposals == ()
    cabinet.say(2, leaving=True, idle=True, hurry=True)
    assert cabinet.records == (BEGIN, Ballot(MINE)), "no roster either"
    cabinet.accepting = True
    cabinet.say(2, leaving=False)
    cabinet.tick(HEARTBEAT_NS)
    assert cabinet.machine.proposer.open
    cabinet.offered(offer(1), offer(2))
    cabinet.sleep(20 * SECOND)
    assert [proposal.version for proposal in cabinet.proposals] == [1]


def test_a_round_begins_anew_under_numbers_of_its_own() -> None:
    """A result of the same members in another ballot is not this one's."""
    cabinet = leading()
    cabinet.offered(offer(0), offer(1), offer(2))
    cabinet.sleep(20 * SECOND)
    cabinet.offered(offer(1), offer(2))
    (proposal,) = cabinet.proposals
    assert (proposal.attempt >> 8, count_of(proposal.attempt)) == (MINE, 1)
    old = held_of(0, 1, FIRST << 8 | 1)
    for rack in (1, 2):
        cabinet.say(rack, held=(old,))
    assert not any(isinstance(record, Commit) for record in cabinet.records)
    for rack in (1, 2):
        cabinet.say(rack, held=(held_of(0, 1, proposal.attempt),))
    assert isinstance(cabinet.records[-1], Commit)


def test_a_witness_takes_over_and_a_rack_with_its_vote() -> None:
    begin = genesis(racks=3, witness=True)
    for rack, reach in ((WITNESS, (1, 2, WITNESS)), (1, (1, 2, WITNESS))):
        cabinet = Cabinet(rack, records=[begin], reach=reach)
        cabinet.takes_over()
        assert cabinet.machine.proposer.open
        assert sorted(cabinet.machine.views) == [0, 1, 2, WITNESS]
        cabinet.tick(HEARTBEAT_NS)
        assert cabinet.orders[1].live == (0, 1, 2), "the witness is no rack"
    assert cabinet.machine.proposer.acceptor_states[member(WITNESS)].accepted == ballot_of(2, 1)


def test_remaining_racks_begin_a_new_lineage_and_report_it() -> None:
    """The launcher has started racks 0 and 2 again: their former lives are over."""
    cabinet = Cabinet(reach=(1,))
    for rack in (0, 2):
        cabinet.hear(rack, hello(rack, racks=3, life=1), life=1)
    cabinet.held = (0,)
    effects = cabinet.takes_over()
    assert notes(effects, "lineage") == [{"without": [0, 2], "versions": [0]}]
    record = cabinet.records[-1]
    assert isinstance(record, Lineage)
    assert cabinet.machine.log.committed.voters == {member(1)}
    assert cabinet.orders[1].lineage == cabinet.machine.log.lineage, "a job of its own"


def test_rack_that_is_heard_is_not_dead() -> None:
    """Attested by a hello of another life, yet it is heard: two launchers have a rack each."""
    cabinet = Cabinet(reach=(1,))
    cabinet.hear(2, hello(2, racks=3, life=1), life=1)
    assert cabinet.machine.proposer.dead == {member(2)}
    cabinet.say(2)
    assert cabinet.machine.proposer.dead == set()


def test_rivals_are_outbid_not_repeated() -> None:
    cabinet = Cabinet()
    cabinet.hear(2, Prepare(1, ballot_of(7, 2), log_of(BEGIN).lineage, 1))
    cabinet.hear(2, Prepare(2, ballot_of(9, 2), digest(5), 1))
    cabinet.takes_over()
    assert number_of(cabinet.machine.proposer.ballot) == 8, "a stranger's number is none"


# -------------------------------------------------------------- whose votes count


def standing(**fields: Any) -> Cabinet:
    """Rack 1 stands and has been answered by nobody."""
    cabinet = Cabinet(reach=(), **fields)
    cabinet.tick()
    while not cabinet.machine.proposer.standing:
        cabinet.tick(HEARTBEAT_NS)
    return cabinet


def a_vote(cabinet: Cabinet, serial: int = 99, **changes: Any) -> Vote:
    shown = {"promised": cabinet.machine.proposer.ballot, **changes}
    lineage = shown.pop("lineage", log_of(BEGIN).lineage)
    return Vote(serial, lineage, replace(acceptor_state(1, 1), **shown), ())


def test_promises_of_strangers_and_former_lives_do_not_count() -> None:
    cabinet = standing()
    promised = cabinet.machine.proposer.acceptor_states
    cabinet.hear(7, a_vote(cabinet))
    cabinet.hear(2, a_vote(cabinet), life=1)
    cabinet.hear(2, a_vote(cabinet, lineage=digest(5)))
    assert promised == {}
    cabinet.hear(7, a_vote(cabinet, promised=ballot_of(9, 7)))
    assert cabinet.machine.proposer.standing, "nor do they depose"
    cabinet.hear(2, a_vote(cabinet))
    assert list(promised) == [member(2)]


def test_a_promise_that_was_overtaken_does_not_come_back() -> None:
    cabinet = standing()
    cabinet.hear(2, a_vote(cabinet, serial=9, last=3))
    cabinet.hear(2, a_vote(cabinet, serial=8, last=2))
    cabinet.hear(2, a_vote(cabinet, serial=9, last=2))
    assert cabinet.machine.proposer.acceptor_states[member(2)].last == 3


def test_a_vote_that_nobody_asked_for_is_not_heard() -> None:
    cabinet = Cabinet()
    assert cabinet.hear(2, a_vote(cabinet, promised=ballot_of(9, 2))) == []
    assert cabinet.machine.proposer.acceptor_states == {}
    lost = standing()
    lost.hear(2, a_vote(lost, promised=ballot_of(9, 2)))
    assert lost.hear(0, a_vote(lost, promised=ballot_of(9, 2))) == [], "it has given up already"


def test_a_leader_hears_the_votes_of_seated_members_only() -> None:
    begin = genesis(racks=3, witness=True)
    cabinet = leading(records=[begin], reach=(1, 2, WITNESS))
    lineage = log_of(begin).lineage
    later = a_vote(cabinet, promised=ballot_of(9, 0), lineage=lineage)
    assert cabinet.hear(WITNESS, later, life=1) == []
    assert cabinet.hear(9, later) == []
    assert cabinet.machine.proposer.leading
    cabinet.hear(WITNESS, later)
    assert not cabinet.machine.proposer.leading


# -------------------------------------------------------------- being deposed


def by_orders(cabinet: Cabinet, ballot: int) -> list[Effect]:
    body = replace(orders(1, [BEGIN]), ballot=ballot, to=member(1).incarnation)
    return cabinet.hear(2, body)


def by_a_report(cabinet: Cabinet, ballot: int) -> list[Effect]:
    return cabinet.say(2, acceptor_state=replace(acceptor_state(2, 2), promised=ballot))


def by_a_late_vote(cabinet: Cabinet, ballot: int) -> list[Effect]:
    cabinet.hear(2, a_vote(cabinet, serial=50, accepted=MINE, last=2, decided=2))
    return cabinet.hear(2, a_vote(cabinet, serial=0, promised=ballot))


def by_ones_own_vote(cabinet: Cabinet, ballot: int) -> list[Effect]:
    cabinet.acceptor.prepare(ballot)
    return cabinet.tick()


@pytest.mark.parametrize(
    "said", [by_orders, by_a_report, by_a_late_vote, by_ones_own_vote], ids=lambda f: f.__name__
)
def test_any_higher_ballot_ends_a_coordinators_own(
    said: Callable[[Cabinet, int], list[Effect]],
) -> None:
    cabinet = leading()
    effects = said(cabinet, ballot_of(9, 2))
    assert {"ballot": 2} in notes(effects, "deposed")
    assert not any(isinstance(body, Orders) for body in sent(effects))
    machine = cabinet.machine
    assert not machine.proposer.leading
    assert (machine.views, machine.offers, machine.rounds) == ({}, {}, [])
    cabinet.reach = set()
    later = cabinet.tick(HEARTBEAT_NS)
    assert not any(isinstance(body, Orders) for body in sent(later)), "it says nothing any more"


def test_a_deposed_coordinator_does_not_count_its_accepts_any_more() -> None:
    cabinet = Cabinet()
    cabinet.accepting = False
    cabinet.takes_over()
    cabinet.reach = set()
    by_orders(cabinet, ballot_of(9, 2))
    cabinet.say(1, acceptor_state=acceptor_state(2, 1, MINE))
    cabinet.say(2, acceptor_state=acceptor_state(2, 1, MINE))
    assert cabinet.machine.log.decided == 0, "who steps down has no log to decide in"


def test_a_candidate_that_meets_a_higher_promise_stands_no_more_for_a_while() -> None:
    cabinet = standing()
    effects = cabinet.hear(2, a_vote(cabinet, promised=ballot_of(9, 2)))
    assert notes(effects, "stands-no-more") == [{"ballot": 2}]
    assert cabinet.tick(DETECT_NS - 1) == []
    while not cabinet.machine.proposer.standing:
        cabinet.tick(HEARTBEAT_NS)
    assert number_of(cabinet.machine.proposer.ballot) == 10


def test_a_witness_in_a_new_life_with_a_higher_promise_is_asked_again_in_a_higher_ballot() -> None:
    """It tries to begin the job, and had heard of the candidate by a rack before it was asked."""
    cabinet = standing(records=[genesis(racks=2, witness=True)])
    empty = {"lineage": "", "last": 0, "decided": 0, "prev": 0}
    later = {**empty, "promised": ballot_of(9, WITNESS)}
    effects = cabinet.hear(WITNESS, a_vote(cabinet, **later), life=1)
    assert notes(effects, "stands-no-more") == [{"ballot": 2}]
    while not cabinet.machine.proposer.standing:
        cabinet.tick(HEARTBEAT_NS)
    assert number_of(cabinet.machine.proposer.ballot) == 10
    cabinet.hear(WITNESS, a_vote(cabinet, **empty), life=1)
    assert cabinet.machine.proposer.dead == {member(WITNESS)}


def test_a_coordinator_that_meets_a_higher_promise_stands_again_soon() -> None:
    """Some voter promised to who could not win; all others still follow this one."""
    cabinet = leading()
    cabinet.reach = {1, 2}
    effects = by_a_report(cabinet, ballot_of(9, 0))
    assert notes(effects, "deposed")
    before_ns = cabinet.now_ns
    cabinet.takes_over()
    assert cabinet.now_ns - before_ns < DETECT_NS
    assert number_of(cabinet.machine.proposer.ballot) == 10


def test_a_coordinator_whose_own_vote_went_to_a_rival_leaves_it_the_time_to_win() -> None:
    """The others still follow the old one, so that standing at once would beat the rival again."""
    cabinet = leading()
    cabinet.sleep(100 * DETECT_NS)
    effects = by_ones_own_vote(cabinet, ballot_of(9, 2))
    effects += cabinet.tick(DETECT_NS - 1)
    assert notes(effects, "deposed")
    assert not notes(effects, "stands")


def test_orders_of_another_job_depose_nobody() -> None:
    cabinet = leading()
    cabinet.hear(2, replace(orders(1, [genesis(racks=2)]), ballot=ballot_of(9, 2)))
    assert cabinet.machine.proposer.leading


# -------------------------------------------------------------- not being it


def test_member_that_does_not_coordinate_ignores_hellos_and_reports() -> None:
    cabinet = Cabinet()
    assert cabinet.hear(2, hello(2, racks=3, life=1), life=1) == []
    assert cabinet.say(2, offers=(offer(2),)) == []
    assert (cabinet.machine.views, cabinet.machine.offers) == ({}, {})


def test_follower_is_done_when_its_rack_has_left() -> None:
    cabinet = Cabinet()
    assert Finished() not in cabinet.tick()
    out = roster(1, [0, 2])
    cabinet.acceptor.append(FIRST, 1, cabinet.acceptor.log.chain(1), [out], 2, 1)
    assert Finished() not in cabinet.tick(), "not before it is decided"
    cabinet.acceptor.append(FIRST, 2, cabinet.acceptor.log.chain(2), [], 2, 2)
    assert Finished() in cabinet.tick()


def test_a_rack_that_has_no_seat_yet_is_not_done() -> None:
    cabinet = Cabinet(records=[BEGIN, roster(1, [0, 2])])
    assert Finished() not in cabinet.tick()


def test_a_witness_is_done_when_the_job_is() -> None:
    begin = genesis(racks=3, witness=True)
    assert Finished() not in Cabinet(WITNESS, records=[begin], reach=()).tick()
    over = [begin, roster(1, [], witness=True)]
    assert Finished() in Cabinet(WITNESS, records=over, reach=()).tick()


# -------------------------------------------------------------- who is put out


def evicting(*, accepting: bool = True, **policy: Any) -> Cabinet:
    settings = replace(BEGIN.policy, seat_timeout_ns=30 * SECOND, **policy)
    cabinet = Cabinet(records=[replace(BEGIN, policy=settings)])
    cabinet.accepting = accepting
    cabinet.takes_over()
    return cabinet


def repeat(cabinet: Cabinet, duration_ns: int) -> None:
    """Racks 1 and 2 report for that long."""
    for _ in range(2 * duration_ns // DETECT_NS):
        cabinet.now_ns += DETECT_NS // 2
        for rack in (1, 2):
            cabinet.say(rack, versions=(0,))


def test_a_dead_rack_is_put_out_evict_ns_after_the_take_over() -> None:
    """How long it was silent before is known to nobody."""
    cabinet = evicting()
    repeat(cabinet, 29 * SECOND)
    assert list(cabinet.machine.log.appended.seats) == [0, 1, 2]
    repeat(cabinet, 2 * SECOND)
    record = cabinet.records[-1]
    assert isinstance(record, Roster)
    assert [seat.member.rack for seat in record.members] == [1, 2]
    assert cabinet.machine.log.decided == cabinet.machine.log.last
    assert cabinet.machine.log.committed.former == (member(0),)


def test_member_absent_while_nothing_could_be_decided_is_not_evicted_at_once() -> None:
    cabinet = evicting(accepting=False)
    cabinet.tick(2 * DETECT_NS)
    cabinet.accepting = True
    repeat(cabinet, 2 * SECOND)
    assert cabinet.machine.proposer.open
    assert list(cabinet.machine.log.appended.seats) == [0, 1, 2]


def test_in_lockstep_nobody_is_put_out() -> None:
    cabinet = evicting(lockstep=True)
    repeat(cabinet, 100 * SECOND)
    assert not any(isinstance(record, Roster) for record in cabinet.records)


def test_a_rack_that_was_put_out_is_not_heard_any_more() -> None:
    cabinet = evicting()
    repeat(cabinet, 31 * SECOND)
    late: Report = report(
        10**6, acceptor_state=replace(acceptor_state(9, 9), promised=ballot_of(9, 0))
    )
    assert cabinet.machine.log.committed.member(0) is None
    before = cabinet.records
    cabinet.say(1, offers=(offer(1),))
    cabinet.hear(0, replace(late, acceptor_state=acceptor_state(1, 1), offers=(offer(0),)))
    assert cabinet.records[: len(before)] == before
    assert (0, 0) not in cabinet.machine.offers


# -------------------------------------------------------------- who hears no quorum


def heard_from(cabinet: Cabinet, racks: Sequence[int], duration_ns: int) -> list[Effect]:
    """These racks report for so long, and the clock is looked at."""
    effects: list[Effect] = []
    for _ in range(2 * duration_ns // DETECT_NS):
        effects += cabinet.tick(DETECT_NS // 2)
        for rack in racks:
            effects += cabinet.say(rack)
    return effects


def test_a_coordinator_that_hears_no_quorum_stands_down_after_two_detection_times() -> None:
    cabinet = leading()
    cabinet.reach = {1}
    effects = heard_from(cabinet, [1], 2 * DETECT_NS - DETECT_NS // 2)
    assert cabinet.machine.proposer.leading
    effects = heard_from(cabinet, [1], DETECT_NS)
    assert notes(effects, "no-quorum") == [{"ballot": 2}]
    assert notes(effects, "stands"), "at once: nobody else was heard to lead"
    assert not any(isinstance(body, Orders) for body in sent(cabinet.tick(HEARTBEAT_NS)))


def test_a_coordinator_that_hears_a_quorum_stays() -> None:
    cabinet = leading()
    cabinet.reach = {1}
    assert not notes(heard_from(cabinet, [1, 2], 20 * DETECT_NS), "no-quorum")
    assert cabinet.machine.proposer.leading


def test_a_coordinator_that_slept_hears_the_others_first() -> None:
    """What waits in its inbox is not read yet when it looks at the clock."""
    cabinet = leading()
    cabinet.reach = set()
    assert not notes(cabinet.sleep(100 * DETECT_NS), "no-quorum")
    assert cabinet.machine.proposer.leading


def test_voter_that_slept_does_not_stand() -> None:
    """The orders of the coordinator wait in its inbox. They are what it must read first."""
    cabinet = Cabinet()
    cabinet.tick()
    slept = cabinet.sleep(100 * DETECT_NS)
    assert not notes(slept, "stands")
    assert notes(cabinet.takes_over(), "stands"), "awake, it hears nobody"


def test_coordinator_that_slept_calls_no_rack_silent() -> None:
    cabinet = leading()
    heard = cabinet.orders[2].live
    assert 2 in heard
    cabinet.sleep(100 * DETECT_NS)
    assert cabinet.orders[2].live == heard
    assert not [record for record in cabinet.records if isinstance(record, Roster)]
    cabinet.reach = {1, 2}
    cabinet.machine.views[2].heard_ns = cabinet.now_ns - DETECT_NS
    assert not cabinet.machine.views[2].live(cabinet.now_ns, DETECT_NS), "awake, it would be"


def test_a_lost_quorum_comes_back_with_the_racks_that_are_started_again() -> None:
    """Racks 0 and 2 die together under the coordinator of rack 1, and both are started again."""
    cabinet = leading()
    cabinet.reach, cabinet.held = {1}, (0,)
    effects = heard_from(cabinet, [1], DETECT_NS)
    for rack in (0, 2):
        cabinet.born(rack)
    for _ in range(6):
        for rack in (0, 2):
            effects += cabinet.hear(rack, hello(rack, racks=3, life=1), life=1)
        effects += heard_from(cabinet, [1], DETECT_NS // 2)
    assert notes(effects, "lineage") == [{"without": [0, 2], "versions": [0]}]
    (anew,) = [record for record in cabinet.records if isinstance(record, Lineage)]
    votes = {seat.member for seat in anew.members} - {member(r, 1) for r in anew.non_voters}
    assert votes == {member(1)}, "the others hold nothing yet"


def test_rack_seated_by_an_undecided_record_attests_with_its_reports() -> None:
    """It follows a log, so it says no hello any more."""
    back = roster(1, [0, 1, 2], non_voters=[2], lives={2: 1})
    cabinet = Cabinet(records=[BEGIN, back], decided=1, reach=())
    cabinet.hear(2, report(1), life=1)
    assert cabinet.machine.proposer.dead == {member(2)}
    cabinet.hear(2, report(2))
    assert cabinet.machine.proposer.dead == set(), "a late word, or two lives of one rack"


# -------------------------------------------------------------- a witness that is started again


def witnessed() -> Cabinet:
    """Two racks and a witness; rack 0 leads, as the witness, which began the job, is silent."""
    begin = genesis(racks=2, witness=True)
    first = commit(1, [offer(0)])
    cabinet = Cabinet(0, records=[begin, first], reach=(0, 1))
    to, led = member(0).incarnation, ballot_of(1, WITNESS)
    cabinet.hear(WITNESS, orders(1, [begin, first], to=to, ballot=led))
    cabinet.tick(2 * DETECT_NS)
    cabinet.takes_over()
    for rack in (0, 1):
        cabinet.say(rack, versions=(1,))
    return cabinet


def test_a_witness_that_was_started_again_gets_its_seat_and_then_its_vote() -> None:
    cabinet = witnessed()
    again = Follower(member(WITNESS, life=1), Acceptor(), Peer(WITNESS, 0), DETECT_NS)
    told = sent(cabinet.tick(HEARTBEAT_NS), Peer(WITNESS, 0))
    assert told[-1].snapshot is not None, "whoever lives there now learns all it needs to answer"
    cabinet.hear(WITNESS, again.vote(told[-1].serial), life=1)
    log = cabinet.machine.log
    assert (log.committed.witness, log.committed.non_voters) == (
        member(WITNESS, 1),
        frozenset({WITNESS}),
    )
    cabinet.followers[WITNESS], cabinet.reach = again, {0, 1, WITNESS}
    cabinet.hear(WITNESS, again.vote(told[-1].serial), life=1)
    cabinet.tick(HEARTBEAT_NS)
    assert again.acceptor.log.last == log.last, "it was sent the log from the beginning"
    for _ in range(20):
        cabinet.tick(HEARTBEAT_NS)
        for rack in (0, 1):
            cabinet.say(rack)
    assert log.committed.voters == {member(0), member(1), member(WITNESS, 1)}


def test_a_witness_that_was_started_again_unseen_hears_of_the_end() -> None:
    """It was, and then the coordinator died. The next one does not miss it yet and, as a rack is in
    a hurry, ends the job at once; nobody is left to tell it later."""
    begin = replace(genesis(racks=3, witness=True), non_voters=(WITNESS,))
    cabinet = Cabinet(records=[begin])
    cabinet.hear(0, orders(1, [begin]))
    cabinet.takes_over()
    assert WITNESS in cabinet.machine._live(cabinet.now_ns)
    for rack in (1, 2):
        cabinet.say(rack, versions=(0,), leaving=True, idle=True, hurry=True)
    effects = cabinet.tick(DETECT_NS // 2)
    for rack in (1, 2):
        effects += cabinet.say(rack)
    effects += cabinet.tick(HEARTBEAT_NS)
    log = cabinet.machine.log.committed
    assert log.over
    assert WITNESS in cabinet.machine._live(cabinet.now_ns)
    told = sent(effects, Peer(WITNESS, 0))[-1]
    assert log_state_of(told.snapshot).over


def test_the_coordinator_for_whose_silence_it_stood_is_silent_from_the_start() -> None:
    """Or it would be waited for once more, as long as it takes to find out."""
    cabinet = witnessed()
    assert WITNESS not in cabinet.machine._live(cabinet.now_ns)
    assert {0, 1} <= cabinet.machine._live(cabinet.now_ns)


# -------------------------------------------------------------- retired by a person


def retire(cabinet: Cabinet, rack: int, life: int = 0) -> list[Effect]:
    return cabinet.give(Heard(Peer(PERSON, 0), 0, Retire(rack, life_of(member(rack, life)))))


def test_remaining_racks_go_on_without_racks_that_a_person_has_retired() -> None:
    """Nobody has started racks 0 and 2 again, and nobody will."""
    cabinet = Cabinet(reach=(1,))
    cabinet.held = (0,)
    cabinet.tick()
    cabinet.tick(DETECT_NS)
    noted = retire(cabinet, 0) + retire(cabinet, 0)
    assert notes(noted, "retired") == [{"rack": 0}], "once"
    assert cabinet.machine.retired() == (0,)
    assert not cabinet.machine.proposer.leading, "rack 2 may live"
    effects = retire(cabinet, 2) + cabinet.takes_over()
    assert notes(effects, "lineage") == [{"without": [0, 2], "versions": [0]}]
    record = cabinet.records[-1]
    assert isinstance(record, Lineage)
    assert record.reason.endswith("a person has retired rack 0, rack 2")
    assert cabinet.machine.retired() == (), "they have no seat any more"


def test_a_persons_word_needs_no_launcher_that_attests() -> None:
    begin = replace(BEGIN, policy=replace(BEGIN.policy, restart_attests=False))
    cabinet = Cabinet(records=[begin], reach=(1,))
    cabinet.tick()
    cabinet.tick(DETECT_NS)
    retire(cabinet, 2)
    assert cabinet.machine.proposer.dead == {member(2)}


def test_a_rack_that_speaks_is_not_dead_whatever_a_person_says() -> None:
    cabinet = Cabinet(reach=(1,))
    cabinet.tick()
    cabinet.tick(DETECT_NS)
    for nobody in (member(1), member(2, 7), member(WITNESS), Member(9, 9)):
        cabinet.give(Heard(Peer(PERSON, 0), 0, Retire(nobody.rack, life_of(nobody))))
    assert cabinet.machine.proposer.dead == set(), "myself, another life, no rack of this job"
    retire(cabinet, 2)
    assert cabinet.machine.retired() == (2,)
    cabinet.say(2)
    assert cabinet.machine.retired() == ()
    assert cabinet.machine.proposer.dead == set()


def test_member_that_hears_a_coordinator_retires_no_rack_itself() -> None:
    cabinet = Cabinet()
    body = orders(1, [BEGIN], to=member(1).incarnation)
    cabinet.give(Heard(Peer(0, 0), member(0).incarnation, body))
    retire(cabinet, 2)
    assert cabinet.machine.retired() == ()


def test_a_coordinator_awaits_an_evicted_rack_no_more_that_is_retired() -> None:
    """It has no seat, and whoever takes over knows its name from the log alone."""
    left = [BEGIN, Mitigation(0, EVICTED, "slow"), roster(1, [1, 2])]
    cabinet = Cabinet(records=left)
    assert retire(cabinet, 0, life=1) == [], "another life"
    cabinet.takes_over()
    for rack in (1, 2):
        cabinet.say(rack, versions=(0,))
    effects = retire(cabinet, 0)
    assert notes(effects, "retired") == [{"rack": 0}]
    assert notes(effects, "roster") == [
        {"racks": [1, 2], "votes": [1, 2], "reason": "a person has retired rack 0"}
    ]
    assert cabinet.machine.log.appended.away == {}
    assert notes(retire(cabinet, 0), "retired") == []


def test_a_coordinator_takes_the_seat_of_a_silent_rack_that_is_retired_at_once() -> None:
    cabinet = leading()
    assert notes(retire(cabinet, 2), "retired") == [], "it is heard"
    cabinet.say(2, versions=(0,))
    cabinet.say(1, versions=(0,))
    cabinet.reach = {1}
    heard_from(cabinet, [1], DETECT_NS)
    effects = retire(cabinet, 0)
    assert notes(effects, "roster") == [
        {"racks": [1, 2], "votes": [1, 2], "reason": "a person has retired rack 0"}
    ]
