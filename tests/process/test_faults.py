"""What goes wrong in one rack stays there: the other trains on, is told, and loses nothing."""

from __future__ import annotations

import math
import re
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Job, Result, run_module, until

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "stall_max_s": 0.3,
    "shutdown_timeout_s": 60,
}  # fmt: skip


def losses(result: Result) -> list[float]:
    return [struct.unpack(">f", bytes.fromhex(loss))[0] for loss in result.losses]


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_a_delta_that_is_not_finite_stays_at_its_rack(jobs: Jobs, lockstep: bool) -> None:
    """Step 8 makes NaN of everything just where fragment 1 is captured; then it is repaired."""
    config = {**CONFIG, "lockstep": lockstep, "wait_timeout_s": 60}
    job = jobs()
    gate = job.gate()
    there = job.gate("there")
    at = {"8": [["poison"]], "9": [["repair"]], "12": [["touch", there], ["gate", gate]]}
    job.start(0, steps=32, config=config, at=at)
    behind = job.gate("behind")
    # Free, rack 0 would capture when rack 1 does; so rack 1 comes later.
    job.start(1, steps=32, config=config, at={} if lockstep else {"3": [["gate", behind]]})
    if not lockstep:
        job.event(0, "declined", fragment=1)
        # At its gate rack 0 joins no round; on its way there it could offer again in rack 1's.
        until(Path(there).exists, f"rack 0 is at its gate\n{job.logs()}")
        Path(behind).touch()
    job.event(1, "commit", fragment=1)  # or a fast rack 0 could offer again in the same round
    Path(gate).touch()
    ill, well = job.finished()
    declined = ill.kinds("declined")
    assert [(event["fragment"], event["seq"]) for event in declined] == [(1, 1)]
    assert "of the delta is nan" in declined[0]["reason"]
    assert ill.kinds("discarded"), "the rack may offer the fragment again"
    assert not well.kinds("declined")

    second = [commit for commit in ill.commits if commit["fragment"] == 1]
    assert [member["rack"] for member in second[0]["members"]] == [1]
    again = [m for commit in second for m in commit["members"] if m["rack"] == 0]
    # The work of the declined offer is in the next one, which free racks make when a round opens.
    assert again[0]["seq"] == 2
    assert again[0]["steps"] == 16 if lockstep else 8 < again[0]["steps"] <= 16
    if lockstep:  # free, each may merge alone: at K = 1 that is a matter of time, not a promise
        assert [member["rack"] for member in second[-1]["members"]] == [0, 1]

    assert ill.digest == well.digest
    assert ill.weights == well.weights
    assert all(map(math.isfinite, losses(well)))
    assert all(map(math.isfinite, losses(ill)[9:]))
    assert "of the delta is nan" in ill.status["last_error"]
    assert ill.status["ledger"]["open"] == 0


SPOILT: dict[str, tuple[list[list[Any]], str]] = {
    "nan in the weights": ([["poison"]], " holds nan"),
    "1e30 in the weights": ([["jump", 1e30]], " holds "),
    "1e7 in the weights": ([["jump", 1e7]], "its weights moved by"),
    "nan in the payload": ([["spoil", float("nan")]], "its payload holds NaN, Inf or magnitudes"),
    "1e30 in the payload": ([["spoil", 1e30]], "its payload holds NaN, Inf or magnitudes"),
}
"""What a script does to its rack, and what it is told."""


@pytest.mark.parametrize(
    ("spoilt", "merge", "step"),
    [
        *((name, "mean", 92) for name in SPOILT if not name.startswith("1e30")),
        *(
            pytest.param(name, "mean", 92, marks=pytest.mark.slow)
            for name in SPOILT
            if "1e30" in name
        ),
        pytest.param("nan in the payload", "rda", 92, marks=pytest.mark.slow),
        # Its last: it hears at the end of its session.
        pytest.param("nan in the payload", "mean", 108, marks=pytest.mark.slow),
    ],
)
def test_a_rack_that_diverges_ends_with_that_and_the_others_without_it(
    jobs: Jobs, spoilt: str, merge: str, step: int
) -> None:
    """All three were NaN one round later, and ended with exit status 0."""
    acts, told = SPOILT[spoilt]
    job = jobs(racks=3)
    config = {**CONFIG, "merge": merge}
    gate, there = job.gate(), [job.gate(f"there{rack}") for rack in (0, 1)]
    for rack in (0, 1):  # they must not be through before rack 2 is
        at = {"104": [["touch", there[rack]], ["gate", gate]]}
        job.start(rack, steps=108, config=config, at=at)
    # What is absurd is known once enough was merged, so it waits for them; 92 steps are 11 rounds,
    # and 8 offers are enough, if each round should have but one.
    waits = [["gate", each] for each in there]
    job.start(2, steps=108, config=config, at={str(step): [*waits, *acts]})
    assert job.ended(2) != 0
    Path(gate).touch()
    job.finish(0, 1)
    kind, text = job.told(2)["error"]
    assert kind == "Diverged"
    assert text.startswith("rack 2, fragment ")
    assert told in text
    assert "Start it again" in text
    zero, one = job.result(0), job.result(1)
    assert zero.weights == one.weights
    assert zero.digest == one.digest
    floats = [w for tensor in zero.weights.values() for w in tensor]
    values = struct.unpack(f">{len(floats)}f", struct.pack(f">{len(floats)}i", *floats))
    assert all(abs(value) < 100 for value in values), "NaN would fail this, too"
    assert 2 not in [member["rack"] for member in zero.commits[-1]["members"]]
    if told.startswith("its"):  # the others have found it, so it is in the log
        env = {"COLUMNS": "400"}
        _, said = run_module(job.nursery.python, "mend.tools", "explain", job.events_folder, **env)
        assert re.search(rf"drop: .*rack 2 has diverged: {told}", said), said


def killed_and_left(job: Job, number: signal.Signals, *, middle: bool) -> Result:
    """Rack 1 is ended by a signal; rack 0 trains on to its end. `middle`: with a round in flight.
    How long rack 0 waits in an outage: I5 of the simulator's checkers."""
    config = {**CONFIG, "simulated_merge_delay_ms": 30}
    gate = job.gate()
    # Steps 8 and 9: fragment 1 has just been captured, its offer takes 30 ms to arrive.
    here = "9" if middle else "8"
    at = {here: [["die", number.name], ["gate", job.gate("never")]]}
    job.start(0, steps=80, config=config, pace_ms=2, at={"40": [["gate", gate]]})
    job.start(1, steps=80, config=config, pace_ms=2, at=at)
    assert job.ended(1) == -number
    silent = job.event(0, "rack-silent", peer=1)
    assert silent["effect"]
    Path(gate).touch()
    job.ended(0, code=0)
    return job.result(0)


@pytest.mark.parametrize(
    ("number", "middle"),
    [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, True)],
    ids=["kill", "kill in a round", "term in a round"],
)
def test_the_other_rack_trains_on_and_keeps_its_work(
    jobs: Jobs, number: signal.Signals, middle: bool
) -> None:
    left = killed_and_left(jobs(witness=True), number, middle=middle)
    status = left.status
    assert status["step"] == len(left.losses) == 80
    assert left.before_shutdown["racks_live"] == [0]
    assert status["ledger"]["open"] == 0, "the dead one has lost its vote: what is left is merged"
    assert (status["outcome"], left.error) == ("merged", [])
    after = left.losses[-1]
    assert math.isfinite(struct.unpack(">f", bytes.fromhex(after))[0])
    assert left.threads == []


def test_without_a_witness_the_rack_that_coordinated_trains_on_too(job: Job) -> None:
    """Two voters, of which rack 0 alone is a quorum; what it merges alone is safe with it."""
    left = killed_and_left(job, signal.SIGKILL, middle=False)
    assert (left.status["step"], left.status["outcome"]) == (80, "merged")
