"""What a process has to show: read off its machines, and nothing in them changes by it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from msgspec.structs import replace

from mend.coordination.acceptor_host import Follower, WitnessFollower
from mend.coordination.messages import Reason
from mend.engine.snapshot import Training, note_of, view_of_rank, view_of_witness
from mend.engine.state.published_state import PublishedState
from mend.engine.state.training_progress import TrainingProgress
from mend.errors import GaveUp
from mend.status.messages import (
    JobStatus,
    RackSeen,
    RefusedRack,
    RoundSeen,
    decode_view,
    encode_view,
)
from mend.status.server import CounterSample, Recent
from mend.status.wall_clock import wall_ns
from mend.types import SECOND, WITNESS, life_of
from tests.unit.coordination.job import Job
from tests.unit.coordination.nouns import DETECT_NS, commit, genesis, member, offer, roster
from tests.unit.coordination.test_leader import Rack


def of_witness(job: Job, *, ended: bool = False) -> JobStatus:
    machine = job.machine
    follower = WitnessFollower(Follower(machine.member, job.acceptor, machine.me, DETECT_NS))
    before = pickle.dumps(machine)
    found = view_of_witness("job", machine, follower, job.now_ns, ended=ended)
    assert pickle.dumps(machine) == before, "looking changes nothing"
    return decode_view(encode_view(found))


class Shown:
    """The leader of rack 1, with a training that the test makes up."""

    def __init__(self, rack: Rack) -> None:
        self.rack = rack
        self.pace = TrainingProgress(lambda event: None, lambda: (0, 0))
        self.traffic = (0, 0)
        self.recent = Recent(self._note)
        self.published = PublishedState(1)
        self.missed = 0

    def _note(self) -> CounterSample:
        return note_of(self.pace, lambda: self.traffic, self.rack.now_ns)

    def stepped(self, step: int, tokens: int, age_s: float, stall_ns: int = 0) -> None:
        self.pace.latest = (step, tokens, wall_ns() - int(age_s * SECOND), stall_ns)

    def view(self, *, ended: bool = False) -> JobStatus:
        leader = self.rack.machine
        training = Training(
            self.published,
            self.pace,
            self.recent,
            self.rack.ranks,
            lambda: self.missed,
            lambda: 4096,
        )
        before = pickle.dumps(leader)
        found = view_of_rank("job", leader, None, training, self.rack.now_ns, ended=ended)
        assert pickle.dumps(leader) == before, "looking changes nothing"
        return decode_view(encode_view(found))

    def training_seen(self) -> Any:
        found = self.view().training
        assert found is not None
        return found


# ------------------------------------------------------------------ the witness


def test_a_view_has_the_time_of_day_of_its_process() -> None:
    before_ns = wall_ns()
    assert before_ns <= of_witness(Job(3, witness=True)).wall_ns <= wall_ns()


def test_a_witness_tells_whom_the_start_waits_for() -> None:
    job = Job(3, witness=True)
    job.tick()
    found = of_witness(job)
    assert (found.state, found.configured, found.racks) == ("starting", 3, ())
    assert found.missing == (0, 1, 2)
    assert found.training is None
    job.hello(1)
    found = of_witness(job)
    assert [rack.rack for rack in found.racks] == [1]
    assert found.racks[0].address == "tcp://rack1:1"
    assert found.missing == (0, 2)
    assert (found.period_steps, found.overlap_steps, found.merge_min_racks) == (8, 2, 1)


def test_a_coordinator_knows_every_rack_and_what_a_round_waits_for() -> None:
    job = Job(2, witness=True, fragments=2).begun()
    job.say(0, step=40, step_ns=SECOND // 10)
    job.say(1, step=24, step_ns=SECOND // 4)
    job.offered(offer(0, fragment=1))
    job.now_ns += 3 * SECOND // 10
    found = of_witness(job)
    assert found.state == "running"
    assert (found.coordinator, found.coordinates, found.ballot) == (WITNESS, True, 1)
    assert [(r.rack, r.live, r.step, r.step_ns, r.behind) for r in found.racks] == [
        (0, True, 40, SECOND // 10, 0),
        (1, True, 24, SECOND // 4, 0),
    ]
    assert {rack.silent_ms for rack in found.racks} == {300}
    assert found.rounds == (RoundSeen(1, 1, "open", (0,), 300, "waiting for rack 1"),)
    assert found.in_flight == 1


def test_a_round_that_merges_shows_its_members() -> None:
    job = Job(2, witness=True).begun()
    job.offered(offer(0), offer(1))
    found = of_witness(job)
    assert [(r.phase, r.racks, r.version) for r in found.rounds] == [("merging", (0, 1), 1)]
    job.held()
    job.follow()
    job.say(0, versions=(1,))
    found = of_witness(job)
    assert (found.commits, found.versions, found.in_flight) == (1, (1,), 0)
    assert [rack.behind for rack in found.racks] == [0, 1]


def test_a_late_offer_alone_is_no_round_that_waits() -> None:
    job = Job(2, witness=True).begun()
    job.committed(offer(0), offer(1))
    job.offered(offer(1, 2, base=0, applied=0))
    assert [(r.phase, r.for_ms) for r in of_witness(job).rounds] == [("offered", -1)]


def test_a_rack_that_is_not_heard_is_not_live() -> None:
    job = Job(2, witness=True).begun()
    job.tick(DETECT_NS // 2)
    job.say(0)
    job.tick(DETECT_NS // 2 + 1)
    found = of_witness(job)
    assert [rack.live for rack in found.racks] == [True, False]
    assert found.racks[1].silent_ms >= DETECT_NS // 1_000_000


def test_last_view_of_a_witness_is_over_only_behind_an_empty_roster() -> None:
    job = Job(2, witness=True).begun()
    assert not of_witness(job, ended=True).over
    job.acceptor.log.append(roster(1, []))
    job.acceptor.log.decide(2)
    job.machine.proposer.log.append(roster(1, []))
    job.machine.proposer.log.decide(2)
    found = of_witness(job, ended=True)
    assert found.over
    assert found.state == "ended"


# ------------------------------------------------------------------ a rack


def test_a_rack_that_nobody_answers_says_so() -> None:
    found = Shown(Rack()).view()
    assert found.state == "starting"
    assert found.detail == "no answer from the coordinator yet"
    assert [rack.rack for rack in found.racks] == [1]
    assert found.configured == 2


def test_a_rack_that_waits_for_a_refused_one_says_why() -> None:
    """`mend launch` asks for it: without a witness nobody else knows."""
    rack, why = Rack(), Reason("steps is 9 there and 8 here", refused=0)
    rack.told(missing=(0,), why=(why,))
    found, said = Shown(rack).view(), "rack 0 was refused: steps is 9 there and 8 here"
    assert (found.state, found.why) == ("starting", (said,))
    assert found.refused == (RefusedRack(0, said),)


def test_a_rack_knows_itself_and_what_it_was_told_of_the_others() -> None:
    rack = Rack(ranks=2, fragments=2).begun()
    for rank, step_ns in enumerate((SECOND // 10, SECOND // 8)):
        rack.say(rank, step=20, step_ns=step_ns, versions=(0, 0))
    first = offer(0, fragment=1, ranks=2)
    rack.told(
        commit(1, [offer(0), offer(1)], ranks=2),
        offers=(replace(first, capture_step=24),),
        live=(0, 1),
        why=(Reason("waiting for rack 1", fragment=1),),
    )
    found = Shown(rack).view()
    assert (found.rack, found.coordinator, found.coordinates) == (1, WITNESS, False)
    assert (found.commits, found.versions, found.decided) == (1, (1, 0), 2)
    lives = [life_of(member(each)) for each in range(2)]
    assert found.racks == (
        RackSeen(0, "tcp://rack0:1", True, False, False, 24, 0, -1, -1, lives[0]),
        RackSeen(1, "tcp://rack1:1", True, False, False, 20, SECOND // 8, 1, 0, lives[1]),
    )
    assert found.rounds == (RoundSeen(1, 1, "open", (0,), -1, "waiting for rack 1"),)
    assert found.why == ()
    training = Shown(rack).training_seen()
    assert [(r.rank, r.step, r.step_ns) for r in training.shown] == [
        (0, 20, SECOND // 10),
        (1, 20, SECOND // 8),
    ]


def test_a_silent_coordinator_is_a_reason_of_no_round() -> None:
    rack = Rack().begun()
    rack.tick(DETECT_NS + 1)
    assert Shown(rack).view().why == ("the coordinator (the witness at tcp://witness:1) is silent",)


def test_a_rack_that_leaves_and_one_that_failed() -> None:
    rack = Rack().begun()
    rack.say(0, leaving=True)
    shown = Shown(rack)
    assert shown.view().state == "leaving"
    shown.published.fail(GaveUp("no\nquorum"))
    found = shown.view(ended=True)
    assert (found.state, found.detail) == ("ended", "no quorum")


# ------------------------------------------------------------------ its own training


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock stands still: a busy machine takes any time between two lines."""
    now_ns = wall_ns()
    for module in (__name__, "mend.engine.snapshot"):
        monkeypatch.setattr(f"{module}.wall_ns", lambda: now_ns)


@pytest.mark.usefixtures("still")
def test_speed_is_of_the_last_seconds() -> None:
    shown = Shown(Rack().begun())
    shown.stepped(1, 64, age_s=5.0)
    shown.recent.note()
    shown.rack.now_ns += 5 * SECOND
    shown.traffic, shown.missed = (5000, 9000), 3
    shown.stepped(51, 51 * 64, age_s=0.0, stall_ns=SECOND // 2)
    training = shown.training_seen()
    assert (training.step, training.tokens, training.missed, training.host_bytes) == (
        51,
        51 * 64,
        3,
        4096,
    )
    assert (training.recent_steps, training.recent_tokens) == (50, 50 * 64)
    assert training.recent_step_ns == 5 * SECOND
    assert (training.recent_ns, training.recent_stall_us) == (5 * SECOND, 500_000)
    assert (training.recent_sent, training.recent_received) == (5000, 9000)


@pytest.mark.usefixtures("still")
def test_a_rack_that_stands_still_does_not_keep_its_speed() -> None:
    shown = Shown(Rack().begun())
    shown.stepped(1, 1, age_s=60.0)
    shown.recent.note()
    shown.stepped(11, 11, age_s=50.0)  # ten steps in ten seconds, then nothing for fifty
    training = shown.training_seen()
    assert training.recent_step_ns == 60 * SECOND
    assert training.step_age_ms == 50_000


@pytest.mark.usefixtures("still")
def test_a_step_that_only_takes_its_time_is_no_standstill() -> None:
    shown = Shown(Rack().begun())
    shown.stepped(1, 1, age_s=4.5)
    shown.recent.note()
    shown.stepped(4, 4, age_s=1.5)
    assert shown.training_seen().recent_step_ns == 3 * SECOND


def test_recorded_values_are_shown_cleaned_and_limited() -> None:
    shown = Shown(Rack().begun())
    shown.pace.record({"loss": 2.5, "bad\x1bname": float("inf"), **{f"x{n}": n for n in range(20)}})
    recorded = shown.training_seen().recorded
    assert recorded[:2] == (("loss", 2.5), ("bad name", float("inf")))
    assert len(recorded) == 8


def test_before_the_first_step_there_is_no_speed() -> None:
    training = Shown(Rack().begun()).training_seen()
    assert (training.step, training.recent_steps, training.step_age_ms) == (0, 0, 0)


def test_the_first_record_alone_is_a_job_that_runs() -> None:
    rack = Rack()
    rack.say(0)
    rack.told(genesis(), decided=0)
    assert Shown(rack).view().state == "starting"
    rack.told()
    assert Shown(rack).view().state == "running"
