"""Real racks that are not in lockstep: one opens a round, the others join it, whatever their phase
or speed. The grace window is long, so that a busy machine decides nothing: what is asked is when
racks capture. How many rounds have all racks with settings as they are by default:
tests/sim/test_together.py."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from mend_lab.commands.replay import read_script
from mend_lab.replay.script import CAPTURED
from tests.process.conftest import Jobs
from tests.process.racks import Job, Result
from tests.process.replayed import anchor_bits, model_bits, replayed

PERIOD, GAP, STEPS = 16, 8, 160
CONFIG: dict[str, Any] = {
    "fragments": 2,
    "sync_period_steps": PERIOD,
    "overlap_steps": 4,
    "grace_window_ms": 5_000,
    "stall_max_s": 5,
    "max_age": 8,
}
PACE_MS = 8.0
ROUNDS_MIN = 6
"""Fewer say nothing."""


def out_of_phase(job: Job, steps: int) -> list[Result]:
    """Rack 1 pauses before its fifth step, until rack 0 is half a gap further."""
    gate = job.gate()
    pause = {0: {str(5 + GAP // 2): [["touch", gate]]}, 1: {"5": [["gate", gate]]}}
    per = {rack: {"at": at} for rack, at in pause.items()}
    return job.run(steps=steps, pace_ms=PACE_MS, config=CONFIG, per=per)


def trained(result: Result, last: dict[int, int]) -> list[dict[int, dict[str, Any]]]:
    """Rounds from before any rack's last step, which is `last`: rack -> its share."""
    rounds = [{m["rack"]: m for m in commit["members"]} for commit in result.commits]
    ended = (r[k]["capture_step"] >= last[k] for r in rounds for k in r)
    assert any(ended), "the tails are on the log"
    before = takewhile(lambda r: all(r[k]["capture_step"] < last[k] for k in r), rounds)
    return list(before)


def due(rounds: list[dict[int, dict[str, Any]]]) -> int:
    """So many rounds are due by the steps that the first rack had made at the newest of these. On a
    busy machine, whose steps take longer than the pace, the racks end one long before another."""
    return max(share["capture_step"] for share in rounds[-1].values()) // GAP


def test_racks_out_of_phase_are_in_the_same_rounds(jobs: Jobs) -> None:
    """And the tape tells at which steps they were captured, which is all that another program needs
    to come to the same bits."""
    job = jobs()
    results = out_of_phase(job, STEPS)
    assert results[0].digest == results[1].digest
    rounds = trained(results[0], {0: STEPS, 1: STEPS})
    assert [sorted(racks) for racks in rounds] == [[0, 1]] * len(rounds)
    assert due(rounds) // 2 < len(rounds) < 1.5 * due(rounds)
    assert len(rounds) >= ROUNDS_MIN
    joined = [r for r in rounds if any(r[rack]["capture_step"] % GAP for rack in r)]
    assert len(joined) > len(rounds) // 2, "they are captured on a grid"
    outcome = replayed(results, "plain", CONFIG)
    assert model_bits(results[0], "plain", CONFIG) == anchor_bits(outcome)
    acts = [part.acts[0] for part in read_script([job.events_folder]).parts]
    on_tape = {(r, a.fragment, a.step) for r in (0, 1) for a in acts[r] if a.kind == CAPTURED}
    named = [
        (m["rack"], c["fragment"], m["capture_step"])
        for c in results[0].commits
        for m in c["members"]
    ]
    assert on_tape == set(named)


def test_the_ranks_of_a_rack_join_together(jobs: Jobs) -> None:
    steps = 6 * GAP
    results = out_of_phase(jobs(ranks=2), steps)
    assert len({result.digest for result in results}) == 1
    for first, second in (results[:2], results[2:]):
        captures = [
            [(e["step"], e["fragment"]) for e in r.kinds("captured")] for r in (first, second)
        ]
        applies = [[(e["step"], e["version"]) for e in r.kinds("applied")] for r in (first, second)]
        assert captures[0] == captures[1]
        assert applies[0] == applies[1]
    rounds = trained(results[0], {0: steps, 1: steps})
    assert [sorted(racks) for racks in rounds] == [[0, 1]] * len(rounds)
    assert any(r[rack]["capture_step"] % GAP for r in rounds for rack in r)


def test_racks_of_four_speeds_are_in_the_same_rounds(jobs: Jobs) -> None:
    speeds = (1.0, 1.0, 0.7, 0.5)
    per = {
        rack: {"pace_ms": PACE_MS / speed, "steps": round(STEPS * speed)}
        for rack, speed in enumerate(speeds)
    }
    results = jobs(4).run(config=CONFIG, per=per)
    assert len({result.digest for result in results}) == 1
    whole = trained(results[0], {rack: own["steps"] for rack, own in per.items()})
    assert len(whole) >= max(due(whole) // 2, ROUNDS_MIN)
    assert [sorted(racks) for racks in whole] == [[0, 1, 2, 3]] * len(whole)
    joined = [r for r in whole if any(r[rack]["capture_step"] % GAP for rack in r)]
    assert len(joined) > len(whole) // 2, "they wait for each other on a grid"
