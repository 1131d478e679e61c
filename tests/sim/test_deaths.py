"""One process dies, whichever: the others merge again promptly, wherever they may decide at all."""

from __future__ import annotations

import pytest
import torch

from mend.sim import WITNESS, World
from mend.sim.process import Process
from mend.sim.world import DETECT_NS
from mend.terms import SECOND

DIES_NS = SECOND // 2
WITHIN_NS = SECOND
JOB = {"fragments": 1, "steps": 110, "shutdown_ns": 60 * SECOND}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def all_processes(world: World) -> list[Process]:
    return [*world.processes(), *world.past]


def decided_ns(world: World) -> list[int]:
    """When each commit was decided, by whoever coordinated."""
    found = []
    for process in all_processes(world):
        times = zip(process.notes, process.noted_ns, strict=True)
        found += [at for (kind, _), at in times if kind == "decided"]
    return sorted(found)


TABLE = [
    (racks, witness, dies)
    for racks in (2, 3, 4, 5)
    for witness in (False, True)
    for dies in (*range(racks), *([WITNESS] if witness else []))
]


@pytest.mark.parametrize(("racks", "witness", "dies"), TABLE)
def test_the_next_commit_comes_within_a_second_behind_detection(
    racks: int, witness: bool, dies: int
) -> None:
    """Two racks and a witness merged nothing for ten minutes after the death of either rack, three
    and a witness after that of rack 0: no result of the others met every quorum."""
    world = World(seed=3, racks=racks, witness=witness, **JOB).crash(dies, at=DIES_NS / SECOND)
    report = world.run()
    noticed_ns = DIES_NS + DETECT_NS
    after = [at for at in decided_ns(world) if at > noticed_ns]
    if (racks, witness, dies) == (2, False, 0):
        assert after == [], "rack 1 alone may decide nothing"
        return
    assert report.problems == []
    assert after[0] - noticed_ns < WITHIN_NS
    assert len(after) > 5, "and so do all others"
