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
