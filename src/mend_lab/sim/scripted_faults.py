"""Stories of several faults in a row, each harmless alone.

What `draw` draws are mostly short jobs in which each fault has its own time. Some rules of the
protocol matter only when one thing follows another in a job that still trains: a coordinator that
is mute while results come in, its successor that is mute as well, a roster that is decided while
the link to those who must hear it breaks; racks that die together, as in a power cut, and are
started again; a rack that is slow for long enough to be found. Planted bugs showed which stories
are needed (tests/mutation_table.py). Each kind draws its times from a generator of its own, so that
all other seeds stay what they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from mend.types import MS, SECOND
from mend_lab.sim.scenario import FOR_EVER, WITNESS_TARGET, Fault, Scenario

PULLED = "StatePulled"
"""What a fault may wait for, as for a message: a rank that joins begins to pull the training state
that the rack has copied for it."""

Story = Callable[[int, random.Random], Scenario]

PATIENCE_NS = 20 * SECOND
"""Time that racks wait at their end, in addition to the training time."""

LENGTH_S = 14.0
"""Length of the training: enough to notice a lost quorum and to begin a new lineage."""

VOTES_NS = 5 * SECOND
"""Time from the restart of a witness until it has its vote back, while all others live."""

THREE_VOTERS = ((3, False), (2, True))
MANY_VOTERS = ((3, False), (2, True), (3, True), (4, False))
PAIRS_AND_THREES = ((2, False), (2, True), (3, False), (3, True))
"""(racks, whether there is a witness)"""


def scripted(seed: int) -> Scenario | None:
    """The scenario of a seed with a story; None for the other seeds."""
    for name, share, stories in STORIES:
        rng = random.Random(f"{name} {seed}")
        if rng.random() < share:
            return (rng.choice(stories) if len(stories) > 1 else stories[0])(seed, rng)
    return None


def job(seed: int, rng: random.Random, voters: tuple[int, bool], seconds: float) -> Scenario:
    """A job that trains for `seconds`, equally fast on all racks, always with rounds under way."""
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
        staleness_max_rounds=rng.choice((1, 2, 2)),
    )


def with_faults(scenario: Scenario, faults: list[Fault], healed_ns: int) -> Scenario:
    """Add the faults, which all heal at `healed_ns`; then all live racks must converge."""
    return replace(
        scenario,
        faults=tuple(faults),
        quiet_ns=healed_ns,
        shutdown_ns=max(scenario.length_ns, healed_ns) + PATIENCE_NS,
    )


def _order(scenario: Scenario) -> list[int]:
    """Who coordinates at first, who stands when that one is silent, and the others."""
    return sorted(scenario.targets, key=lambda target: target != WITNESS_TARGET)


def _apart(a: int, b: int, begin_ns: int, end_ns: int) -> list[Fault]:
    """Two cuts: neither target hears the other."""
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
    return with_faults(scenario, faults + _apart(first, heir, back_ns, end_ns), end_ns)


def _mute(seed: int, rng: random.Random) -> Scenario:
    """Right after one of its orders the coordinator is heard no more, though it hears: what it
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
    return with_faults(scenario, faults + _slow_workers(scenario, rng), end_ns + 2 * SECOND)


def _briefly_mute(seed: int, rng: random.Random) -> Scenario:
    """Just as long as it takes the next one to stand: it is heard again while that one asks."""
    scenario = _busy(seed, rng)
    first, *others = _order(scenario)
    begin_ns, length_ns = seconds(rng, 0.3, 3.0), seconds(rng, 1.95, 2.3)
    nth = rng.randint(1, scenario.racks + 1)
    faults = [_muted(first, other, begin_ns, length_ns, nth) for other in others]
    end_ns = begin_ns + length_ns + 2 * SECOND
    return with_faults(scenario, faults + _slow_workers(scenario, rng), end_ns)


def _busy(seed: int, rng: random.Random) -> Scenario:
    """A job in which results of several fragments are mostly under way."""
    scenario = job(seed, rng, rng.choice(MANY_VOTERS), seconds=7)
    return replace(
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
    return with_faults(scenario, faults, end_ns)


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
    return with_faults(scenario, faults, end_ns)


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
    return with_faults(scenario, faults, end_ns)


def _reseated(seed: int, rng: random.Random) -> Scenario:
    """Racks are started again one after the other in a job that trains on, rounds under way."""
    scenario = job(seed, rng, rng.choice(MANY_VOTERS), seconds=8)
    scenario = replace(scenario, k=1, grace_ns=0, delay_ns=40 * MS)
    now_ns, faults = seconds(rng, 0.2, 1.0), []
    for _ in range(2):
        length_ns = seconds(rng, 0.05, 1.0)
        rack = rng.randrange(scenario.racks)
        faults.append(Fault("restart", now_ns, now_ns + length_ns, rack))
        now_ns += length_ns + seconds(rng, 2.5, 4.0)
    return with_faults(scenario, faults, now_ns)


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
    return with_faults(replace(scenario, k=1), faults, back_ns + 4 * SECOND)


# ------------------------------------------------------------------ ranks


def _ragged(seed: int, rng: random.Random) -> Scenario:
    """Racks of two ranks: pulls fail for one of them, so that its rack-mate is further."""
    scenario = job(seed, rng, rng.choice(((2, True), (3, False))), seconds=5)
    scenario = replace(scenario, ranks=2, k=1, delay_ns=5 * MS)
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
    return with_faults(scenario, faults, end_ns + SECOND)


# ------------------------------------------------------------------ restarts


def _until_all_are_back(scenario: Scenario, faults: list[Fault]) -> Scenario:
    """Add the faults, with a quiet time after the last restart."""
    return with_faults(scenario, faults, max(fault.end_ns for fault in faults) + SECOND)


def _restarts(racks: list[int], rng: random.Random, begin_ns: int) -> list[Fault]:
    """These racks die within a tenth of a second, and come back one by one."""
    return [
        Fault("restart", at_ns, at_ns + seconds(rng, 0.05, 4.0), rack)
        for rack in racks
        for at_ns in (begin_ns + seconds(rng, 0.0, 0.1),)
    ]


def _two_at_once(seed: int, rng: random.Random) -> Scenario:
    """Those that are left are not a quorum, most times; perhaps one of them coordinates."""
    voters = rng.choice(((3, False), (3, False), (3, True), (3, True), (4, False), (2, True)))
    scenario = job(seed, rng, voters, LENGTH_S)
    lost = rng.sample(scenario.targets, 2)
    if WITNESS_TARGET in lost:  # it is not known to be dead by being started again
        lost = rng.sample(range(scenario.racks), 2)
    return _until_all_are_back(scenario, _restarts(lost, rng, seconds(rng, 0.5, 3.0)))


def _all_but_one(seed: int, rng: random.Random) -> Scenario:
    """One rack is left, perhaps with the witness."""
    scenario = job(seed, rng, rng.choice(((3, False), (3, True), (4, False))), LENGTH_S)
    left = rng.randrange(scenario.racks)
    lost = [rack for rack in range(scenario.racks) if rack != left]
    return _until_all_are_back(scenario, _restarts(lost, rng, seconds(rng, 0.5, 3.0)))


def _cut_and_lost(seed: int, rng: random.Random) -> Scenario:
    """A rack is heard by nobody, or hears nobody, while another one dies and comes back."""
    scenario = job(seed, rng, rng.choice(((3, False), (3, True), (2, True))), LENGTH_S)
    away, lost = rng.sample(range(scenario.racks), 2)
    others = [target for target in scenario.targets if target != away]
    begin_ns, deaf = seconds(rng, 0.5, 2.0), rng.random() < 0.5
    end_ns = begin_ns + seconds(rng, 3.0, 6.0)
    cuts = [
        Fault("cut", begin_ns, end_ns, *((other, away) if deaf else (away, other)))
        for other in others
    ]
    return _until_all_are_back(
        scenario, cuts + _restarts([lost], rng, begin_ns + seconds(rng, 0.0, 2.0))
    )


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
    return _until_all_are_back(scenario, faults)


def _behind_the_witness(seed: int, rng: random.Random) -> Scenario:
    """The witness is started again, and has its vote back when a rack dies."""
    scenario = job(seed, rng, rng.choice(((2, True), (2, True), (3, True))), LENGTH_S + 5)
    first = _restarts([WITNESS_TARGET], rng, seconds(rng, 0.3, 0.6))
    first = [replace(each, end_ns=each.begin_ns + SECOND) for each in first]
    dies_ns = first[0].end_ns + VOTES_NS + seconds(rng, 0.0, 0.5)
    lost = rng.randrange(scenario.racks)
    second = Fault("restart", dies_ns, dies_ns + seconds(rng, 0.05, 1.0), lost)
    return _until_all_are_back(scenario, [*first, second])


def _stale(scenario: Scenario, rng: random.Random, fault: Fault) -> list[Fault]:
    """What is sent to it while it is dead reaches its next life, most times."""
    until_ns = fault.end_ns + SECOND
    return [fault] + ([Fault("stale", 0, until_ns, fault.a)] if rng.random() < 0.7 else [])


def _at_birth(seed: int, rng: random.Random) -> Scenario:
    """Right after one of its first messages the founder, or a rack, is started again."""
    scenario = job(seed, rng, rng.choice(PAIRS_AND_THREES), seconds=6)
    founder = scenario.founder
    faults = []
    for _ in range(rng.choice((1, 1, 2))):
        who = rng.choice((founder, founder, *range(scenario.racks)))
        after = "Orders" if who == founder else rng.choice(("Hello", "Report"))
        end_ns, nth = seconds(rng, 0.05, 2.5), rng.randint(1, 3 * scenario.racks)
        fault = Fault("restart", 0, end_ns, who, after=after, nth=nth)
        faults += _stale(scenario, rng, fault)
    quiet_ns = 4 * SECOND
    return with_faults(scenario, faults, quiet_ns)


def _before_a_copy(seed: int, rng: random.Random) -> Scenario:
    """Rack 0 is started again while the others copy its weights, with which the job begins; its
    next life begins with other ones. In some seeds another rack is started again, too."""
    voters = rng.choice(((2, True), (3, False), (3, True), (4, False), (4, True)))
    scenario = job(seed, rng, voters, seconds=3)
    ranks = rng.choice((1, 2)) if scenario.racks < 4 else 1
    scenario = replace(scenario, ranks=ranks, unseeded=True, byte_ns=rng.choice((1, 4)) * MS)
    faults = [Fault("restart", *_soon(rng), 0)]
    if rng.random() < 0.4:
        faults.append(Fault("restart", *_soon(rng), rng.randrange(1, scenario.racks)))
    return _until_all_are_back(scenario, faults)


def _soon(rng: random.Random) -> tuple[int, int]:
    begin_ns = seconds(rng, 0.02, 0.4)
    return begin_ns, begin_ns + seconds(rng, 0.05, 3.5)


def _twice(seed: int, rng: random.Random) -> Scenario:
    """In a job that runs the founder is started again beside a rack that lives on, and others."""
    scenario = job(seed, rng, rng.choice(PAIRS_AND_THREES), LENGTH_S)
    lives = rng.randrange(1, scenario.racks)
    others = [rack for rack in range(scenario.racks) if rack not in (lives, scenario.founder)]
    lost = [scenario.founder, *rng.sample(others, rng.randint(0, len(others)))]
    faults = []
    for fault in _restarts(lost, rng, seconds(rng, 0.3, 3.0)):
        faults += _stale(scenario, rng, fault)
    return _until_all_are_back(scenario, faults)


def _all_lost(seed: int, rng: random.Random) -> Scenario:
    """At once, or one by one, so that some have a seat again, or almost, when the last one dies."""
    scenario = job(seed, rng, rng.choice(((2, True), (2, True), (3, True))), LENGTH_S)
    at_ns, faults = seconds(rng, 0.3, 4.0), []
    for rack in rng.sample(range(scenario.racks), scenario.racks):
        fault = Fault("restart", at_ns, at_ns + seconds(rng, 0.05, 4.0), rack)
        faults += _stale(scenario, rng, fault) if rng.random() < 0.3 else [fault]
        at_ns += rng.choice((0, 0, seconds(rng, 0.0, 0.2), seconds(rng, 0.5, 5.0)))
    return _until_all_are_back(scenario, faults)


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
    return _until_all_are_back(
        scenario, faults + _restarts(gone, rng, begin_ns + seconds(rng, 0.0, 1.0))
    )


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
    return with_faults(scenario, faults + _stale(scenario, rng, fault), end_ns + 6 * SECOND)


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
    return with_faults(scenario, [*slow, *lives, away, dead], end_ns)


def _retired(seed: int, rng: random.Random) -> Scenario:
    """One dies permanently, and a person says so; others do as well, or come back, or are away."""
    voters = rng.choice(((2, False), (2, False), (2, True), (3, False), (3, True)))
    scenario = replace(job(seed, rng, voters, LENGTH_S), k=1)
    lost = rng.sample(range(scenario.racks), scenario.racks - 1)
    if voters == (2, False):
        lost = [0]  # rack 1 alone is not a quorum
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
    return with_faults(scenario, faults, quiet_ns)


# ------------------------------------------------------------------ a slow rack

STEP_NS = 50 * MS
BEGINS_NS = 2 * SECOND
SLOW = 1


def _donor_dies(seed: int, rng: random.Random) -> Scenario:
    """A rack is started again, and the rack that gives it its training state dies while one of its
    ranks pulls that; in some seeds the next one that gives it dies as well."""
    scenario = job(seed, rng, rng.choice(((3, True), (3, False), (4, False))), seconds=8)
    ranks = rng.choice((1, 2, 2)) if scenario.racks == 3 else 1
    scenario = replace(scenario, ranks=ranks, carries=True, byte_ns=rng.choice((0, 300_000)))
    joins = rng.randrange(scenario.racks)
    begin_ns = seconds(rng, 0.5, 2.0)
    faults = [Fault("restart", begin_ns, begin_ns + seconds(rng, 0.05, 2.5), joins)]
    donors = [rack for rack in range(scenario.racks) if rack != joins]
    for donor in donors[: rng.choice((1, 1, 2))]:
        nth, away_ns = rng.randint(1, ranks), seconds(rng, 0.3, 4.0)
        until_ns = begin_ns + away_ns
        faults.append(Fault("restart", begin_ns, until_ns, donor, after=PULLED, nth=nth))
    return with_faults(scenario, faults, 8 * SECOND)


def _key_is_replaced(seed: int, rng: random.Random) -> Scenario:
    """While the job trains, everybody is started again three times, one after the other, each time
    with the next file of the three in SECURITY.md."""
    scenario = job(seed, rng, rng.choice(((3, False), (2, True))), seconds=4)
    now_ns, faults = seconds(rng, 0.5, 1.5), list[Fault]()
    order = rng.sample(scenario.targets, len(scenario.targets))
    for who in order * 3:
        back_ns = now_ns + seconds(rng, 0.05, 1.0)
        faults.append(Fault("restart", now_ns, back_ns, who))
        now_ns = back_ns + VOTES_NS + seconds(rng, 0.0, 2.0)
    steps = (now_ns // scenario.step_ns[0] + 40,) * scenario.racks
    scenario = replace(scenario, rotates=True, carries=True, steps=steps, k=1)
    return with_faults(scenario, faults, now_ns)


def with_slow_rack(seed: int, rng: random.Random) -> Scenario:
    """Rack 1 takes four to eight times as long per micro-batch for a while. Rounds would wait for
    it, as they do in lockstep anyway; while it is slow, the coordinator may go. Where it is
    evicted its next life is as slow, and cannot know it."""
    racks, slower, lockstep = rng.choice((2, 3, 3)), rng.choice((4, 6, 8)), rng.random() < 0.3
    ends_ns = rng.choice((4 * SECOND, 6 * SECOND, FOR_EVER))
    steps, witness = rng.randint(100, 130), rng.random() < 0.5
    faults = [Fault("slow_rack", BEGINS_NS, ends_ns, SLOW, amount=slower)]
    if rng.random() < 0.5:
        head = WITNESS_TARGET if witness else 0
        begin_ns = rng.randint(3 * SECOND, 6 * SECOND)
        kind = "freeze" if lockstep else rng.choice(("freeze", "restart"))
        faults.append(Fault(kind, begin_ns, begin_ns + rng.randint(1, 4) * SECOND, head))
    scenario = Scenario(
        seed=seed,
        racks=racks,
        ranks=rng.choice((1, 2, 2)),
        witness=witness,
        fragments=rng.choice((1, 2)),
        numel=3,
        period_steps=12,
        overlap_steps=rng.choice((0, 3)),
        steps=tuple(
            steps // 2 if rack == SLOW and not lockstep else steps for rack in range(racks)
        ),
        step_ns=(STEP_NS,) * racks,
        grace_ns=20 * SECOND,
        lockstep=lockstep,
        faults=tuple(faults),
        validates=True,
        acts=True,
        batch=rng.choice((0, 4, 12, 12)),
        delay_ns=rng.choice((5, 40)) * MS,
        jitter_ns=rng.choice((0, 60)) * MS,
        loss=rng.choice((0.0, 0.1)),
        records_kept=rng.choice((3, 4096)),
        shutdown_ns=40 * SECOND,
    )
    # Drawn last, so that those without it stay what they were.
    evicts, carries = not lockstep and rng.random() < 0.6, rng.random() < 0.5
    restart_ns, batch = rng.choice((200, 800, 2000)) * MS, rng.choice((0, 0, 12))
    if not evicts:
        return scenario
    faults[0] = replace(faults[0], end_ns=rng.choice((8 * SECOND, FOR_EVER)))
    scenario = replace(scenario, evicts=True, carries=carries, restart_ns=restart_ns, batch=batch)
    return replace(scenario, steps=(2 * steps,) * racks, faults=tuple(faults))


EVICTED_NS = (3_500 * MS, 11 * SECOND)
"""When such a rack is mostly evicted, or about to come back."""

WRITES_NS = (0, 300 * MS, 2 * SECOND)
"""What the files of a checkpoint take."""


def together(scenario: Scenario) -> Scenario:
    """Of seeds where a slow rack is evicted: what scripts and racks do besides, each in four of
    ten. A checkpoint; slices; averaged moments; the death of the coordinator, or of a rank; or
    nobody starts the rack again, and a person may say so. Of chance of its own."""
    if not scenario.evicts:
        return scenario
    rng, changes = random.Random(f"what else befalls {scenario.seed}"), dict[str, object]()
    cut, sliced, moments, dies, gone = (rng.random() < 0.4 for _ in range(5))
    if cut:
        changes["cut_step"] = rng.randint(60, 150)
        changes["cut_writes_ns"] = rng.choice(WRITES_NS)
    if sliced:
        missing = 3 - scenario.racks
        changes |= {"sharded": True, "racks": scenario.racks + max(missing, 0)}
        for name in ("steps", "step_ns") if missing > 0 else ():
            changes[name] = getattr(scenario, name) + getattr(scenario, name)[-1:]
    if moments:
        period = scenario.period_steps
        changes["moments"] = rng.choice(((period,), (period, 2 * period), (0, period)))
    changes["carries"] = rng.random() < 0.5
    faults = list(scenario.faults)
    if dies:
        faults.append(_death(scenario, rng))
    if gone:
        changes["gone"] = True
        if rng.random() < 0.5:
            retire_ns = rng.randint(EVICTED_NS[0], EVICTED_NS[1] + 6 * SECOND)
            faults.append(Fault("retire", retire_ns, retire_ns, SLOW))
    return replace(scenario, faults=tuple(faults), **changes)  # type: ignore[arg-type]


def _death(scenario: Scenario, rng: random.Random) -> Fault:
    """Of the first coordinator, of the rack that is evicted, or of another; it comes back."""
    begin_ns = rng.randint(*EVICTED_NS)
    who = rng.choice((scenario.founder, scenario.founder, SLOW, scenario.racks - 1))
    return Fault("restart", begin_ns, begin_ns + rng.choice((300 * MS, 1500 * MS, 4 * SECOND)), who)


STORIES: tuple[tuple[str, float, tuple[Story, ...]], ...] = (
    ("votes", 0.02, (_alone, _alone, _behind_the_witness)),
    (
        "coming back",
        0.06,
        (_two_at_once, _all_but_one, _cut_and_lost, _at_birth, _at_birth, _twice),
    ),
    (
        "saga",
        0.12,
        (
            _two_coordinators, _mute, _briefly_mute, _briefly_mute, _deaf_heir, _lonely,
            _seated_unheard, _seated_unheard, _reseated, _widowed, _ragged,
        ),
    ),
    (
        "all are lost",
        0.04,
        (_all_lost, _all_lost, _all_but_a_silent_one, _twice_lost, _late_hello, _retired),
    ),
    ("slow rack", 0.01, (with_slow_rack,)),
    ("death of a donor", 0.01, (_donor_dies,)),
    ("a key is replaced", 0.002, (_key_is_replaced,)),
    ("death before a copy", 0.01, (_before_a_copy,)),
)  # fmt: skip
"""(name, share of all seeds, stories). The name is a part of the generator's seed."""
