"""The tapes of simulated jobs, as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mend.trace.format import Entry, Gap, Header
from mend_lab.sim import World
from mend_lab.sim.process import MemoryTape
from mend_lab.sim.scenario import Scenario


@dataclass(frozen=True)
class Tape:
    header: Header
    records: MemoryTape

    def entries(self) -> Iterator[Entry | Gap]:
        return self.records.entries()


def tapes(scenario: Scenario, wall_ns: int = 0) -> list[Tape]:
    """Of all processes of a job that was begun then."""
    world = World(scenario, record=True)
    world.run()
    config = {
        "fragments": scenario.fragments,
        "sync_period_steps": scenario.period_steps,
        "overlap_steps": scenario.overlap_steps,
    }
    return [
        Tape(
            Header(
                job="sim", rack=p.me.rack, rank=p.me.rank, parts=p.tape.parts, config=config,
                payload_bytes=(1_000_000,) * scenario.fragments, wall_ns=wall_ns,
                mono_ns=p.clock_ns,
            ),
            p.tape,
        )
        for p in world.processes() if p.tape is not None
    ]  # fmt: skip
