"""A rack that becomes slow is put out of the job, started again by `mend launch`, and comes back as
a twin of another. Or it does not come back, and a person says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mend.consensus.records import EVICTED
from mend.errors import EVICTED_EXIT
from mend.tools.launch import Job as Launched
from tests.process.conftest import Jobs
from tests.process.racks import ROOT, Job, Nursery, run_mend, until
from tests.process.test_failslow import PAST_STEPS
from tests.process.test_giving_up import looked, said
from tests.process.test_launch import launched

# It finds itself slow by compute, which a restart may mend; what its steps take decides nothing.
SLOW_ONCE = """
import os, pathlib, sys, time, torch, mend
from tests.process import injected
torch.set_num_threads(1)
rack, second = os.environ["MEND_RACK"], os.environ["RESTARTED_BY_MEND"] != "0"
again = pathlib.Path(sys.argv[1])
class Place:
    batches = 0
    def state_dict(self):
        return {"batches": self.batches}
    def load_state_dict(self, state):
        self.batches = state["batches"]
model, place = torch.nn.Linear(8, 8), Place()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
config = mend.MendConfig(
    sync_period_steps=16, fragments=2, overlap_steps=4, failslow_action="evict",
    mirror_rack_state=True,
)
with mend.session(model, config, optimizer=optimizer) as runtime:
    begun = runtime.status().step
    runtime.register_state("place", place, scope="rack")
    back, steps = place.batches, 0
    slow_from = 40 if rack == "1" and not second else 10**9
    injected.show_pace(runtime, lambda: 6.0 if steps >= slow_from else 1.0, "compute")
    while not again.exists():
        place.batches += 1
        model(torch.randn(4, 8)).square().mean().backward()
        time.sleep(0.005)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if second and steps == 40:
            again.touch()
    if second:
        print("twin", begun > 40, runtime.status().joined_state)
        print("place", back, flush=True)
status = runtime.status()
merged = status.ledger.merged == status.tokens
print("digest", status.anchor_digest, "merged", merged, flush=True)
"""


@pytest.mark.usefixtures("warm")
def test_a_rack_that_becomes_slow_is_started_again_and_is_a_twin(
    tmp_path: Path, nursery: Nursery
) -> None:
    """Of two, beside a witness. `--max-restarts` is for racks that fail; here it is 0."""
    script, events = tmp_path / "train.py", tmp_path / "events"
    script.write_text(SLOW_ONCE)
    job = Launched(
        command=(str(script), str(tmp_path / "again")), torchrun=False,
        env={"MEND_DIAGNOSTICS_DIR": str(events), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    outcome, lines = launched(job)
    told = "\n".join(lines)
    assert outcome.status == 0, told
    ended = rf"\[launch\] rack 1 ended exit={EVICTED_EXIT} restart=evicted 1/2 still_running=0"
    assert re.search(ended, told), told
    slow = r"rack 1 is slow by the compute of rank 0 \(.*?\): "
    evicted = re.search(rf"\[rack 1\].* evicted step=(\d+) msg=.*{slow}", told)
    assert evicted, told
    assert f"place {evicted[1]}\n" in told, "it trains merged rows again"
    assert "[rack 1] twin True copied from rack " in told, told
    digests = re.findall(r"digest (\w+) merged True", told)
    assert len(digests) == 2, told
    assert len(set(digests)) == 1, told
    assert told.count("restart=") == 1, told
    status, explained = run_mend(nursery, "explain", events)
    assert status == 0, explained
    assert "rack 1 is evicted, to be started again: rack 1 is slow " in explained
    assert "rack 1 left, evicted because it is slow" in explained


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_an_evicted_rack_that_does_not_come_back_is_retired_and_then_another_is_evicted(
    jobs: Jobs,
) -> None:
    """As long as it was awaited nobody else could be, and `mend retire` had nothing against it."""
    job = jobs(racks=3, witness=True)
    config = {"sync_period_steps": 16, "fragments": 2, "overlap_steps": 4}
    options: dict[str, Any] = {"steps": 100_000, "config": {**config, "failslow_action": "evict"}}
    gates = [job.gate(f"slow{rack}") for rack in range(3)]
    for rack in range(3):
        at = {"1": [["find", 6.0, "compute", gates[rack], job.gate("never")]]}
        job.start(rack, pace_ms=5.0, at=at, **options)
    until(lambda: knows_its_past(job), lambda: f"it knows its past {job.stacks()}")
    Path(gates[2]).touch()
    job.ended(2, code=EVICTED_EXIT)
    where = job.witness_address
    evicted = "rack 2 was evicted because it was slow: start it again"
    until(lambda: evicted in looked(job, where)[1], lambda: f"it is told\n{job.stacks()}")
    assert "rack 2 is out; the job goes on with racks 0, 1" in said(job, "2", where)
    job.witness_event("retired", rack=2)
    assert job.witness_event("roster", reason="a person has retired rack 2")["racks"] == [0, 1]
    assert "evicted" not in looked(job, where, COLUMNS="100")[1], "a log of its own"
    Path(gates[1]).touch()
    job.ended(1, code=EVICTED_EXIT)
    assert job.witness_event("slow-rack-evicted", slow_rack=1)["stage"] == EVICTED


def knows_its_past(job: Job) -> bool:
    captured = [job.events(rack, kind="captured") for rack in range(3)]
    return all(each and each[-1]["step"] > PAST_STEPS for each in captured)
