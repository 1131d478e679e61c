"""Questions of several tests to a simulated job that has run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from mend.coordination.messages import FailSlow
from mend.trace.replay import replay
from mend_lab.sim import World
from mend_lab.sim.process import Process
from tests.noted import pairs

T = TypeVar("T")


def assert_replays(world: World) -> None:
    """The tapes of all processes, in all their lives, replay with equal effects."""
    for process in [*world.processes(), *world.past]:
        assert process.tape is not None
        assert replay(process.tape.parts, process.tape.entries()).difference is None


def noted(world: World, *kinds: str) -> list[tuple[Process, dict[str, object], int]]:
    """(process, fields, time in ns) of the notes of these kinds, in the order of processes."""
    return [
        (process, fields, at_ns)
        for process in [*world.processes(), *world.past]
        for (kind, fields), at_ns in zip(pairs(process.notes), process.noted_ns, strict=True)
        if kind in kinds
    ]


def run_with_verdicts(world: World, of: Callable[[FailSlow], Iterable[T]]) -> dict[int, set[T]]:
    """Run to the end. Rack -> what `of` takes of the verdicts that it has shown at any time."""
    shown: dict[int, set[T]] = {}

    def look(process: Process) -> None:
        if process.trainer is not None:
            for verdict in process.trainer.rank.published.look().orders.slow:
                shown.setdefault(process.me.rack, set()).update(of(verdict))

    for process in world.processes():
        process.on_event = look
    world.run()
    return shown
