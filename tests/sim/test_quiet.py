"""What a rank leaves out, because nothing has touched it, would have done nothing; and what is left
is counted."""

from __future__ import annotations

import copy
import cProfile
import re
from collections import Counter
from typing import Any

import pytest

from mend.coordination import events as ev
from mend.coordination.leader import Leader
from mend.coordination.messages import RankOrders, Total
from mend.coordination.rank import RankMachine
from mend.engine.loop.effects import EventQueue
from mend.trace.state import encode_state
from mend.types import SECOND
from mend_lab.sim import World

SEEDS = (3, 13, 17, 24, 31)
BOOKS = ("touched", "due_ns", "orders", "news")
"""Fields by which a rank knows what it may leave out."""


def handle_fully(machine: RankMachine, event: ev.Event, now_ns: int) -> list[ev.Effect]:
    """As `handle`, with nothing left out: every fragment is settled at every event."""
    effects = machine._pull_ended(event, now_ns)
    if isinstance(event, ev.Timed | ev.Moved):
        machine._on_quiet(event, effects)
    else:
        machine._on(event, now_ns, effects)
    if machine._reaches():
        for fragment in range(len(machine.replicas)):
            machine._settle(fragment, now_ns, effects)
    if machine._seated():
        effects += machine.copies.pull(machine.folded, now_ns)
    effects += machine.pace.search.tick(now_ns)
    machine._pull(now_ns, effects)
    machine._time_pulls(effects, now_ns)
    machine.news = True
    machine._flush(now_ns, effects)
    return effects


def state_of(machine: RankMachine) -> bytes:
    plain = copy.copy(machine)
    for name in BOOKS:
        setattr(plain, name, None)
    return encode_state({"rank": plain})


@pytest.mark.parametrize("seed", SEEDS)
def test_rank_decides_as_if_it_looked_at_everything(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, counts = RankMachine.handle, {"events": 0, "quiet": 0}

    def compare(machine: RankMachine, event: ev.Event, now_ns: int) -> list[ev.Effect]:
        full = copy.deepcopy(machine)
        expected = handle_fully(full, event, now_ns)
        counts["events"] += 1
        counts["quiet"] += machine._is_quiet(event)
        effects = handle(machine, event, now_ns)
        assert effects == expected, event
        assert state_of(machine) == state_of(full), event
        return effects

    monkeypatch.setattr(RankMachine, "handle", compare)
    report = World(seed).run()
    assert not report.problems
    assert counts["quiet"] > counts["events"] // 10


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_cached_orders_and_deadlines_equal_newly_computed_ones(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The orders of a leader for its ranks, and the deadlines of all machines."""
    orders_now, deadline_ns = Leader._orders_now, EventQueue.deadline_ns

    def compare_orders(leader: Leader, totals: tuple[Total, ...]) -> RankOrders:
        kept = orders_now(leader, totals)
        assert kept == leader._rank_orders(totals)
        return kept

    def compare_deadlines(queue: EventQueue, machine: ev.Machine) -> int | None:
        kept = deadline_ns(queue, machine)
        assert kept == machine.deadline_ns()
        return kept

    monkeypatch.setattr(Leader, "_orders_now", compare_orders)
    monkeypatch.setattr(EventQueue, "deadline_ns", compare_deadlines)
    assert not World(seed).run().problems


# --------------------------------------------------------------------------- counts

PAUSE_S = 10
CALM: dict[str, Any] = {"racks": 2, "steps": 48, "fragments": 4, "period_steps": 16}
MACHINES = re.compile(r"/mend/(?:consensus|coordination|detector)/(?!schedule)")


def calls_of(world: World) -> Counter[str]:
    """Calls of functions of the machines in a whole run, by their names; "all": of all."""
    profile = cProfile.Profile()
    profile.runcall(world.run)
    found = Counter[str]()
    for each in profile.getstats():
        if not isinstance(each.code, str) and MACHINES.search(each.code.co_filename):
            found[each.code.co_qualname] += each.callcount
            found["all"] += each.callcount
    return found


PINNED = {
    "all": (3_650, 12_550), "RankMachine.handle": (8, 20), "RankMachine._settle": (0, 9),
    "RankMachine._report": (0, 16), "Leader.handle": (12, 18), "Leader._rank_orders": (0, 9),
    "Coordinator.handle": (14, 30),
}  # fmt: skip
"""Most calls of an idle second and of a round, per rack; a witness is counted with them. When every
event settled every fragment and made every message again, these were 5,296 and 14,089 of all, 32
and 79 of `_settle`, 8 and 20 of `_report`, 12 and 18 of `_rank_orders`."""


def test_calls_of_an_idle_second_and_of_a_round_do_not_grow() -> None:
    """They hold the interpreter's lock, and training waits for it. The virtual clock makes the
    counts the same in every run."""
    busy = World(**CALM)
    calls = calls_of(busy)
    idle = calls_of(World(**CALM, pauses=((0, 25, PAUSE_S * SECOND), (1, 25, PAUSE_S * SECOND))))
    rounds = len(busy.checkers.commits)
    over = dict[str, tuple[float, float]]()
    for name, most in PINNED.items():
        found = (idle[name] - calls[name]) / PAUSE_S / 2, calls[name] / rounds / 2
        if found[0] > most[0] or found[1] > most[1]:
            over[name] = found
    assert over == {}
