"""One job in lockstep, simulated and of real processes: both decide the same records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from mend.consensus.records import Commit, Record
from mend.trace.reader import read_tape
from mend_lab.replay.script import recite
from mend_lab.sim import World
from mend_lab.sim.scenario import calm
from mend_lab.sim.world import SEAT_TIMEOUT_NS, STALL_NS
from tests.process.conftest import Jobs
from tests.process.simulated import config_of

EXCEPTED = {
    "incarnation": "drawn at the start of a rack",
    "address": "of the network",
    "lanes": "of the network",
    "plan": "hash of facts, such as versions of libraries, that a simulated rack does not have",
}
"""Fields of records that differ, wherever they are, and why. All others are equal."""

SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {"period_steps": 4, "overlap_steps": 2, "fragments": 3, "numel": 5, "steps": 18},
    "momentum, bfloat16, three racks": {
        "racks": 3, "period_steps": 6, "overlap_steps": 1, "numel": 17, "steps": 21,
        "momentum": 0.5, "ramp": 3, "overlap_ramp": 3, "payload": "bfloat16",
    },
}  # fmt: skip


def plain(value: object) -> object:
    """A record as plain values, without the excepted fields."""
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        return [plain(each) for each in value]
    else:
        return value
    kept = {name: plain(each) for name, each in fields if name not in EXCEPTED}
    return {"kind": type(value).__name__, **kept}


def in_order(records: Iterable[Record | None]) -> list[object]:
    """All but commits as they are in the log; then these by fragment: those of fragments that are
    ready at once may be decided either way."""
    known = [record for record in records if record is not None]
    commits = [record for record in known if isinstance(record, Commit)]
    others = [record for record in known if not isinstance(record, Commit)]
    ordered = sorted(commits, key=lambda commit: (commit.fragment, commit.version))
    return [plain(record) for record in (*others, *ordered)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_simulated_and_real_job_in_lockstep_decide_equal_records(name: str, jobs: Jobs) -> None:
    fields = {"lockstep": True, "witness": False, **SCENARIOS[name]}
    scenario = calm(**fields)
    world = World(scenario)
    report = world.run()
    assert report.problems == []

    job = jobs(racks=scenario.racks)
    config = config_of(scenario, STALL_NS, SEAT_TIMEOUT_NS)
    job.run(script="tests.process.simulated", scenario=fields, config=config)
    tape = read_tape(job.events_folder / "tape-rack0-rank0.mend")
    recorded = recite(tape.header, tape.whole, tape.entries()).records
    real = in_order(recorded[place] for place in sorted(recorded))

    simulated = in_order(world.checkers.agreement.records)
    assert len(simulated) > 3 * scenario.fragments
    for ours, theirs in zip(simulated, real, strict=True):
        assert ours == theirs
