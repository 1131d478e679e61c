"""Real racks that are not in lockstep: one opens a round, the other joins it, whatever its phase.
The grace window is long, so that a busy machine decides nothing. How many rounds have all racks,
also of different speeds: tests/sim/test_together.py."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from mend_lab.commands.replay import read_script
from mend_lab.replay.script import CAPTURED
from tests.process.conftest import Jobs
from tests.process.racks import Job, Result
from tests.process.replayed import anchor_bits, model_bits, replayed

PERIOD, GAP, STEPS = 16, 8, 48
CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": PERIOD, "overlap_steps": 4, "grace_window_ms": 60_000,
    "stall_max_s": 5, "staleness_max_rounds": 8,
}  # fmt: skip
JOINS = 5
"""Rack 1 pauses before this step until it has heard of the first round, which rack 0 opens."""


def out_of_phase(job: Job) -> list[Result]:
    arrived = job.gate("arrived")  # rack 1 comes to its pause before rack 0 to its first capture
    pause = [["touch", arrived], ["gate", job.gate()], ["hear", 0]]
    acts = {str(GAP): [["gate", arrived]], str(GAP + 1): [["touch", job.gate()]]}
    per = {0: {"at": acts}, 1: {"at": {str(JOINS): pause}}}
    return job.run(steps=STEPS, config=CONFIG, per=per)


def trained(result: Result) -> list[dict[int, dict[str, Any]]]:
    """Rounds from before any rack's last step: rack -> its share."""
    rounds = [{m["rack"]: m for m in commit["members"]} for commit in result.commits]
    before = takewhile(lambda r: all(r[k]["capture_step"] < STEPS for k in r), rounds)
    return list(before)


def check_joined(result: Result) -> None:
    """Rack 1 has captured for the first round of rack 0, though its own turn was not yet."""
    rounds = trained(result)
    assert [sorted(racks) for racks in rounds] == [[0, 1]] * len(rounds)
    assert {rack: share["capture_step"] for rack, share in rounds[0].items()} == {0: GAP, 1: JOINS}


def test_racks_out_of_phase_are_in_the_same_rounds(jobs: Jobs) -> None:
    """And the tape tells at which steps they were captured, which is all that another program needs
    to come to the same bits."""
    job = jobs()
    results = out_of_phase(job)
    assert results[0].digest == results[1].digest
    check_joined(results[0])
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
    results = out_of_phase(jobs(ranks=2))
    assert len({result.digest for result in results}) == 1
    for first, second in (results[:2], results[2:]):
        captures = [
            [(e["step"], e["fragment"]) for e in r.kinds("captured")] for r in (first, second)
        ]
        applies = [[(e["step"], e["version"]) for e in r.kinds("applied")] for r in (first, second)]
        assert captures[0] == captures[1]
        assert applies[0] == applies[1]
    check_joined(results[0])
