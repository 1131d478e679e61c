"""The director: it decides what the script says when it can be done, and nothing else ever."""

from __future__ import annotations

from msgspec.structs import replace

from mend.consensus.records import Commit, Drop, Ended, Offer, Record, Roster
from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.events import Effect, Fail
from mend.types import Peer
from mend_lab.replay.coordinator import ReplayCoordinator
from tests.unit.coordination.job import Job
from tests.unit.coordination.nouns import DETECT_NS, HEARTBEAT_NS, commit, member, offer

THEN = 7
"""The life in which the racks of the script were; now they are in life 0."""


def scripted(*script: Record, fragments: int = 1) -> Job:
    job = Job(fragments=fragments)
    options = CoordinatorOptions(2, HEARTBEAT_NS, DETECT_NS)
    job.machine = ReplayCoordinator(
        Peer(0, 0), member(0), "job", options, job.acceptor, script=script
    )
    return job.begun()


def then(rack: int, seq: int = 1, **more: int) -> Offer:
    return offer(rack, seq, life=THEN, **more)


def decided(job: Job) -> list[Record]:
    return job.records[1:]


def failed(effects: list[Effect]) -> list[str]:
    return [effect.detail for effect in effects if isinstance(effect, Fail)]


def settled(job: Job, version: int) -> None:
    for rack in range(2):
        job.say(rack, versions=(version,), offers=(), got=(), held=())


def test_members_are_those_of_the_script_whoever_else_is_there() -> None:
    job = scripted(commit(1, [then(1)]))
    job.offered(offer(0), offer(1))
    assert [proposal.members for proposal in job.orders[0].proposals] == [(offer(1),)]
    job.held()
    job.follow()
    (made,) = decided(job)
    assert isinstance(made, Commit)
    assert [share.member for share in made.members] == [member(1)], "matched by rack, of this life"


def test_replayed_coordinator_waits_for_what_is_named_and_for_all_results() -> None:
    job = scripted(commit(1, [then(0), then(1)]))
    job.offered(offer(0))
    job.sleep(60 * DETECT_NS)
    assert job.orders[0].proposals == (), "no grace, no K: it waits for rack 1"
    job.offered(offer(0), offer(1))
    assert job.orders[0].proposals != ()
    job.held(0)
    job.follow()
    assert decided(job) == [], "rack 1 must have the result, too"
    job.held()
    job.follow()
    assert len(decided(job)) == 1


def test_the_next_round_waits_until_all_hold_this_one() -> None:
    """Else a rank that hears of both at once forgets what it has merged."""
    job = scripted(commit(1, [then(0)]), commit(2, [then(1)]))
    job.offered(offer(0), offer(1))
    job.held()
    job.follow()
    assert len(decided(job)) == 1
    assert job.orders[0].proposals == ()
    settled(job, 1)
    job.say(1, offers=(offer(1),))
    assert [proposal.version for proposal in job.orders[0].proposals] == [2]


def test_drops_come_again_and_name_this_life() -> None:
    drop = Drop(0, (Ended(member(0, THEN), 1),), "older than staleness_max_rounds")
    job = scripted(drop, commit(1, [then(1)]))
    job.offered(offer(1))
    assert job.orders[0].proposals == (), "the drop is first"
    job.offered(offer(0), offer(1))
    job.follow()
    assert decided(job) == [Drop(0, (Ended(member(0), 1),), "older than staleness_max_rounds")]


def test_another_result_is_told_and_not_decided() -> None:
    job = scripted(commit(1, [then(0)]))
    job.offered(offer(0))
    told = failed(job.held(result=999))
    assert told == ["fragment 0 version 1: the result of rack 0 is another than that on the tape"]
    job.follow()
    assert decided(job) == []


def test_other_work_is_told_before_it_is_merged() -> None:
    """The weights of a merge come from it."""
    job = scripted(commit(1, [then(0)]))
    told = failed(job.offered(replace(offer(0), tokens=11)))
    assert told == ["rack 0, fragment 0, offer 1: tokens is 10 in the log of the tape, 11 now"]
    assert job.orders[0].proposals == ()


def test_the_job_is_over_when_the_script_is_and_all_leave() -> None:
    job = scripted(commit(1, [then(0)]))
    for rack in range(2):
        job.say(rack, leaving=True, idle=True)
    assert decided(job) == [], "there is a round to come"
    job.offered(offer(0))
    job.held()
    job.follow()
    settled(job, 1)
    job.follow()
    last = decided(job)[-1]
    assert isinstance(last, Roster)
    assert last.members == ()


def test_silence_costs_nobody_a_seat() -> None:
    job = scripted(commit(1, [then(0), then(1)]))
    job.tick(10_000 * DETECT_NS)
    assert decided(job) == []
