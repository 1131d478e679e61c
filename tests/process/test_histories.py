"""The judge of tapes: it sees bugs of real processes."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from mend.consensus.records import Drop
from mend.trace.format import Packer, file_begin, record_of
from mend.trace.reader import read_tape
from mend.types import Peer
from mend_lab.sim.scenario import calm
from mend_lab.sim.world import SEAT_TIMEOUT_NS, STALL_NS
from tests.planting import Edit, planted
from tests.process.conftest import Jobs
from tests.process.histories import TapedAgreement
from tests.process.simulated import config_of

JOB = {
    "racks": 3, "period_steps": 4, "overlap_steps": 2, "steps": 12, "lockstep": True,
    "witness": False,
}  # fmt: skip


class Bug(NamedTuple):
    edit: tuple[str, str, str]
    says: str
    """What the judge says of it."""
    here: bool
    """Whether the judge has the bug too, as it would if nobody had planted it."""


MARK = "state.tokens_mark, state.steps_mark = offer.tokens_total, offer.steps_total"
DECIDE = ("consensus.proposer:Proposer.decide", "log.decide(index)", "log.decide(log.last)")
BUGS = {
    "a step counts twice": Bug(
        ("engine.trainer.trainer_rounds:TrainerRounds._settle", MARK, f"{MARK} - (offer.seq == 1)"),
        r"I2: tape-rack\d-rank0.mend: offer 2 of fragment \d of step \d+ counts 5 steps after",
        here=True,
    ),
    "decided before it is accepted": Bug(
        DECIDE, r"I1: .* decided record \d+ \(\w+\) with the votes \[.*\] of \[0, 1, 2\]", here=True
    ),
    "another machine than the one that is here": Bug(
        DECIDE, r"I7: event \d+ of \w+ of tape-rack\d-rank0.mend has other effects now", here=False
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_bug_of_a_real_process_fails_the_teardown_of_its_test(name: str, jobs: Jobs) -> None:
    job, bug, scenario = jobs(racks=3), BUGS[name], calm(**JOB)
    config = config_of(scenario, STALL_NS, SEAT_TIMEOUT_NS)
    options = {"scenario": JOB, "config": config, "bugs": [bug.edit]}
    for rack in range(3):
        job.start(rack, script="tests.process.simulated", **options)
    for rack in range(3):
        job.ended(rack)
    job.close()
    with (
        planted([Edit(*bug.edit)]) if bug.here else contextlib.nullcontext(),
        pytest.raises(AssertionError, match=bug.says),
    ):
        job.judge()
    job.unjudged = "it has a bug"


@pytest.mark.parametrize(
    ("decided", "says"),
    [(1, []), (2, [r"I1: Peer\(rack=0, rank=1\) acted on Drop.*, and Drop.* was"])],
)
def test_record_of_a_killed_coordinator_is_compared_when_another_process_decides_it(
    decided: int, says: list[str]
) -> None:
    problems: list[str] = []
    agreement = TapedAgreement(problems.append, lambda versions: None)
    killed, other = (SimpleNamespace(me=Peer(0, rank), dead=False) for rank in range(2))
    for process in (killed, other):
        agreement.enter(process, [])
    records = [Drop(fragment=0, dropped=(), reason=str(number)) for number in range(3)]
    agreement.records.append(records[0])
    agreement.check_record(other, records[0])
    killed.dead = True
    agreement.check_record(other, records[1])
    assert problems == []
    agreement.records.append(records[decided])
    agreement.check(killed)
    assert len(problems) == len(says)
    assert all(map(re.match, says, problems))


@pytest.mark.parametrize("killed", [0, 1])
def test_tape_of_a_process_killed_before_its_first_entry_belongs_to_the_job(
    killed: int, jobs: Jobs
) -> None:
    job = jobs()
    job.run(steps=12, config={"lockstep": True})
    job.close()
    path = job.events_folder / f"tape-rack{killed}-rank0.mend"
    header = record_of(read_tape(path).header)
    path.write_bytes(file_begin() + Packer().chunk([header]))
    job.judge()
