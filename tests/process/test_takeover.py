"""The coordinator is killed: another takes over, nothing is lost. A killed rack comes back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mend.types import WITNESS
from tests.process.conftest import Jobs
from tests.process.injected import WITHHOLDS
from tests.process.racks import Job, Result, until
from tests.process.train import tokens_of

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "stall_max_s": 0.2,
    "shutdown_timeout_s": 60,
    "join_copies_state": False,  # the other rack waits at a gate, where it copies nothing
}  # fmt: skip


def first_commits(job: Job, racks: int) -> None:
    for rack in range(racks):
        job.event(rack, "commit", fragment=1)


def merged_everything(results: list[Result]) -> None:
    """The racks left together, on one model, and every token of every rack is in it."""
    assert len({result.digest for result in results}) == 1
    assert all(result.weights == results[0].weights for result in results)
    assert all(result.commits == results[0].commits for result in results)
    for result in results:
        assert result.status["ledger"]["open"] == 0
        assert not result.kinds("left-alone", "kept-local", "discarded", "differs", "fault")
        assert result.threads == []


def test_without_its_witness_a_job_goes_on_under_a_rack(jobs: Jobs) -> None:
    job = jobs(witness=True)
    gate = job.gate()
    for rack in range(2):
        job.start(rack, steps=48, config=CONFIG, pace_ms=2, at={"12": [["gate", gate]]})
    first_commits(job, 2)
    assert job.witness is not None
    job.witness.kill()
    stands = job.event(0, "stands")
    assert stands["silent_ms"] >= 1900, "a coordinator that only pauses stays the coordinator"
    assert job.event(0, "takes-over")["ballot"] == 2
    Path(gate).touch()
    results = job.finished()
    merged_everything(results)
    assert results[0].status["step"] == 48
    assert {c["version"] for c in results[0].commits} >= {5, 6}, "rounds went on after it"


@pytest.mark.parametrize("seat_timeout_s", [3600, 0])
def test_two_of_three_racks_go_on_without_the_rack_that_coordinated(
    jobs: Jobs, seat_timeout_s: int
) -> None:
    """And without the dead rack, which loses its seat after a while; never where the setting says
    so, however long it is silent."""
    job = jobs(racks=3)
    dead, gate = job.gate("dead"), job.gate()
    config = {**CONFIG, "seat_timeout_s": seat_timeout_s}
    for rack in range(3):
        at = {"12": [["gate", dead], ["age_silence", 0, 10**6], ["gate", gate]]}
        job.start(rack, steps=48, config=config, pace_ms=2, at=at)
    first_commits(job, 3)
    job.kill(0)
    until(
        lambda: any(job.events(rack, kind="takes-over") for rack in (1, 2)),
        lambda: f"one of the others takes over\n{job.stacks()}",
    )
    Path(dead).touch()
    if seat_timeout_s:
        put_out = job.event(1, "roster", racks=[1, 2])
        assert put_out["reason"] == "rack 0 was absent for too long"
    Path(gate).touch()
    results = job.finished(1, 2)
    merged_everything(results)
    rosters = [event["racks"] for event in results[0].kinds("roster")]
    assert ([1, 2] in rosters) == bool(seat_timeout_s)
    members = [[m["rack"] for m in commit["members"]] for commit in results[0].commits]
    since = next(i for i, racks in enumerate(members) if 0 not in racks)
    assert [1, 2] in members[since:]
    assert all(0 not in racks for racks in members[since:])


def test_a_killed_rack_is_started_again_and_takes_part(jobs: Jobs) -> None:
    """It begins on the newest merged model, and what it trains from there on is merged."""
    job = jobs(witness=True)
    gates = [job.gate("one"), job.gate("two")]
    options: dict[str, Any] = {"steps": 48, "config": CONFIG, "pace_ms": 2}
    job.start(0, **options, at={"12": [["gate", gates[0]]]})
    job.start(1, **options, at={"12": [["gate", job.gate("never")]]})
    first_commits(job, 2)
    job.kill(1)
    former = job.events(1)
    job.start(1, **options)
    job.event(1, "joined")
    Path(gates[0]).touch()
    results = job.finished()
    assert results[0].digest == results[1].digest
    assert results[0].weights == results[1].weights
    assert min(job.event(1, "joined")["versions"]) >= 1
    again = [m for c in results[0].commits for m in c["members"] if m["rack"] == 1]
    assert len([m for m in again if m["seq"] == 1]) >= 3, "its offers count from one again"
    assert all(result.status["ledger"]["open"] == 0 for result in results)
    assert job.events(1)[: len(former)] == former, "the first life's events are still there"


def test_a_rack_that_lost_its_quorum_goes_on_when_the_dead_one_is_started_again(jobs: Jobs) -> None:
    """Two racks without a witness: rack 1 alone may decide nothing. That rack 0 is started again
    proves that its former life is over: rack 1 begins a new lineage, and rack 0 joins it."""
    job = jobs()
    gate = job.gate()
    options: dict[str, Any] = {"steps": 48, "config": CONFIG, "pace_ms": 2}
    job.start(0, **options, at={"12": [["gate", job.gate("never")]]})
    job.start(1, **options, at={"12": [["gate", gate]]})
    first_commits(job, 2)
    job.kill(0)
    job.event(1, "stands")
    job.start(0, **options)
    anew = job.event(1, "lineage")
    assert anew["without"] == [0]
    job.event(0, "joined")
    Path(gate).touch()
    results = job.finished()
    assert results[0].digest == results[1].digest
    assert results[0].weights == results[1].weights
    assert all(result.status["ledger"]["open"] == 0 for result in results)
    assert not any(result.kinds("left-alone", "differs", "fault") for result in results)


def votes(job: Job) -> list[int]:
    """Who has one, as rack 0 decided last."""
    return job.events(0, kind="roster")[-1]["votes"]


@pytest.mark.parametrize("witness", [False, True])
def test_two_of_three_racks_die_together_and_are_started_again(jobs: Jobs, witness: bool) -> None:
    """The one that is left hears no quorum. It stands down, learns by the hellos that the two are
    new processes, begins a new lineage, and both join it."""
    job = jobs(racks=3, witness=witness)
    gate = job.gate()
    options: dict[str, Any] = {"steps": 48, "config": CONFIG, "pace_ms": 2}
    left, lost = (2, (0, 1)) if witness else (0, (1, 2))
    for rack in lost:
        job.start(rack, **options, at={"12": [["gate", job.gate("never")]]})
    job.start(left, **options, at={"12": [["gate", gate]]})
    first_commits(job, 3)
    job.kill(*lost)
    before = len(job.events(left, kind="commit"))
    for rack in lost:
        job.start(rack, **options)
    voters = (left, WITNESS) if witness else (left,)  # on a busy machine the rack may take over

    def lineages() -> list[dict[str, Any]]:
        return [e for voter in voters for e in job.events(voter, kind="lineage")]

    until(lambda: bool(lineages()), lambda: f"a lineage begins\n{job.stacks()}")
    assert lineages()[0]["without"] == list(lost)
    for rack in lost:
        job.event(rack, "joined")
    Path(gate).touch()
    results = job.finished()
    assert len({result.digest for result in results}) == 1
    named = [(m["rack"], m["seq"]) for c in results[left].commits[before:] for m in c["members"]]
    for rack in lost:
        assert (rack, 1) in named, "its offers count from one again, and are merged"
    assert all(result.status["ledger"]["open"] == 0 for result in results)
    assert not any(result.kinds("left-alone", "differs", "fault") for result in results)
    if witness:
        job.witness_ended()


def test_second_death_before_racks_have_copied_undoes_a_version_by_name(jobs: Jobs) -> None:
    """Racks 0 and 1 die, and of the two that are left each lacks a version that the other holds.
    Half of them could decide, without that version. Now both are needed; and when rack 3, which
    holds one of them alone, dies before rack 2 has copied it, rack 2 decides nothing, goes on from
    the version before once rack 3 is started again, and all that it trained is merged."""
    job = jobs(racks=4)
    stop, late = job.gate("stop"), job.gate("late")
    # Every round has all four, so none follows the one of which a rack lacks the result.
    config = {**CONFIG, "exchange_plan": "mesh", "merge_min_racks": 4}
    options: dict[str, Any] = {"steps": 48, "config": config, "pace_ms": 2}
    lacks, holds = {2: (1, late), 3: (0, job.gate("never"))}, {2: 0, 3: 1}
    for rack in range(4):
        at: dict[str, list[list[Any]]] = {"20": [["gate", stop]]}
        if rack in lacks:
            at["1"] = [["hold_back", *lacks[rack]]]
            at["20"].insert(0, ["holds", holds[rack], 1, job.gate(f"rack{rack}")])
        job.start(rack, **options, at=at)
    known = [Path(job.gate(f"rack{rack}")) for rack in lacks]
    until(lambda: all(path.exists() for path in known), lambda: f"both hold one\n{job.stacks()}")
    for rack, fragment in itertools.product(lacks, range(2)):
        job.event(rack, "commit", fragment=fragment, version=1)
    for rack in (0, 1):
        job.kill(rack)
        job.start(rack, **options)

    def lineages() -> list[tuple[list[int], list[int]]]:
        events = [event for rack in (2, 3) for event in job.events(rack, kind="lineage")]
        return [(event["without"], event["versions"]) for event in events]

    until(lambda: ([0, 1], [1, 1]) in lineages(), lambda: f"a lineage begins\n{job.stacks()}")
    job.kill(3)
    decided = len(job.events(2, kind="commit"))
    job.start(3, **options)
    undone = job.event(2, "undone")
    assert undone["back"] == ["fragment 1 from version 1 to 0"]
    assert undone["dead"] == [0, 1, 3]
    assert ([0, 1, 3], [1, 0]) in lineages()
    for rack in (0, 1, 3):
        job.event(rack, "joined")
    Path(late).touch()
    Path(stop).touch()
    results = job.finished()
    assert len({result.digest for result in results}) == 1
    assert all(result.weights == results[0].weights for result in results)
    assert {commit["fragment"] for commit in results[2].commits[decided:]} == {0, 1}
    assert all(result.status["ledger"]["open"] == 0 for result in results)
    trained = sum(tokens_of(2, step) for step in range(1, 49))
    assert results[2].status["ledger"]["merged"] == trained
    assert not any(result.kinds("left-alone", "differs", "fault") for result in results)


def test_a_witness_that_is_started_again_begins_no_second_job_and_votes(jobs: Jobs) -> None:
    """It was the founder. It gets its seat and its vote back, so rack 1 may die next: rack 0 takes
    its vote, goes on alone, and gives it back to its next life."""
    job = jobs(witness=True)
    gate = job.gate()
    options: dict[str, Any] = {"steps": 48, "config": CONFIG, "pace_ms": 2}
    job.start(0, **options, at={"12": [["gate", gate]]})
    job.start(1, **options, at={"12": [["gate", job.gate("never")]]})
    first_commits(job, 2)
    assert job.witness is not None
    job.witness.kill()
    job.event(0, "takes-over")
    job.start_witness()
    job.event(0, "roster", votes=[0, 1], reason="the witness is back")
    job.event(0, "roster", votes=[0, 1, WITNESS])
    job.kill(1)
    job.event(0, "roster", votes=[0])
    job.start(1, **options)
    job.event(1, "joined")
    until(lambda: votes(job) == [0, 1, WITNESS], f"rack 1 votes again\n{job.logs()}")
    begun = [e for e in job.events(WITNESS) if e["kind"] == "genesis"]
    assert len(begun) == 1, "the first witness's"
    assert not [e for e in job.events(1) if e["kind"] == "genesis"]
    Path(gate).touch()
    one, other = job.finished()
    assert one.digest == other.digest
    job.witness_ended()


def test_rack_0_and_the_witness_die_together_and_are_started_again(jobs: Jobs) -> None:
    """Rack 1 lives. The witness that comes back begins no second job, and its promise to rack 1
    says that its former life is over: nothing was merged any more, and rack 0 could not join."""
    job = jobs(witness=True)
    gate = job.gate()
    options: dict[str, Any] = {"steps": 48, "config": CONFIG, "pace_ms": 2}
    job.start(0, **options, at={"12": [["gate", job.gate("never")]]})
    job.start(1, **options, at={"12": [["gate", gate]]})
    first_commits(job, 2)
    assert job.witness is not None
    job.witness.kill()
    job.kill(0)
    job.start_witness()
    job.start(0, **options)
    assert job.event(1, "lineage")["without"] == [0, WITNESS]
    job.event(0, "joined")
    Path(gate).touch()
    one, other = job.finished()
    assert one.digest == other.digest
    begun = [event for event in job.events(WITNESS) if event["kind"] == "genesis"]
    assert len(begun) == 1, "the first witness's"
    job.witness_ended()


def test_a_rack_0_that_is_started_again_begins_no_second_job(jobs: Jobs) -> None:
    """Rack 1 of three goes on; racks 0, the founder, and 2 are started again."""
    job = jobs(racks=3)
    gate = job.gate()
    options: dict[str, Any] = {"steps": 48, "config": CONFIG, "pace_ms": 2}
    job.start(1, **options, at={"12": [["gate", gate]]})
    for rack in (0, 2):
        job.start(rack, **options, at={"12": [["gate", job.gate("never")]]})
    first_commits(job, 3)
    job.kill(0, 2)
    for rack in (0, 2):
        job.start(rack, **options)
    job.event(1, "lineage")
    for rack in (0, 2):
        job.event(rack, "joined")
    Path(gate).touch()
    job.finish()
    assert len({job.result(rack).digest for rack in range(3)}) == 1
    assert len([e for e in job.events(0) if e["kind"] == "genesis"]) == 1, "of its first life"


@pytest.mark.parametrize("witness", [True, False])
def test_racks_begin_again_when_rack_0_died_before_its_weights_were_copied(
    jobs: Jobs, witness: bool
) -> None:
    """Its next life begins with other weights, and the rest is a quorum. They waited with it for
    the first version, which nobody held, until StartTimeout."""
    job = jobs(racks=3, witness=witness)
    options: dict[str, Any] = {"steps": 24, "config": CONFIG, "pace_ms": 2}
    job.start(0, **options, env={WITHHOLDS: "1"})
    for rack in (1, 2):
        job.start(rack, **options)
    for rack in (1, 2):
        job.event(rack, "copy-failed", fragment=0)
    job.kill(0)
    job.start(0, seed=77, **options)
    for rack in (1, 2):
        assert "rack 0 died with them" in job.event(rack, "job-lost")["detail"]
    results = job.finished()
    merged_everything(results)
    assert all(result.status["step"] == 24 for result in results)
