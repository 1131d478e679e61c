"""The member that appends to the log: who gets in, what is decided, how racks leave, what is
repeated."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mend.consensus.ballots import ballot_of, count_of
from mend.consensus.records import Commit, Drop, Ended, Genesis, Roster, Seat
from mend.coordination.admission import VISITOR
from mend.coordination.ending import END_REPEATED_NS, FAREWELL_NS
from mend.coordination.events import Connect, Finished
from mend.coordination.flow import batch_ns
from mend.coordination.membership import SILENT_DETECTS
from mend.coordination.messages import Bad, Declined, Orders, Reason, Refusal
from mend.types import SECOND, WITNESS, Peer
from tests.unit.coordination.job import Job, held_of
from tests.unit.coordination.nouns import (
    DETECT_NS,
    HEARTBEAT_NS,
    acceptor_state,
    digest,
    hello,
    member,
    notes,
    offer,
    offer_id,
    report,
    sent,
)


def racks_of(seats: tuple[Seat, ...]) -> list[int]:
    return [seat.member.rack for seat in seats]


# -------------------------------------------------------------- getting in


def test_genesis_needs_every_rack_never_a_quorum() -> None:
    job = Job(racks=3)
    job.hello(2)
    job.hello(0)
    job.tick(100 * SECOND)
    assert job.records == []
    assert job.orders[0].missing == (1,)
    job.hello(2)
    job.hello(0)
    job.hello(1)
    (record,) = job.records
    assert isinstance(record, Genesis)
    assert racks_of(record.roster) == [0, 1, 2], "by number, not by arrival"
    assert record.digests == hello(0, racks=3).digests, "version 0 is the lowest rack's"
    assert not record.witness
    assert job.orders[1].records == (record,)
    assert job.orders[1].missing == ()


def test_genesis_is_decided_by_all_its_members() -> None:
    """A majority could begin a second job beside one that still has a member."""
    job = Job(racks=3)
    for rack in range(3):
        job.hello(rack)
    for rack in (1, 2):
        job.say(rack, accepted=1)
    assert job.machine.log.decided == 0
    job.say(0, accepted=1)
    assert job.machine.log.decided == 1
    assert job.orders[0].decided == 1


def test_a_rack_is_connected_once_and_answered_at_once() -> None:
    job = Job()
    effects = job.hello(1)
    assert Connect(Peer(1, 0), "tcp://rack1:1") in effects
    assert notes(effects, "hello") == [{"rack": 1, "address": "tcp://rack1:1"}]
    assert len(sent(effects, Peer(1, 0))) == 1
    again = job.hello(1)
    assert again == []


def test_a_difference_is_named_to_the_rack_that_differs() -> None:
    job = Job()
    job.hello(0)
    effects = job.hello(1, facts=(("model", "tiny"), ("steps", "9")))
    said = [("plan", "rack 1 differs from rack 0: steps is 9 there and not here")]
    assert job.refusals(effects, 1) == said
    assert Connect(Peer(1, VISITOR), "tcp://rack1:1") in effects
    assert notes(effects, "refused")[0]["rack"] == 1
    assert str(notes(effects, "refused")[0]["detail"]).endswith("steps is 9 there and 8 here")
    assert job.records == []
    assert job.orders[0].missing == (1,)
    assert job.orders[0].why == (Reason(said[0][1], refused=1),)
    again = job.hello(1, facts=(("model", "tiny"), ("steps", "9")))
    assert job.refusals(again, 1) == said, "as often as it asks"
    assert notes(again, "refused") == [], "but it is noted once"
    job.hello(1)
    assert len(job.records) == 1, "the right rack 1 is welcome"


def test_a_refused_rack_that_came_right_is_no_reason_to_wait_any_more() -> None:
    job = Job(racks=3)
    job.hello(0)
    job.hello(1, facts=(("model", "tiny"), ("steps", "9")))
    assert len(job.orders[0].why) == 1
    job.hello(1)
    assert (job.orders[0].missing, job.orders[0].why) == ((2,), ())


def test_the_lowest_rack_is_the_measure_also_when_it_comes_last() -> None:
    job = Job(racks=3)
    job.hello(1)
    job.hello(2, staleness_max_rounds=9)
    effects = job.hello(0, staleness_max_rounds=9)
    ((kind, detail),) = job.refusals(effects, 1)
    assert kind == "plan"
    assert detail.startswith("rack 1 differs from rack 0: staleness_max_rounds is")


def test_two_live_processes_with_one_number_the_second_is_refused() -> None:
    job = Job()
    job.hello(1)
    assert job.refusals(job.hello(1, life=1), 1) == [], "its former life may just be dying"
    for _ in range(2 * DETECT_NS // HEARTBEAT_NS):
        job.tick(HEARTBEAT_NS)
        job.hello(1)
    assert job.refusals(job.hello(1, life=1), 1) == []
    job.tick(1)
    said = "another live process says it is rack 1 of job 'job'"
    assert job.refusals(job.hello(1, life=1), 1) == [("taken", said)]
    assert job.machine.views[1].member == member(1)


def test_a_rack_that_was_started_again_takes_over_from_its_dead_life() -> None:
    job = Job()
    job.hello(1)
    job.tick(DETECT_NS)
    assert job.refusals(job.hello(1, life=1), 1) == []
    job.hello(0)
    (record,) = job.records
    assert isinstance(record, Genesis)
    assert record.roster[1].member == member(1, life=1)


def test_a_rack_that_gives_up_before_the_start_leaves_no_seat_behind() -> None:
    job = Job()
    job.hello(1)
    job.say(1, gone=True)
    assert job.machine.views == {}
    job.hello(0)
    assert job.records == []
    job.hello(1, life=1)
    assert len(job.records) == 1


def test_a_rack_that_comes_later_is_seated_as_a_learner() -> None:
    job = Job(racks=3).begun()
    before = job.records
    assert job.hello(2) == [], "a hello that was under way is no second rack"
    assert job.records == before
    job.hello(2, life=1)
    assert job.records == before, "its former life may just be dying"
    for _ in range(4):
        job.tick(DETECT_NS // 2)
        job.follow(0, 1)
    effects = job.hello(2, life=1)
    assert notes(effects, "roster") == [
        {"racks": [0, 1, 2], "votes": [0, 1], "reason": "rack 2 is back"}
    ]
    record = job.records[-1]
    assert isinstance(record, Roster)
    assert (racks_of(record.members), record.non_voters) == ([0, 1, 2], (2,))
    assert record.members[2].member == member(2, life=1)
    assert job.orders[2].to == member(2, life=1).incarnation
    asked = acceptor_state(0, 0, job.machine.proposer.ballot)
    heard = job.orders[2].serial
    job.hear(2, report(1, versions=(-1,), acceptor_state=asked, heard=heard), life=1)
    assert (job.orders[2].prev, job.orders[2].records[0]) == (0, job.records[0])


def test_late_frames_of_a_former_life_are_not_heard() -> None:
    job = Job(racks=3).begun()
    for _ in range(4):
        job.tick(DETECT_NS // 2)
        job.follow(0, 1)
    job.come_back(2)
    job.follow(0, 1)
    for _ in range(4):
        job.tick(DETECT_NS // 2)
        job.follow(0, 1)
    before, view = job.records, job.machine.views[2]
    assert not view.live(job.now_ns, DETECT_NS), "so that its seat looks free"
    late = replace(job.reports[0], serial=10**6, gone=True)
    for effects in (job.hello(2), job.hear(2, late)):
        assert effects == []
    assert (job.records, job.machine.views[2], view.report) == (before, view, None)


# -------------------------------------------------------------- deciding


@pytest.mark.parametrize(
    ("racks", "witness", "accepting", "decided"),
    [
        (2, False, [0], True), (2, False, [1], False), (2, True, [0], True), (2, True, [1], True),
        (2, True, [], False), (3, False, [2], False), (3, False, [1, 2], True),
        (4, True, [1], False), (4, True, [1, 3], True),
    ],
)  # fmt: skip
def test_a_quorum_of_the_roster_decides(
    racks: int, witness: bool, accepting: list[int], decided: bool
) -> None:
    job = Job(racks, witness=witness).begun()
    job.offered(*(offer(rack) for rack in range(racks)))
    job.held()
    assert isinstance(job.records[1], Commit)
    for rack in accepting:
        job.say(rack, accepted=2)
    assert (job.machine.log.decided == 2) is decided


def test_a_whole_round() -> None:
    job = Job(racks=2, witness=True).begun()
    first, second = offer(0, tokens=30), offer(1, tokens=10)
    job.offered(second, first)  # the later rack first
    (proposal,) = job.orders[0].proposals
    assert proposal == job.orders[1].proposals[0]
    assert proposal.members == (first, second), "by rack, not by arrival"
    job.held(1)
    assert job.records[1:] == []
    job.held(0)
    (record,) = job.records[1:]
    assert isinstance(record, Commit)
    assert [share.member for share in record.members] == [member(0), member(1)]
    assert record.digests == (digest(1000),)
    assert job.orders[0].offers == (), "what is named is not open"
    effects = job.follow()
    assert notes(effects, "decided") == [{"fragment": 0, "version": 1}]
    assert job.orders[0].proposals == ()


def test_an_offer_arrives_when_it_cannot_be_lost_any_more() -> None:
    """With a witness both racks must have it; without one rack 0 is in every quorum."""
    job = Job(racks=2, witness=True, grace_ns=0).begun()
    job.say(1, offers=(offer(1),))
    job.tick(SECOND // 2)
    assert job.orders[0].proposals == ()
    assert job.orders[0].offers == (offer(1),), "announced, so that it can be fetched"
    job.say(0, got=(offer_id(offer(1)),))
    assert job.orders[0].proposals[0].members == (offer(1),)

    alone = Job(racks=2, grace_ns=0).begun()
    alone.say(0, offers=(offer(0),))
    assert alone.orders[1].proposals[0].members == (offer(0),)
    other = Job(racks=2, grace_ns=0).begun()
    other.say(1, offers=(offer(1),))
    assert other.orders[1].proposals == ()


def test_bytes_at_a_dead_rack_do_not_count() -> None:
    job = Job(racks=3, grace_ns=0).begun()
    job.say(1, got=(offer_id(offer(2)),))
    job.tick(DETECT_NS // 2)
    job.say(0)
    job.tick(DETECT_NS // 2)
    job.say(0)
    job.say(2, offers=(offer(2),))
    assert job.orders[0].live == (0, 2)
    assert job.orders[0].proposals == ()
    job.say(1)
    assert job.orders[0].live == (0, 1, 2)
    assert job.orders[0].proposals[0].members == (offer(2),)


def test_below_k_nothing_commits_and_it_is_said_why() -> None:
    job = Job(racks=2, witness=True, merge_min_racks=2, grace_ns=0).begun()
    job.offered(offer(0))
    for _ in range(100):
        job.tick(HEARTBEAT_NS)
        job.say(0)
        job.say(1)
    assert job.orders[0].proposals == ()
    why = (Reason("1 of 2 offers have arrived, waiting for rack 1", fragment=0),)
    assert job.orders[0].why == why
    job.say(1, declined=(Declined(0, 0, "its delta is not finite"),))
    assert job.orders[0].proposals == (), "a refused capture is no offer"


def test_racks_that_differ_are_reported_and_asked_again() -> None:
    job = Job(racks=2, witness=True).begun()
    job.offered(offer(0), offer(1))
    job.held(0, result=1)
    effects = job.held(1, result=2)
    ((fault,),) = [[each["detail"] for each in notes(effects, "fault")]]
    assert "2 different results" in str(fault)
    assert job.records[1:] == []
    assert count_of(job.orders[0].proposals[0].attempt) == 2
    job.held(0, 1, result=1)
    assert isinstance(job.records[1], Commit)


def test_an_offer_that_one_rack_finds_bad_is_dropped_and_the_rest_is_merged() -> None:
    """The verdict is in the log; who is told there that his offer is bad ends."""
    job = Job(racks=3).begun()
    offers = [offer(rack) for rack in range(3)]
    job.offered(*offers)
    (first,) = job.orders[0].proposals
    effects = job.say(2, bad=(Bad(offer_id(offers[1]), "its payload holds NaN"),))
    (note,) = notes(effects, "drop")
    assert note["racks"] == [1]
    job.follow()
    drop = job.records[-1]
    assert isinstance(drop, Drop)
    assert (drop.dropped, drop.diverged) == ((Ended(member(1), 1),), True)
    (again,) = job.orders[0].proposals
    assert again.attempt == first.attempt + 1
    assert [made.member.rack for made in again.members] == [0, 2]
    job.held(0, 2)
    job.follow()
    assert job.machine.log.committed.versions == [1]
    merged = job.records[-1]
    assert isinstance(merged, Commit)
    assert [each.member.rack for each in merged.members] == [0, 2]


def test_fragments_do_not_wait_for_each_other() -> None:
    job = Job(fragments=2, grace_ns=0).begun()
    job.say(0, offers=(offer(0, fragment=0), offer(0, fragment=1)))
    assert [proposal.fragment for proposal in job.orders[1].proposals] == [0, 1]
    first, second = job.orders[0].proposals
    job.say(0, held=(held_of(1, 1, second.attempt),))
    (record,) = job.records[1:]
    assert isinstance(record, Commit)
    assert record.fragment == 1
    job.say(0, held=(held_of(0, 1, first.attempt),))
    assert len(job.records) == 3


def test_a_fragment_with_an_undecided_commit_waits() -> None:
    job = Job(racks=3).begun()
    job.offered(offer(0), offer(1), offer(2))
    job.held()
    assert len(job.records) == 2
    job.offered(*(offer(rack, 2, base=0, applied=1) for rack in range(3)))
    job.tick(SECOND)
    assert len(job.records) == 2
    job.follow()
    assert job.orders[0].proposals[0].version == 2


def test_offer_that_is_too_old_is_dropped() -> None:
    job = Job(staleness_max_rounds=0).begun()
    job.committed(offer(0), offer(1))
    job.offered(offer(1, 2, base=0, applied=1))
    record = job.records[-1]
    assert isinstance(record, Drop)
    assert [ended.seq for ended in record.dropped] == [2]
    assert job.orders[0].offers == ()


def test_an_offer_that_is_too_old_has_not_arrived() -> None:
    job = Job(racks=2, witness=True, staleness_max_rounds=0, grace_ns=SECOND // 2).begun()
    job.committed(offer(0), offer(1))
    job.offered(offer(0, 2, base=1), offer(1, 2, base=0, applied=1))
    assert job.orders[0].proposals == ()
    job.tick(SECOND // 2)
    assert job.orders[0].proposals[0].members == (offer(0, 2, base=1),)
    job.held()
    record = job.records[-1]
    assert isinstance(record, Commit)
    assert [ended.member for ended in record.dropped] == [member(1)]


# -------------------------------------------------------------- messages that come again


def test_replayed_and_reordered_reports_change_nothing() -> None:
    job = Job(racks=2, witness=True).begun()
    job.offered(offer(0), offer(1))
    old = dict(job.reports)
    job.held()
    job.follow()
    for rack in (0, 1):
        job.say(rack, versions=(1,), offers=(), got=(), held=())
    last, views = job.machine.log.last, {r: v.report for r, v in job.machine.views.items()}
    for rack in (0, 1, 0):
        job.hear(rack, old[rack])
        job.hear(rack, job.reports[rack])
    assert job.machine.log.last == last
    assert {r: v.report for r, v in job.machine.views.items()} == views
    assert job.orders[0].offers == ()


def test_an_offer_that_has_ended_does_not_come_back() -> None:
    """A rack goes on reporting its offer until it has applied the version that names it."""
    job = Job().begun()
    job.committed(offer(0), offer(1))
    job.say(0, offers=(offer(0, applied=0),), got=(offer_id(offer(1)),))
    job.say(1, offers=(offer(1, applied=1),), got=(offer_id(offer(0)),))
    job.tick(SECOND // 2)
    assert job.orders[0].offers == ()
    assert len(job.records) == 2
    job.say(0, offers=(offer(0, 2, base=1),))
    assert job.orders[0].offers == (offer(0, 2, base=1),)


def test_a_report_again_is_a_sign_of_life() -> None:
    job = Job(racks=2, witness=True).begun()
    for _ in range(3):
        job.tick(DETECT_NS // 2)
        job.hear(0, job.reports[0])
    assert job.orders[0].live == (0,)


def test_reports_of_strangers_are_not_heard() -> None:
    job = Job().begun()
    job.hear(0, report(99, leaving=True, gone=True), life=1)
    job.hear(7, report(99))
    job.hear(0, report(99, versions=(0, 0)))
    job.hear(0, report(99, offers=(offer(1),)))
    assert job.machine.views[0].report == job.reports[0]
    assert sorted(job.machine.views) == [0, 1]


def test_a_rack_that_says_it_is_not_complete_is_not_live() -> None:
    job = Job(racks=2, witness=True).begun()
    job.say(1, fresh=False)
    assert job.orders[0].live == (0,)
    job.say(1, fresh=True)
    assert job.orders[0].live == (0, 1)


# -------------------------------------------------------------- orders


def test_records_are_sent_once_and_again_when_they_are_missing() -> None:
    job = Job(racks=2, witness=True).begun()
    job.offered(offer(0), offer(1))
    job.held(0)
    effects = job.held(1)
    (first,) = [body for body in sent(effects, Peer(1, 0)) if body.records]
    assert (first.prev, [type(record) for record in first.records]) == (1, [Commit])
    assert first.chain == job.machine.log.chain(1)
    for _ in range(3):
        job.tick(HEARTBEAT_NS)
        assert (job.orders[1].prev, job.orders[1].records) == (2, ()), "it is under way"
        assert job.orders[1].chain == job.machine.log.chain(2)
    job.say(1, heard=first.serial - 1)
    assert job.orders[1].records == (), "what it has answered was said before"
    job.say(1, heard=first.serial + 1)
    assert (job.orders[1].prev, job.orders[1].records) == (1, first.records)
    job.tick(HEARTBEAT_NS)
    assert job.orders[1].records == ()
    job.tick(DETECT_NS)
    assert job.orders[1].records == first.records, "no answer for long"
    job.say(1, accepted=2)
    assert (job.orders[1].prev, job.orders[1].records) == (2, ())
    assert job.orders[0].ballot == ballot_of(1, WITNESS)


def test_orders_are_sent_at_once_when_they_change_else_each_heartbeat() -> None:
    job = Job().begun()
    serial = job.orders[0].serial
    assert job.tick(HEARTBEAT_NS - 1) == []
    assert job.machine.deadline_ns() == job.now_ns + 1
    job.tick(1)
    assert job.orders[0].serial == serial + 1
    effects = job.say(1, offers=(offer(1),))
    assert len(sent(effects)) == 2
    assert job.orders[0].serial == serial + 2


def test_settled_is_what_every_live_rack_holds() -> None:
    job = Job(racks=2, witness=True).begun()
    job.offered(offer(0), offer(1))
    job.held()
    job.follow()
    job.say(0, versions=(1,))
    assert job.orders[0].settled == (0,)
    job.say(1, versions=(1,))
    assert job.orders[0].settled == (1,)
    job.say(1, versions=(-1,))
    assert job.orders[0].settled == (-1,)
    for _ in range(3):
        job.tick(DETECT_NS // 2)
        job.say(0)
    assert job.orders[0].settled == (1,), "the dead hold nobody back"


def test_the_end_of_grace_is_a_deadline() -> None:
    job = Job(racks=2, witness=True, grace_ns=HEARTBEAT_NS // 4).begun()
    job.offered(offer(0))
    assert job.machine.deadline_ns() == job.now_ns + HEARTBEAT_NS // 4
    job.tick(HEARTBEAT_NS // 4)
    assert job.orders[0].proposals[0].members == (offer(0),)


# -------------------------------------------------------------- leaving


def done(job: Job, *racks: int) -> None:
    versions = tuple(job.machine.log.appended.versions)
    for rack in racks:
        job.say(rack, leaving=True, idle=True, versions=versions)


def test_racks_leave_together_when_all_are_done() -> None:
    job = Job(racks=2, witness=True).begun()
    done(job, 0)
    assert len(job.records) == 1
    done(job, 1)
    record = job.records[-1]
    assert isinstance(record, Roster)
    assert (record.members, record.number, record.reason) == ((), 1, "all racks are done")
    job.follow(0)
    assert job.machine.log.committed.over
    job.follow(1)
    assert Finished() in job.tick()


@pytest.mark.parametrize(
    "missing", [{"leaving": False}, {"idle": False}, {"versions": (0,)}], ids=str
)
def test_rack_that_is_not_done_delays_the_end(missing: dict[str, object]) -> None:
    job = Job().begun()
    job.committed(offer(0), offer(1))
    done(job, 0)
    job.say(1, **{"leaving": True, "idle": True, "versions": (1,), **missing})
    job.tick(SECOND // 2)
    assert not any(isinstance(record, Roster) for record in job.records)


def test_an_open_offer_holds_the_end() -> None:
    job = Job(racks=2, witness=True, merge_min_racks=2).begun()
    job.say(0, offers=(offer(0),))
    done(job, 0, 1)
    assert not any(isinstance(record, Roster) for record in job.records)


def rack_1_falls_silent(job: Job) -> None:
    """For so long that nobody waits for it. It loses its vote where there is a witness."""
    for _ in range(2 * SILENT_DETECTS + 2):
        job.tick(DETECT_NS // 2)
        job.say(0)
        if job.machine.me.rack == WITNESS:
            job.vote()
    job.follow(0)


def test_the_dead_are_not_waited_for_at_the_end() -> None:
    job = Job(racks=2, witness=True).begun()
    job.say(1, offers=(offer(1),))
    rack_1_falls_silent(job)
    done(job, 0)
    record = job.records[-1]
    assert isinstance(record, Roster)
    assert (record.members, record.reason) == ((), "all racks are done")


def test_the_end_is_repeated_until_all_have_heard_it_or_some_seconds() -> None:
    job = Job(racks=2, witness=True).begun()
    done(job, 0, 1)
    job.follow(0)
    assert job.machine.log.committed.over
    assert Finished() not in job.tick(FAREWELL_NS - 1)
    assert job.orders[1].records == (job.records[-1],)
    assert Finished() in job.tick(1)


def ended_without_rack_1(*, witness: bool) -> Job:
    job = Job(racks=2, witness=witness).begun()
    rack_1_falls_silent(job)
    done(job, 0)
    record = job.records[-1]
    assert isinstance(record, Roster)
    assert (record.members, record.non_voters) == ((), (1,)), "who was missing"
    job.follow(0)
    return job


def test_a_witness_tells_a_rack_that_comes_too_late_that_the_job_is_over() -> None:
    """It left with the last rack; who was started again then waited for 120 s, and was told that
    nobody answers."""
    job = ended_without_rack_1(witness=True)
    assert job.machine.log.committed.over
    assert Finished() not in job.tick(FAREWELL_NS)
    (refusal,) = sent(job.hello(1, life=1), Peer(1, VISITOR))
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, "is over: all its racks have left" in refusal.detail) == ("over", True)
    assert Finished() not in job.tick(END_REPEATED_NS - FAREWELL_NS - 1)
    assert Finished() in job.tick(1)


def test_a_rack_that_comes_back_is_not_told_of_an_end_that_is_not_decided() -> None:
    """Those that could decide it may have died: then the job goes on, or begins anew, with it."""
    job = Job(racks=3).begun()
    done(job, 0, 1, 2)
    assert job.machine.log.appended.over
    for _ in range(3):
        job.tick(DETECT_NS // 2)
        for rack in (0, 1):
            job.say(rack)
    assert sent(job.hello(2, life=1), Peer(2, VISITOR)) == []
    assert job.machine.log.last == 2, "nor is anything appended behind it"
    job.follow(0, 1)
    assert job.machine.log.committed.over
    (refusal,) = sent(job.hello(2, life=1), Peer(2, VISITOR))
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "over"


def test_a_rack_that_coordinates_does_not_stay_for_those_that_come_too_late() -> None:
    """It holds a GPU."""
    job = ended_without_rack_1(witness=False)
    assert Finished() in job.tick(FAREWELL_NS)


def test_a_rack_that_is_gone_need_not_confirm() -> None:
    job = Job(racks=2, witness=True).begun()
    done(job, 0, 1)
    job.say(1, gone=True)
    assert Finished() in job.follow(0)


def test_when_all_are_gone_it_is_over_without_a_word() -> None:
    job = Job(racks=2, witness=True).begun()
    assert Finished() not in job.say(0, gone=True)
    assert Finished() in job.say(1, gone=True)


def test_a_rack_in_a_hurry_leaves_alone_and_quorums_are_counted_anew() -> None:
    job = Job(racks=3, grace_ns=0).begun()
    job.say(0, leaving=True, hurry=True, idle=True, offers=(offer(0),))
    (record,) = job.records[1:]
    assert isinstance(record, Roster)
    assert racks_of(record.members) == [1, 2]
    assert record.reason == "rack 0 left"
    job.follow()
    assert job.machine.log.committed.voters == {member(1), member(2)}
    assert job.orders[1].offers == (), "what it offered is not merged any more"
    job.offered(offer(1))
    job.held(1)
    job.say(1, accepted=3)
    assert job.machine.log.decided == 3, "rack 1 is the lowest of two now"


def test_a_roster_is_decided_by_the_roster_before_it() -> None:
    job = Job(racks=3).begun()
    job.say(0, leaving=True, hurry=True, idle=True)
    job.say(1, accepted=2)
    assert job.machine.log.decided == 1, "1 of 3, though it would be the lowest of 2"
    job.say(2, accepted=2)
    assert job.machine.log.decided == 2


def test_nothing_is_appended_behind_an_undecided_roster() -> None:
    """What is behind it would be decided by a roster that is not in force yet."""
    job = Job(racks=3, grace_ns=SECOND // 2).begun()
    job.offered(offer(0), offer(1))
    job.tick(SECOND // 2)
    assert len(job.orders[0].proposals[0].members) == 2
    job.say(2, leaving=True, hurry=True, idle=True)
    assert isinstance(job.records[-1], Roster)
    job.held(0, 1)
    job.tick(SECOND // 2)
    assert len(job.records) == 2, "no commit, though every quorum holds the result"
    job.follow(0, 1)
    assert isinstance(job.records[-1], Commit)


def test_a_roster_waits_until_everything_before_it_is_decided() -> None:
    """Who holds the newest decided version is not known before that."""
    job = Job(racks=3).begun()
    job.offered(offer(0), offer(1), offer(2))
    job.held()
    assert isinstance(job.records[-1], Commit)
    job.say(2, leaving=True, hurry=True, idle=True, offers=())
    assert isinstance(job.records[-1], Commit)
    for rack in (0, 1):
        job.say(rack, versions=(1,))
    job.follow(0, 1)
    assert isinstance(job.records[-1], Roster)


def test_no_roster_goes_behind_an_undecided_one() -> None:
    """It would change two votes at once for a quorum that knows neither."""
    job = Job(racks=4).begun()
    for rack in (2, 3):
        job.say(rack, leaving=True, hurry=True, idle=True)
    assert [racks_of(r.members) for r in job.records if isinstance(r, Roster)] == [[0, 1, 3]]
    job.follow(0, 1)
    rosters = [racks_of(r.members) for r in job.records if isinstance(r, Roster)]
    assert rosters == [[0, 1, 3], [0, 1]]


def test_a_rack_may_not_take_the_only_copy_along() -> None:
    """Racks 0 and 1 hold version 1; when rack 0 leaves, rack 2 alone could lose it with rack 1."""
    job = Job(racks=3).begun()
    job.offered(offer(0), offer(1), offer(2))
    job.held(0, 1)
    job.follow()
    job.say(0, versions=(1,), leaving=True, hurry=True, idle=True, offers=())
    assert isinstance(job.records[-1], Commit), "nobody who stays has version 1"
    job.say(2, versions=(1,))
    assert isinstance(job.records[-1], Commit), "rack 1 alone could decide without it"
    job.say(1, versions=(1,))
    assert isinstance(job.records[-1], Roster)


def test_a_rack_that_said_its_last_word_is_removed() -> None:
    job = Job(racks=3, witness=True).begun()
    job.say(1, gone=True)
    record = job.records[-1]
    assert isinstance(record, Roster)
    assert racks_of(record.members) == [0, 2]
    assert job.machine.log.appended.voters == {member(0), member(2), member(WITNESS)}


# -------------------------------------------------------------- large jobs


def large() -> Job:
    """12 racks, whose news waits for more of it, and all have had their orders."""
    job = Job(racks=12).begun()
    job.tick(HEARTBEAT_NS)
    return job


def test_reports_of_many_racks_are_acted_on_together() -> None:
    """Each of them was answered to all: R racks that each say something cost R times R."""
    job = large()
    for rack in range(12):
        assert job.say(rack, offers=(offer(rack),)) == []
    due_ns = job.machine.deadline_ns()
    assert 0 < due_ns - job.now_ns <= batch_ns(12)
    told = [body for body in sent(job.tick(due_ns - job.now_ns)) if isinstance(body, Orders)]
    assert len(told) == 12
    assert all(len(body.offers) == 12 for body in told), "all of it at once"


@pytest.mark.parametrize("said", [{"gone": True}, {"leaving": True}])
def test_a_last_word_is_acted_on_at_once(said: dict[str, bool]) -> None:
    job = large()
    job.say(1, offers=(offer(1),))
    assert sent(job.say(2, **said)), "with what was collected"
    assert job.machine.batch_due_ns is None


def test_a_vote_that_goes_to_another_ends_what_was_collected() -> None:
    job = large()
    job.say(1, offers=(offer(1),))
    lost = replace(acceptor_state(1, 1, ballot_of(2, 3)), last=1)
    effects = job.hear(2, replace(job.reports[2], serial=99, acceptor_state=lost))
    assert notes(effects, "deposed")
    assert job.machine.batch_due_ns is None
