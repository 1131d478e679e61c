"""A job with a slow rack, about which something is done while other things break.

What `draw` draws are mostly short jobs, and it takes some ten steps to find a slow rack. Its chance
is its own, so that all other seeds stay what they were.
"""

from __future__ import annotations

import random
from dataclasses import replace

from mend.sim.scenario import FOR_EVER, WITNESS_TARGET, Fault, Scenario
from mend.types import MS, SECOND

SHARE = 0.01
"""Of all seeds."""

STEP_NS = 50 * MS
BEGINS_NS = 2 * SECOND
SLOW = 1


def slowed(seed: int) -> Scenario | None:
    """The scenario of a seed that tells it; None for the others."""
    rng = random.Random(f"slow rack {seed}")
    return with_slow_rack(seed, rng) if rng.random() < SHARE else None


def with_slow_rack(seed: int, rng: random.Random) -> Scenario:
    """Rack 1 takes four to eight times as long per micro-batch for a while. Rounds would wait for
    it, as they do in lockstep anyway; while it is slow, whoever coordinates may go. Where it is
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
    ten. A checkpoint; slices; averaged moments; the death of whoever coordinates, or of a rank; or
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
    """Of whoever coordinates first, of the rack that is evicted, or of another; it comes back."""
    head = WITNESS_TARGET if scenario.witness else 0
    begin_ns = rng.randint(*EVICTED_NS)
    who = rng.choice((head, head, SLOW, scenario.racks - 1))
    return Fault("restart", begin_ns, begin_ns + rng.choice((300 * MS, 1500 * MS, 4 * SECOND)), who)
