"""A real rack that is slow is named, on every rack and by every tool; the others are not. How slow
a rack finds itself is injected (tests/process/injected.py), but for one smoke test in real time:
a busy machine makes racks truly slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Job, Nursery, run_mend, until

CONFIG: dict[str, Any] = {"fragments": 2, "sync_period_steps": 16, "overlap_steps": 4}
FOREVER = 1_000_000
SLOW_RACK = 0


class Slowed:
    """A job of which one rack is slow from a moment on until another one, as the test says."""

    def __init__(
        self, job: Job, slow_rack: int, times: float, cause: str = "compute", **options: Any
    ) -> None:
        self.job, self.slow_rack = job, slow_rack
        self.slow, self.well, self.halt = (job.gate(each) for each in ("slow", "well", "halt"))
        self.stop = job.gate("stop")
        for rack in range(job.racks):
            ill = (times, cause, self.slow) if rack == slow_rack else (1.0, "", self.slow)
            own = {"at": {"1": [["find", *ill, self.well]]}, "stop": self.stop}
            own |= {"halt": self.halt} if rack == slow_rack else {}
            job.start(rack, steps=FOREVER, **own, **options)
        for rack in range(job.racks):  # each knows its past
            until(
                lambda rack=rack: self.step(rack) > PAST_STEPS,
                lambda rack=rack: f"rack {rack} trains\n{job.stacks()}",
            )

    def step(self, rack: int) -> int:
        """At which the rack was, when it captured last."""
        return max((event["step"] for event in self.job.events(rack, kind="captured")), default=0)

    def end(self) -> None:
        Path(self.stop).touch()
        self.job.finish()


PAST_STEPS = 40
"""Every step is a sample; the past is known after 16 of them."""


def test_rounds_stop_waiting_for_a_slow_rack_until_it_is_well_again(jobs: Jobs) -> None:
    """Where mend acts, and a round would wait for it for half a minute. Rack 2 stands still for as
    long as rounds wait for it."""
    job = jobs(racks=3)
    config = {**CONFIG, "grace_window_ms": 30_000, "failslow_action": "act", "stall_max_s": 0.1}
    slowed = Slowed(job, 2, 24.0, config=config, pace_ms=2.0)
    Path(slowed.slow).touch()
    job.event(2, "fail-slow", slow_rack=2, against="own past")
    Path(slowed.halt).touch()
    left = job.event(0, "slow-rack-left", slow_rack=2, stage=3)
    assert "rack 2 is slow" in left["reason"]
    assert "rounds have lost" in left["reason"]
    job.event(0, "commit", reason="slow-left, without rack 2")
    Path(slowed.halt).unlink()
    Path(slowed.well).touch()
    job.event(0, "slow-rack-awaited", slow_rack=2)
    slowed.end()
    results = [job.result(rack) for rack in range(3)]
    moves = results[0].kinds("slow-rack-left", "slow-rack-awaited")
    assert [move["slow_rack"] for move in moves] == [2, 2]
    assert all(commit["closed_by"] != "grace-over" for commit in results[0].commits)
    assert len({result.digest for result in results}) == 1


@pytest.mark.slow
def test_slow_rack_takes_fewer_micro_batches_and_all_again_when_it_is_well(jobs: Jobs) -> None:
    """In lockstep, where the others wait for every step of it; all its ranks take as many."""
    job = jobs(ranks=2)
    config = {**CONFIG, "lockstep": True, "failslow_action": "act", "wait_timeout_s": 60}
    slowed = Slowed(job, 1, 8.0, "input", config=config, micro_batches=8)
    Path(slowed.slow).touch()
    job.event(1, "fail-slow-cause", slow_rack=1, cause="input")
    Path(slowed.halt).touch()
    fewer = job.event(0, "slow-rack-batch", slow_rack=1, stage=2, batch_pct=12)
    assert "rack 1 is slow" in fewer["reason"]
    Path(slowed.halt).unlink()
    job.event(1, "local-batch", batch_pct=12)
    Path(slowed.well).touch()
    job.event(1, "local-batch", batch_pct=100)
    slowed.end()
    taken = [job.told(1, rank)["taken"] for rank in range(2)]
    assert taken[0] == taken[1], "both ranks take them from the same step on"
    first, last = job.result(1).kinds("local-batch")
    steps = len(taken[0])
    fewest = last["step"] - first["step"]
    assert taken[0] == [8] * first["step"] + [1] * fewest + [8] * (steps - last["step"])
    assert first["reason"] == fewer["reason"]
    assert set(job.told(0, 0)["taken"]) == {8}
    results = [job.result(rack, rank) for rack in range(2) for rank in range(2)]
    assert len({result.digest for result in results}) == 1
    for result in results:
        assert result.status["ledger"]["merged"] == result.status["tokens"]


def test_a_rack_that_becomes_slow_is_named_and_no_other(jobs: Jobs, nursery: Nursery) -> None:
    slowed = Slowed(jobs(racks=3), SLOW_RACK, 3.0, "input", config=CONFIG, pace_ms=2.0)
    job = slowed.job
    Path(slowed.slow).touch()
    found = job.event(SLOW_RACK, "fail-slow", slow_rack=SLOW_RACK, against="own past")
    job.event(SLOW_RACK, "fail-slow", slow_rack=SLOW_RACK, against="peers")
    job.event(SLOW_RACK, "fail-slow-cause", slow_rack=SLOW_RACK, cause="input")
    known = len(job.events(SLOW_RACK, kind="commit"))
    until(  # the coordinator's orders bring causes with the commits
        lambda: len(job.events(SLOW_RACK, kind="commit")) > known + 4,
        lambda: f"rack {SLOW_RACK} merges\n{job.stacks()}",
    )
    slowed.end()
    assert found["slow_rank"] == 0
    assert found["since_step"] <= found["step"] <= found["since_step"] + 8
    assert found["ratio"] == 3.0
    assert found["probability"] > 0.99
    results = [job.result(rack) for rack in range(3)]
    verdicts = [event for result in results for event in result.kinds("fail-slow")]
    assert sorted(event["against"] for event in verdicts) == ["own past", "peers"]
    assert {event["slow_rack"] for event in verdicts} == {SLOW_RACK}
    assert any(
        (slow["rack"], slow["ratio"], slow["cause"]) == (SLOW_RACK, 3.0, "input")
        for slow in results[SLOW_RACK].before_shutdown["slow"]
    )
    status, said = run_mend(nursery, "explain", job.events_folder)
    assert status == 0, said
    assert f"rack {SLOW_RACK} rank 0 is slow: " in said
    assert f"the time per token of its own past, since its step {found['since_step']}" in said
    page = job.folder / "report.html"
    status, said = run_mend(nursery, "report", job.events_folder, "--out", page)
    assert status == 0, said
    assert "Slow racks" in page.read_text()


def test_smoke_in_real_time_a_rack_whose_loader_sleeps_is_named_with_the_cause(jobs: Jobs) -> None:
    """Again and again for 60 steps, until one of its verdicts says so: on a busy machine another
    cause may be found first, and a rack that is truly slow besides."""
    job = jobs()
    sleeps = job.gate("sleeps")
    for rack in range(2):
        at = {"1": [["load_slowly", 300.0, sleeps]]} if rack else {}
        job.start(rack, steps=FOREVER, config=CONFIG, pace_ms=10.0, at=at)
    until(
        lambda: len(job.events(1, kind="commit")) > 40,
        lambda: f"it knows its past\n{job.stacks()}",
    )
    Path(sleeps).touch()
    job.event(1, "fail-slow", slow_rack=1, against="own past")
    job.event(1, "fail-slow-cause", slow_rack=1, cause="input")
