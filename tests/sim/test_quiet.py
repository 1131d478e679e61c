"""What a rank leaves out, because nothing has touched it, would have done nothing."""

from __future__ import annotations

import copy
import cProfile
import re
from collections import Counter
from typing import Any

import pytest

from mend.coordination import events as ev
from mend.coordination.rank import RankMachine
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


def test_calls_of_an_idle_second_and_of_a_round_do_not_grow() -> None:
    """Calls of the machines on the loop's thread, which hold the interpreter's lock. The bounds are
    what was counted, and a little; before most events were quiet: 5,019 a second and rack, and
    1,610 a round and rack."""
    busy = World(**CALM)
    calls = calls_of(busy)
    idle = calls_of(World(**CALM, pauses=((0, 24, PAUSE_S * SECOND), (1, 24, PAUSE_S * SECOND))))
    idle.subtract(calls)
    rounds = len(busy.checkers.commits)
    each_second = {name: count / PAUSE_S / 2 for name, count in idle.items()}
    each_round = {name: count / rounds / 2 for name, count in calls.items()}
    print(rounds)
    for name in (
        "all",
        "RankMachine.handle",
        "RankMachine._settle",
        "RankMachine._report",
        "Leader.handle",
        "Leader._rank_orders",
        "Coordinator.handle",
    ):
        print(name, each_second.get(name), each_round.get(name))
