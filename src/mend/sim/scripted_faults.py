"""Long stories of several faults in a row, each harmless alone.

What `draw` draws are mostly short jobs in which each fault has its own time. Some rules of the
protocol matter only when one thing follows another in a job that still trains: a coordinator that
is mute while results come in, its successor that is mute as well, a roster that is decided while
the link to those who must hear it breaks. A saga is such a story with its times drawn; planted bugs
showed which of them are needed (tests/mutation_table.py). Its chance is its own, so that all other
seeds stay what they were.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from mend.sim.scenario import FOR_EVER, WITNESS_TARGET, Fault, Scenario
from mend.types import MS, SECOND

SHARE = 0.12
"""Of all seeds."""

PATIENCE_NS = 20 * SECOND
"""What racks wait at their end beyond the time that training takes."""

THREE_VOTERS = ((3, False), (2, True))
MANY_VOTERS = ((3, False), (2, True), (3, True), (4, False))
"""(racks, whether there is a witness)"""


def saga(seed: int) -> Scenario | None:
    """The scenario of a seed that tells one; None for the others."""
    rng = random.Random(f"saga {seed}")
    return rng.choice(SAGAS)(seed, rng) if rng.random() < SHARE else None


def job(seed: int, rng: random.Random, voters: tuple[int, bool], seconds: float) -> Scenario:
    """Trains for so long, equally fast everywhere, and always has rounds under way."""
    racks, witness = voters
    step_ns, period = rng.choice((100, 150)) * MS, rng.choice((3, 4))
    return Scenario(
        seed=seed,
        racks=racks,
        witness=witness,
        fragments=rng.choice((1, 2, 3, 3)),
        numel=3,
        period_steps=period,
        overlap_steps=rng.randrange(period),
        steps=(round(seconds * SECOND) // step_ns,) * racks,
        step_ns=(step_ns,) * racks,
        k=rng.choice((1, 1, 2)),
        grace_ns=rng.choice((-1, 0, 0, 50 * MS)),
        delay_ns=rng.choice((5, 20, 40)) * MS,
        overlapped=rng.random() < 0.8,
        max_age=rng.choice((1, 2, 2)),
    )


def told(scenario: Scenario, faults: list[Fault], healed_ns: int) -> Scenario:
    """With an end at which everything heals; then all that lives must come together."""
    return dataclasses.replace(
        scenario,
        faults=tuple(faults),
        quiet_ns=healed_ns,
        shutdown_ns=max(scenario.length_ns, healed_ns) + PATIENCE_NS,
    )


def _order(scenario: Scenario) -> list[int]:
    """Who coordinates at first, who stands when that one is silent, and the others."""
    racks = list(range(scenario.racks))
    return [WITNESS_TARGET, *racks] if scenario.witness else racks


def _apart(a: int, b: int, begin_ns: int, end_ns: int) -> list[Fault]:
    """Neither hears the other."""
    return [Fault("cut", begin_ns, end_ns, a, b), Fault("cut", begin_ns, end_ns, b, a)]


def seconds(rng: random.Random, least: float, most: float) -> int:
    return rng.randint(round(least * 1000), round(most * 1000)) * MS


# ------------------------------------------------------------------ coordinators


def _two_coordinators(seed: int, rng: random.Random) -> Scenario:
    """The coordinator is cut off until another leads; then it is back, but those two do not hear
    each other, and all others hear both."""
    scenario = job(seed, rng, rng.choice(MANY_VOTERS), seconds=7)
    first, heir, *_ = _order(scenario)
    begin_ns = seconds(rng, 0.3, 2.0)
    back_ns = begin_ns + seconds(rng, 2.2, 3.6)
    end_ns = back_ns + seconds(rng, 0.5, 4.0)
    faults = [Fault("partition", begin_ns, back_ns, racks=(first,))]
    return told(scenario, faults + _apart(first, heir, back_ns, end_ns), end_ns)


def _mute(seed: int, rng: random.Random) -> Scenario:
    """Right behind one of its orders the coordinator is heard no more, though it hears: what it
    appends stays with it. The same may happen to its successor. Then all meet again."""
    scenario = _busy(seed, rng)
    first, heir, *_ = order = _order(scenario)
    begin_ns, length_ns = seconds(rng, 0.3, 2.0), seconds(rng, 2.2, 5.0)
    nth = rng.randint(1, scenario.racks + 1)
    faults = [_muted(first, other, begin_ns, length_ns, nth) for other in order if other != first]
    end_ns = begin_ns + length_ns
    if rng.random() < 0.7:
        again_ns, length_ns = begin_ns + 2 * SECOND, seconds(rng, 0.5, 4.0)
        name, nth = rng.choice(("Orders", "Orders", "Prepare")), rng.randint(1, 8)
        kind = rng.choice(("cut", "cut", "crash", "freeze", "restart"))
        others = [other for other in order if other != heir] if kind == "cut" else [-1]
        until_ns = FOR_EVER if kind == "crash" else again_ns + length_ns
        faults += [Fault(kind, again_ns, until_ns, heir, b, after=name, nth=nth) for b in others]
        end_ns = max(end_ns, again_ns + length_ns)
    if rng.random() < 0.6:
        amount = rng.choice((100, 300, 800)) * MS
        until_ns = end_ns + 2 * SECOND
        faults.append(Fault("slow_link", begin_ns, until_ns, first, heir, amount=amount))
    return told(scenario, faults + _slow_workers(scenario, rng), end_ns + 2 * SECOND)


def _briefly_mute(seed: int, rng: random.Random) -> Scenario:
    """Just as long as it takes the next one to stand: it is heard again while that one asks."""
    scenario = _busy(seed, rng)
    first, *others = _order(scenario)
    begin_ns, length_ns = seconds(rng, 0.3, 3.0), seconds(rng, 1.95, 2.3)
    nth = rng.randint(1, scenario.racks + 1)
    faults = [_muted(first, other, begin_ns, length_ns, nth) for other in others]
    end_ns = begin_ns + length_ns + 2 * SECOND
    return told(scenario, faults + _slow_workers(scenario, rng), end_ns)


def _busy(seed: int, rng: random.Random) -> Scenario:
    """Results of several fragments are under way at most times."""
    scenario = job(seed, rng, rng.choice(MANY_VOTERS), seconds=7)
    return dataclasses.replace(
        scenario,
        fragments=3,
        period_steps=3,
        overlap_steps=rng.randrange(1, 3),
        overlapped=True,
        steps=(120,) * scenario.racks,
        step_ns=(50 * MS,) * scenario.racks,
        delay_ns=40 * MS,
    )


def _slow_workers(scenario: Scenario, rng: random.Random) -> list[Fault]:
    racks = [rack for rack in range(scenario.racks) if rng.random() < 0.6]
    return [Fault("slow_worker", 0, FOR_EVER, rack, amount=200 * MS) for rack in racks]


def _muted(a: int, b: int, begin_ns: int, length_ns: int, nth: int) -> Fault:
    return Fault("cut", begin_ns, begin_ns + length_ns, a, b, after="Orders", nth=nth)


def _deaf_heir(seed: int, rng: random.Random) -> Scenario:
    """The one who would succeed does not hear the coordinator, which hears it; what it says then
    reaches the coordinator alone. So the coordinator's own vote decides between two."""
    scenario = job(seed, rng, rng.choice(THREE_VOTERS), seconds=7)
    first, heir, *others = _order(scenario)
    begin_ns = seconds(rng, 0.3, 2.0)
    back_ns = begin_ns + seconds(rng, 1.9, 3.0)
    end_ns = back_ns + seconds(rng, 0.5, 4.0)
    faults = [Fault("cut", begin_ns, back_ns, first, heir)]
    for other in others:
        faults += _apart(heir, other, begin_ns, end_ns)
    return told(scenario, faults, end_ns)


# ------------------------------------------------------------------ rosters


def _lonely(seed: int, rng: random.Random) -> Scenario:
    """One rack hears the witness only, so it votes and holds nothing new. Of the two others one is
    started again, and when it has its seat the other one goes."""
    scenario = job(seed, rng, (3, True), seconds=7)
    lonely, back, gone = rng.sample(range(3), 3)
    begin_ns, restart_ns = seconds(rng, 0.1, 1.0), seconds(rng, 1.5, 3.0)
    gone_ns = restart_ns + seconds(rng, 2.0, 4.0)
    end_ns = gone_ns + SECOND
    faults = _apart(lonely, back, begin_ns, end_ns) + _apart(lonely, gone, begin_ns, end_ns)
    faults.append(Fault("restart", restart_ns, restart_ns + seconds(rng, 0.05, 1.5), back))
    faults.append(Fault("crash", gone_ns, FOR_EVER, gone))
    return told(scenario, faults, end_ns)


def _seated_unheard(seed: int, rng: random.Random) -> Scenario:
    """A rack gets its vote back, and the coordinator goes on with it alone; some voters have
    accepted the roster and are cut off before they hear that it is decided."""
    scenario = job(seed, rng, (3, True), seconds=8)
    begin_ns = seconds(rng, 0.2, 1.0)
    cut_ns = begin_ns + seconds(rng, 2.3, 5.0)
    end_ns = cut_ns + seconds(rng, 3.0, 4.5)
    late_ns = rng.choice((100, 300, 600)) * MS
    faults = [Fault("restart", begin_ns, begin_ns + seconds(rng, 0.05, 1.0), 0)]
    for rack in (1, 2):
        faults.append(
            Fault("slow_link", begin_ns + SECOND, end_ns, WITNESS_TARGET, rack, amount=late_ns)
        )
        faults.append(Fault("cut", cut_ns, end_ns, WITNESS_TARGET, rack))
    if rng.random() < 0.5:  # and it is slow, so that results are decided which it does not have
        amount = rng.choice((200, 400, 800)) * MS
        faults.append(Fault("slow_worker", begin_ns, end_ns, 0, amount=amount))
    return told(scenario, faults, end_ns)


def _reseated(seed: int, rng: random.Random) -> Scenario:
    """Racks are started again one after the other in a job that trains on, rounds under way."""
    scenario = job(seed, rng, rng.choice(MANY_VOTERS), seconds=8)
    scenario = dataclasses.replace(scenario, k=1, grace_ns=0, delay_ns=40 * MS)
    now_ns, faults = seconds(rng, 0.2, 1.0), []
    for _ in range(2):
        length_ns = seconds(rng, 0.05, 1.0)
        rack = rng.randrange(scenario.racks)
        faults.append(Fault("restart", now_ns, now_ns + length_ns, rack))
        now_ns += length_ns + seconds(rng, 2.5, 4.0)
    return told(scenario, faults, now_ns)


def _widowed(seed: int, rng: random.Random) -> Scenario:
    """Of two racks the one that decides alone serves wrong bits, so that its results stay with it;
    then it is started again, and the other one goes on with what it has."""
    scenario = job(seed, rng, (2, False), seconds=6)
    begin_ns = seconds(rng, 0.3, 1.0)
    restart_ns = begin_ns + seconds(rng, 0.3, 2.0)
    nth = rng.randint(1, 6)
    back_ns = restart_ns + seconds(rng, 0.05, 1.5)
    faults = [
        Fault("flip_bytes", begin_ns, back_ns, 0, amount=rng.choice((50, 90, 100))),
        Fault("restart", restart_ns, back_ns, 0, after="Orders", nth=nth),
    ]
    return told(dataclasses.replace(scenario, k=1), faults, back_ns + 4 * SECOND)


# ------------------------------------------------------------------ ranks


def _ragged(seed: int, rng: random.Random) -> Scenario:
    """Racks of two ranks: pulls fail for one of them, so that its rack-mate is further."""
    scenario = job(seed, rng, rng.choice(((2, True), (3, False))), seconds=5)
    scenario = dataclasses.replace(scenario, ranks=2, k=1, delay_ns=5 * MS)
    late = rng.randrange(scenario.racks)
    begin_ns = seconds(rng, 0.2, 1.5)
    end_ns = begin_ns + seconds(rng, 1.0, 3.0)
    faults = [
        Fault("flip_bytes", begin_ns, end_ns, rack, amount=rng.choice((30, 60, 90)))
        for rack in range(scenario.racks)
        if rack != late
    ]
    faults.append(Fault("slow_worker", begin_ns, end_ns, late, amount=200 * MS))
    if rng.random() < 0.5:
        faults.append(Fault("freeze", begin_ns, begin_ns + seconds(rng, 0.5, 2.0), late))
    return told(scenario, faults, end_ns + SECOND)


Saga = Callable[[int, random.Random], Scenario]
SAGAS: tuple[Saga, ...] = (
    _two_coordinators,
    _mute,
    _briefly_mute,
    _briefly_mute,
    _deaf_heir,
    _lonely,
    _seated_unheard,
    _seated_unheard,
    _reseated,
    _widowed,
    _ragged,
)
