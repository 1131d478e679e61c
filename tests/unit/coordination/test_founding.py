"""How a job begins: all racks answer the founder's question and vote; and what keeps it from
beginning twice under one name."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from mend.consensus.ballots import ballot_of, number_of
from mend.consensus.records import Genesis, Record
from mend.coordination.events import Effect, Heard
from mend.coordination.messages import Orders, Resume
from mend.types import SECOND, WITNESS, Peer
from tests.unit.coordination.job import Job
from tests.unit.coordination.nouns import (
    DETECT_NS,
    FIRST,
    HEARTBEAT_NS,
    acceptor_state,
    genesis,
    hello,
    member,
    notes,
    offer,
    orders,
    report,
)


def asked() -> Job:
    """Both racks have said hello, and nothing else."""
    job = Job()
    for rack in range(2):
        job.hear(rack, hello(rack))
    return job


def test_a_hello_alone_begins_nothing() -> None:
    """It may have waited in a queue for a founder that has died since."""
    job = asked()
    job.tick(HEARTBEAT_NS)
    assert job.records == []
    assert job.orders[1].ballot == FIRST, "the question"
    job.say(0)
    assert job.records == []
    job.say(1)
    assert isinstance(job.records[0], Genesis)


MASKS = (("mask", "a"), ("table", "b"))


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (MASKS, None),
        ((MASKS[0], ("table", "c")), ("table", 0)),
        ((("mask", "c"),), ("mask", 1)),
        ((*MASKS, ("more", "d")), ("more", 0)),
    ],
)
def test_buffers_that_differ_are_named_and_do_not_refuse(
    theirs: tuple[tuple[str, str], ...], said: tuple[str, int] | None
) -> None:
    job = Job()
    effects = [e for r, b in enumerate((MASKS, theirs)) for e in job.hello(r, buffers=b)]
    found = notes(effects, "buffers-differ")
    assert [(each["buffer"], each["more"]) for each in found] == ([said] if said else [])
    assert all((each["racks"], each["from_rack"]) == ([1], 0) for each in found)
    assert isinstance(job.records[0], Genesis)
    assert job.records[0] == begun(), "no record knows of buffers"


def begun() -> Record:
    job = Job()
    for rack in range(2):
        job.hello(rack)
    return job.records[0]


def test_buffers_of_racks_that_resume_may_differ() -> None:
    job, resume = Job(), Resume("ab" * 32, 1, (0,), (3,), (0,))
    effects = job.hello(0, buffers=MASKS, resume=resume) + job.hello(1)
    assert notes(effects, "genesis")
    assert not notes(effects, "buffers-differ")


def test_an_answer_to_a_former_life_of_the_founder_is_none() -> None:
    job = asked()
    job.say(0)
    promised = acceptor_state(0, 0, job.machine.proposer.ballot)
    for to in (0, member(0, life=1).incarnation):
        job.hear(1, report(10, to=to, acceptor_state=promised))
        assert job.records == []
    job.hear(1, report(11, acceptor_state=replace(promised, promised=ballot_of(0, 0), accepted=0)))
    assert job.records == [], "a report of before it was asked"
    job.hear(1, report(12, acceptor_state=promised))
    assert len(job.records) == 1


def test_an_answer_of_long_ago_is_none() -> None:
    job = asked()
    job.say(1)
    job.tick(DETECT_NS)
    job.say(0)
    assert job.records == []
    job.say(1)
    assert len(job.records) == 1


def test_a_founder_outbids_the_promises_to_its_former_life() -> None:
    job = asked()
    job.say(0)
    job.hear(
        1, report(1, acceptor_state=replace(acceptor_state(), promised=ballot_of(7, 0), accepted=0))
    )
    assert job.machine.proposer.leading
    assert number_of(job.machine.proposer.ballot) == 8
    assert job.orders[1].ballot == job.machine.proposer.ballot
    assert job.records == []
    for rack in range(2):
        job.say(rack)
    assert len(job.records) == 1


def test_a_founder_begins_again_when_a_rack_dies_before_its_vote() -> None:
    job = Job(3)
    for rack in range(3):
        job.hello(rack)
    for rack in (0, 1):
        job.say(rack, accepted=1)
    first = job.machine.proposer.ballot
    for _ in range(2):
        job.tick(DETECT_NS // 2)
        for rack in (0, 1):
            job.say(rack)
    job.hear(2, hello(2, racks=3, life=1), life=1)
    assert job.records == [], "the old one cannot be decided: its member is dead"
    assert job.machine.proposer.ballot > first
    job.lives[2] = 1
    job.reports[2] = report(0, to=job.to)
    for rack in range(3):
        job.reports[rack] = replace(job.reports[rack], acceptor_state=acceptor_state())
        job.say(rack)
    (record,) = job.records
    assert isinstance(record, Genesis)
    assert record.roster[2].member == member(2, life=1)


def test_a_founder_asks_anew_when_a_rack_that_has_answered_falls_silent() -> None:
    """It may have heard of a job that lives, and need the promises of those that wait here with a
    first record that can never be decided."""
    job = Job()
    for rack in range(2):
        job.hello(rack)
    job.say(0)
    job.say(1)
    assert len(job.records) == 1
    first = job.machine.proposer.ballot
    for _ in range(4):
        job.tick(DETECT_NS // 4)
        job.say(0, accepted=1)
    assert job.machine.proposer.ballot > first
    assert job.records == []


def test_a_rack_that_joined_nothing_founds_when_nobody_leads_it_any_more() -> None:
    """Rack 0 was started again and read the log of a job whose last members then died."""
    job = Job()
    acceptor, to = job.acceptor, member(0).incarnation
    body = orders(1, [genesis()], ballot=ballot_of(3, 1), to=to)
    body = replace(body, records=(replace(genesis(), roster=genesis().roster[1:]),))
    acceptor.append(body.ballot, 0, "", body.records, 1, 1)
    job.machine.election.heard(body, job.now_ns)
    job.tick()
    assert not job.machine.proposer.leading
    assert job.machine.deadline_ns() == job.now_ns + HEARTBEAT_NS, "to be awake until then"
    job.tick(2 * DETECT_NS - 1)
    assert not job.machine.proposer.leading
    job.tick(1)
    assert job.machine.proposer.leading
    assert number_of(job.machine.proposer.ballot) == 4
    assert acceptor.log.last == 0


def test_a_founder_that_founds_again_forgets_the_hellos_that_it_heard_before() -> None:
    """Racks 0 to 2 had said hello when the founder heard of a running job, which then died. They
    come back with another plan. The hello of a former rack 0 or 1 is no ground to refuse rack 2,
    nor is a rack refused that is not there."""
    job = Job(racks=3, witness=True)
    for rack in range(3):
        job.hear(rack, hello(rack, racks=3))
    running = orders(1, [genesis(racks=3)], ballot=ballot_of(5, 1), to=member(WITNESS).incarnation)
    job.machine.handle(Heard(Peer(1, 0), member(1).incarnation, running), job.now_ns)
    assert not job.machine.proposer.leading
    job.tick(2 * DETECT_NS)
    assert job.machine.proposer.leading
    for rack in (2, 0, 1):
        effects = job.hear(rack, hello(rack, racks=3, life=1, period_steps=99), life=1)
        assert notes(effects, "refused") == []
    assert sorted(job.machine.admission.hellos) == [0, 1, 2]


def test_a_witness_that_was_started_again_hears_no_vote_for_another_job() -> None:
    job = Job(witness=True)
    for rack in range(2):
        job.hear(rack, hello(rack))
    job.tick(10 * SECOND)
    assert job.records == []
    assert job.machine.me == Peer(WITNESS, 0)
    assert isinstance(job.orders[0], Orders)
    assert job.orders[0].lineage == ""


# -------------------------------------------------------------- a job that nobody lives to know


def perished(*back: int) -> Job:
    """A job of two racks and a witness, one commit old. Its racks fell silent; those of `back` were
    started again, say hello and name the life whose seat they had."""
    job = Job(witness=True).begun()
    job.committed(offer(0), offer(1))
    for _ in range(8):
        job.tick(DETECT_NS // 2)
    for rack in back:
        job.hear(rack, hello(rack, life=1), life=1)
    return job


def ask(job: Job) -> None:
    """Until the witness asks the racks to begin anew, or does not."""
    for _ in range(6):
        job.tick(DETECT_NS // 2)
        for rack in range(2):
            job.hear(rack, hello(rack, life=1), life=1)


def answer(job: Job, rack: int) -> list[Effect]:
    job.lives[rack] = 1
    promised = acceptor_state(0, 0, job.machine.proposer.ballot)
    return job.hear(rack, report(next(SERIALS), to=job.to, acceptor_state=promised), life=1)


SERIALS = itertools.count(100)


def test_a_witness_gives_up_a_job_once_every_rack_has_answered_in_a_new_life() -> None:
    job = perished(0, 1)
    lineage = job.acceptor.log.lineage
    ask(job)
    assert job.machine.proposer.leading
    assert job.orders[1].lineage == "", "the question"
    assert job.acceptor.log.decided == 2, "nothing is given up for a question"
    assert notes(answer(job, 0), "gives-up") == []
    (told,) = notes(answer(job, 1), "gives-up")
    assert told == {
        "records": 2, "versions": [1], "dead": ["rack 0", "rack 1"], "lineage": lineage[:12],
    }  # fmt: skip
    (record,) = job.records
    assert isinstance(record, Genesis)
    assert [seat.member for seat in record.roster] == [member(0, 1), member(1, 1)]
    assert record.witness == member(WITNESS)
    assert "2 records" in job.machine.gave_up
    for rack in range(2):
        accepted = acceptor_state(1, 0, job.machine.proposer.ballot)
        job.hear(rack, report(next(SERIALS), to=job.to, acceptor_state=accepted), life=1)
    assert job.machine.log.decided == 1


def test_a_witness_keeps_its_job_while_one_rack_may_live() -> None:
    """Rack 1 may only be cut off."""
    job = perished(0)
    for _ in range(10):
        job.tick(DETECT_NS // 2)
        job.hear(0, hello(0, life=1), life=1)
    assert not job.machine.proposer.leading
    assert job.acceptor.log.decided == 2
    assert job.machine.proposer.dead == {member(0)}


def test_a_hello_of_long_ago_does_not_end_a_job() -> None:
    job = perished()
    for rack in range(2):
        job.hear(rack, replace(hello(rack, life=1), after=()), life=1)
    for _ in range(8):
        job.tick(DETECT_NS // 2)
    assert job.machine.proposer.dead == set()
    assert not job.machine.proposer.leading


def test_a_witness_that_asks_for_a_new_job_stops_when_somebody_of_the_first_speaks() -> None:
    job = perished(0, 1)
    ask(job)
    assert job.machine.proposer.leading
    answer(job, 0)
    job.hear(1, report(1, to=job.to))
    assert not job.machine.proposer.leading
    answer(job, 1)
    assert job.acceptor.log.decided == 2


def test_a_witness_follows_a_life_that_it_did_not_know_rather_than_to_give_up() -> None:
    """Rack 1's second life got a seat while the witness was cut off, and coordinates."""
    job = perished(0, 1)
    ask(job)
    me = job.machine.member.incarnation
    body = orders(1, [genesis(witness=True)], ballot=ballot_of(9, 1), to=me)
    job._give(Heard(Peer(1, 0), member(1, 2).incarnation, body))
    assert not job.machine.proposer.leading
    job.tick(2 * DETECT_NS - 1)
    assert not job.machine.proposer.leading, "that one is heard"
