"""Stories of processes that die together, or at a bad moment, and are started again.

What a launcher or a person does after a power cut. Each ends with every rack alive, in whatever
life: then the job must go on, as `liveness` asks. Their chance is their own, so that all other
seeds stay what they were.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from mend.sim.scenario import FOR_EVER, WITNESS_TARGET, Fault, Scenario
from mend.sim.scripted_faults import job, seconds, told
from mend.types import MS, SECOND

SHARE = 0.06
"""Of all seeds."""

VOTES_SHARE = 0.02
"""Of all seeds, too: stories of votes that come and go."""

VOTES_NS = 5 * SECOND
"""From when a witness is started again to when it has its vote back, if all others live."""

LENGTH_S = 14.0
"""Of the training: longer than it takes until a lost quorum is noticed and a lineage begins."""


def returns(seed: int) -> Scenario | None:
    """The scenario of a seed that tells one; None for the others."""
    rng = random.Random(f"votes {seed}")
    if rng.random() < VOTES_SHARE:
        return rng.choice(VOTES)(seed, rng)
    rng = random.Random(f"coming back {seed}")
    return rng.choice(RETURNS)(seed, rng) if rng.random() < SHARE else None


def _ended(scenario: Scenario, faults: list[Fault]) -> Scenario:
    """Quiet once everybody is started again."""
    return told(scenario, faults, max(fault.end_ns for fault in faults) + SECOND)


def _restarts(racks: list[int], rng: random.Random, begin_ns: int) -> list[Fault]:
    """They die within a tenth of a second, and come back one by one."""
    return [
        Fault("restart", at_ns, at_ns + seconds(rng, 0.05, 4.0), rack)
        for rack in racks
        for at_ns in (begin_ns + seconds(rng, 0.0, 0.1),)
    ]


def _two_at_once(seed: int, rng: random.Random) -> Scenario:
    """Those that are left are no quorum, most times; perhaps one of them coordinates."""
    voters = rng.choice(((3, False), (3, False), (3, True), (3, True), (4, False), (2, True)))
    scenario = job(seed, rng, voters, LENGTH_S)
    targets = [*range(scenario.racks), *([WITNESS_TARGET] if scenario.witness else [])]
    lost = rng.sample(targets, 2)
    if WITNESS_TARGET in lost:  # it is not known to be dead by being started again
        lost = rng.sample(range(scenario.racks), 2)
    return _ended(scenario, _restarts(lost, rng, seconds(rng, 0.5, 3.0)))


def _all_but_one(seed: int, rng: random.Random) -> Scenario:
    """One rack is left, perhaps with the witness."""
    scenario = job(seed, rng, rng.choice(((3, False), (3, True), (4, False))), LENGTH_S)
    left = rng.randrange(scenario.racks)
    lost = [rack for rack in range(scenario.racks) if rack != left]
    return _ended(scenario, _restarts(lost, rng, seconds(rng, 0.5, 3.0)))


def _cut_and_lost(seed: int, rng: random.Random) -> Scenario:
    """A rack is heard by nobody, or hears nobody, while another one dies and comes back."""
    scenario = job(seed, rng, rng.choice(((3, False), (3, True), (2, True))), LENGTH_S)
    away, lost = rng.sample(range(scenario.racks), 2)
    others = [rack for rack in range(scenario.racks) if rack != away]
    others += [WITNESS_TARGET] if scenario.witness else []
    begin_ns, deaf = seconds(rng, 0.5, 2.0), rng.random() < 0.5
    end_ns = begin_ns + seconds(rng, 3.0, 6.0)
    cuts = [
        Fault("cut", begin_ns, end_ns, *((other, away) if deaf else (away, other)))
        for other in others
    ]
    return _ended(scenario, cuts + _restarts([lost], rng, begin_ns + seconds(rng, 0.0, 2.0)))


def _alone(seed: int, rng: random.Random) -> Scenario:
    """One rack is cut off, so that the other votes alone; that one dies right when the first is
    back and has read so, or before, and is started again. Perhaps nobody hears the witness."""
    scenario = job(seed, rng, (2, True), LENGTH_S + 2)
    lost = rng.randrange(2)
    begin_ns = seconds(rng, 0.5, 0.8)
    back_ns = begin_ns + seconds(rng, 2.3, 2.8)
    dies_ns = back_ns + seconds(rng, -0.2, 1.2)
    again_ns = dies_ns + seconds(rng, 0.05, 1.0)
    faults = [
        Fault("partition", begin_ns, back_ns, racks=(1 - lost,)),
        Fault("restart", dies_ns, again_ns, lost),
    ]
    if rng.random() < 0.4:
        begin_ns = dies_ns - seconds(rng, 0.0, 0.2)
        faults.append(Fault("partition", begin_ns, again_ns + 6 * SECOND, racks=(WITNESS_TARGET,)))
    return _ended(scenario, faults)


def _behind_the_witness(seed: int, rng: random.Random) -> Scenario:
    """The witness is started again, and has its vote back when a rack dies."""
    scenario = job(seed, rng, rng.choice(((2, True), (2, True), (3, True))), LENGTH_S + 5)
    first = _restarts([WITNESS_TARGET], rng, seconds(rng, 0.3, 0.6))
    first = [dataclasses.replace(each, end_ns=each.begin_ns + SECOND) for each in first]
    dies_ns = first[0].end_ns + VOTES_NS + seconds(rng, 0.0, 0.5)
    lost = rng.randrange(scenario.racks)
    second = Fault("restart", dies_ns, dies_ns + seconds(rng, 0.05, 1.0), lost)
    return _ended(scenario, [*first, second])


def _stale(scenario: Scenario, rng: random.Random, fault: Fault) -> list[Fault]:
    """What is sent to it while it is dead reaches its next life, most times."""
    until_ns = fault.end_ns + SECOND
    return [fault] + ([Fault("stale", 0, until_ns, fault.a)] if rng.random() < 0.7 else [])


def _at_birth(seed: int, rng: random.Random) -> Scenario:
    """Right behind one of its first messages the founder, or a rack, is started again."""
    voters = rng.choice(((2, False), (2, True), (3, False), (3, True)))
    scenario = job(seed, rng, voters, seconds=6)
    founder = WITNESS_TARGET if scenario.witness else 0
    faults = []
    for _ in range(rng.choice((1, 1, 2))):
        who = rng.choice((founder, founder, *range(scenario.racks)))
        after = "Orders" if who == founder else rng.choice(("Hello", "Report"))
        end_ns, nth = seconds(rng, 0.05, 2.5), rng.randint(1, 3 * scenario.racks)
        fault = Fault("restart", 0, end_ns, who, after=after, nth=nth)
        faults += _stale(scenario, rng, fault)
    quiet_ns = 4 * SECOND
    return told(scenario, faults, quiet_ns)


def _twice(seed: int, rng: random.Random) -> Scenario:
    """In a job that runs the founder is started again beside a rack that lives on, and others."""
    voters = rng.choice(((2, False), (2, True), (3, False), (3, True)))
    scenario = job(seed, rng, voters, LENGTH_S)
    lives = rng.randrange(1, scenario.racks)
    founder = WITNESS_TARGET if scenario.witness else 0
    others = [rack for rack in range(scenario.racks) if rack not in (lives, founder)]
    lost = [founder, *rng.sample(others, rng.randint(0, len(others)))]
    faults = []
    for fault in _restarts(lost, rng, seconds(rng, 0.3, 3.0)):
        faults += _stale(scenario, rng, fault)
    return _ended(scenario, faults)


LOST_SHARE = 0.04
"""Of all seeds: those of `lost`."""


def lost(seed: int) -> Scenario | None:
    """The scenario of a seed in which all racks die and the witness lives; None for the others."""
    rng = random.Random(f"all are lost {seed}")
    return rng.choice(LOST)(seed, rng) if rng.random() < LOST_SHARE else None


def _all_lost(seed: int, rng: random.Random) -> Scenario:
    """At once, or one by one, so that some have a seat again, or almost, when the last one dies."""
    scenario = job(seed, rng, rng.choice(((2, True), (2, True), (3, True))), LENGTH_S)
    at_ns, faults = seconds(rng, 0.3, 4.0), []
    for rack in rng.sample(range(scenario.racks), scenario.racks):
        fault = Fault("restart", at_ns, at_ns + seconds(rng, 0.05, 4.0), rack)
        faults += _stale(scenario, rng, fault) if rng.random() < 0.3 else [fault]
        at_ns += rng.choice((0, 0, seconds(rng, 0.0, 0.2), seconds(rng, 0.5, 5.0)))
    return _ended(scenario, faults)


def _all_but_a_silent_one(seed: int, rng: random.Random) -> Scenario:
    """All but one are started again; that one hears and says nothing for a while, and lives."""
    scenario = job(seed, rng, rng.choice(((2, True), (3, True))), LENGTH_S)
    away = rng.randrange(scenario.racks)
    begin_ns = seconds(rng, 0.5, 2.0)
    end_ns = begin_ns + seconds(rng, 4.0, 9.0)
    gone = [rack for rack in range(scenario.racks) if rack != away]
    faults = [
        Fault("partition", begin_ns, end_ns, racks=(away,))
        if rng.random() < 0.6
        else Fault("freeze", begin_ns, end_ns, away)
    ]
    return _ended(scenario, faults + _restarts(gone, rng, begin_ns + seconds(rng, 0.0, 1.0)))


def _twice_lost(seed: int, rng: random.Random) -> Scenario:
    """The racks that begin anew are started again in the midst of it."""
    scenario = job(seed, rng, (2, True), LENGTH_S)
    begin_ns = seconds(rng, 0.5, 2.0)
    faults = _restarts([0, 1], rng, begin_ns)
    again_ns = max(fault.end_ns for fault in faults) + seconds(rng, 0.0, 6.0)
    rack, after = rng.randrange(2), rng.choice(("Hello", "Report", ""))
    end_ns = again_ns + seconds(rng, 0.05, 2.0)
    nth = rng.randint(1, 20) if after else 0
    fault = Fault("restart", again_ns, end_ns, rack, after=after, nth=nth)
    return told(scenario, faults + _stale(scenario, rng, fault), end_ns + 6 * SECOND)


def _late_hello(seed: int, rng: random.Random) -> Scenario:
    """Rack 1 is started twice: what its second life says is under way for long. Its third gets the
    seat, and is not heard any more when that arrives; then rack 0 dies and comes back."""
    scenario = job(seed, rng, (3, False), LENGTH_S)
    begin_ns = seconds(rng, 0.5, 1.5)
    again_ns = begin_ns + seconds(rng, 2.3, 2.8)
    late_ns = seconds(rng, 6.5, 8.0)
    slow = [Fault("slow_link", begin_ns, again_ns, 1, b, amount=late_ns) for b in (0, 2)]
    lives = [Fault("restart", at_ns, at_ns + 50 * MS, 1) for at_ns in (begin_ns, again_ns)]
    away_ns = again_ns + seconds(rng, 2.5, 3.5)
    end_ns = away_ns + seconds(rng, 8.0, 10.0)
    away = Fault("partition", away_ns, end_ns, racks=(1,))
    dead = Fault("restart", away_ns + SECOND, away_ns + 2 * SECOND, 0)
    return told(scenario, [*slow, *lives, away, dead], end_ns)


def _retired(seed: int, rng: random.Random) -> Scenario:
    """One dies for good, and a person says so; others do as well, or come back, or are away."""
    voters = rng.choice(((2, False), (2, False), (2, True), (3, False), (3, True)))
    scenario = dataclasses.replace(job(seed, rng, voters, LENGTH_S), k=1)
    lost = rng.sample(range(scenario.racks), scenario.racks - 1)
    if voters == (2, False):
        lost = [0]  # rack 1 alone is no quorum
    begin_ns, faults = seconds(rng, 0.5, 2.0), []
    for fault in _restarts(lost, rng, begin_ns):
        if fault.a != lost[0] and rng.random() < 0.4:
            end_ns = begin_ns + seconds(rng, 6.0, 9.0)
            faults.append(Fault("partition", fault.begin_ns, end_ns, racks=(fault.a,)))
        elif fault.a == lost[0] or rng.random() < 0.5:
            retire_ns = fault.begin_ns + seconds(rng, 0.1, 1.5)
            faults.append(Fault("crash", fault.begin_ns, FOR_EVER, fault.a))
            faults.append(Fault("retire", retire_ns, retire_ns, fault.a))
        else:
            faults.append(fault)
    quiet_ns = max(f.end_ns for f in faults if f.kind != "crash") + SECOND // 10
    return told(scenario, faults, quiet_ns)


Return = Callable[[int, random.Random], Scenario]
LOST: tuple[Return, ...] = (
    _all_lost,
    _all_lost,
    _all_but_a_silent_one,
    _twice_lost,
    _late_hello,
    _retired,
)
RETURNS: tuple[Return, ...] = (
    _two_at_once,
    _all_but_one,
    _cut_and_lost,
    _at_birth,
    _at_birth,
    _twice,
)
VOTES: tuple[Return, ...] = (_alone, _alone, _behind_the_witness)
