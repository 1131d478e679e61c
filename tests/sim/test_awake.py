"""A process that gets no processor calls nobody silent when it gets one again."""

from __future__ import annotations

import pytest

from mend.types import SECOND
from mend.types import WITNESS as SEAT
from mend_lab.sim import WITNESS, World
from mend_lab.sim.world import DETECT_NS
from tests.sim.bugs import NAMED, planted
from tests.sim.runs import assert_replays, noted

BEGIN_NS, LENGTH_NS = SECOND, 4 * DETECT_NS
SILENCE = ("stands", "no-quorum", "coordinator-silent")
JOB = {"fragments": 1, "steps": 160, "shutdown_ns": 60 * SECOND}


def frozen(racks: int, witness: bool, sleeper: int) -> World:
    world = World(seed=5, racks=racks, witness=witness, record=True, **JOB)
    return world.freeze(sleeper, at=BEGIN_NS / SECOND, until=(BEGIN_NS + LENGTH_NS) / SECOND)


def calls(world: World, sleeper: int) -> list[str]:
    """What the sleeper says of the silence of others soon after it wakes. A coordinator that was
    deposed meanwhile stands again at once, whom it hears or not."""
    woke_ns = BEGIN_NS + LENGTH_NS
    deposed = any(process.me.rack == sleeper for process, _, _ in noted(world, "deposed"))
    return [
        kind
        for kind in SILENCE
        if kind != "stands" or not deposed
        for process, _, at_ns in noted(world, kind)
        if process.me.rack == (SEAT if sleeper == WITNESS else sleeper)
        and woke_ns <= at_ns < woke_ns + DETECT_NS // 2
    ]


CASES = [(2, True, 0), (3, False, 2), (3, True, WITNESS)]
MORE = [(2, True, 1), (3, False, 0)]


@pytest.mark.parametrize(
    ("racks", "witness", "sleeper"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_process_that_gets_no_processor_calls_nobody_silent(
    racks: int, witness: bool, sleeper: int
) -> None:
    world = frozen(racks, witness, sleeper)
    assert world.run().problems == []
    assert calls(world, sleeper) == []
    assert_replays(world)


def test_sleep_that_counts_as_silence_is_found() -> None:
    def found(racks: int, witness: bool, sleeper: int) -> list[str]:
        with planted(NAMED["44"]):
            world = frozen(racks, witness, sleeper)
            world.run()
        return calls(world, sleeper)

    assert any(found(*case) for case in CASES + MORE)


def test_death_is_noticed_beside_a_process_that_slept() -> None:
    """Rack 0 sleeps while rack 2 dies. Awake, it hears nothing of it, and goes on without it."""
    world = frozen(3, True, 0).crash(2, at=(BEGIN_NS + LENGTH_NS // 2) / SECOND)
    assert world.run().problems == []
    silent = [fields["effect"] for _, fields, _ in noted(world, "rack-silent") if fields]
    decided = [at for _, _, at in noted(world, "decided") if at > BEGIN_NS + LENGTH_NS]
    assert decided, silent
