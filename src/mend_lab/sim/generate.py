"""Draws a scenario from one seed. Besides the run itself this is the only use of chance.

Each seed enables a few kinds of faults with its own intensity (swarm testing, Groce et al. 2012:
with all kinds always on, most runs look alike), in small rosters and short runs. Some seeds have a
plot: a sequence of faults that uniform chance would hardly ever draw, such as a coordinator that
dies right after its n-th message. In some seeds the whole job is made for such a sequence: see
`scripted_faults`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from mend.codec import CODECS, codec_named, cut_numel
from mend.consensus.log import RECORDS_KEPT
from mend.coordination.round import SLICED_MIN
from mend.fragment.apply import ApplyMode
from mend.types import MS, SECOND
from mend_lab.sim.faults import SPOILT
from mend_lab.sim.scenario import FOR_EVER, SHUTDOWN_NS, WITNESS_TARGET, Fault, Scenario
from mend_lab.sim.scripted_faults import PATIENCE_NS, scripted, together

APPLY_MODES: tuple[ApplyMode, ...] = ("carry", "carry", "carry", "overwrite", "blend")

MESSAGES = ("Hello", "Report", "Report", "Orders", "Orders", "Prepare", "Vote")
"""A fault may begin right after the n-th message of such a name."""

SWARM = (
    "cut", "cut", "partition", "partition", "lossy", "shuffle", "slow_link", "freeze", "freeze",
    "slow_rack", "slow_worker", "flip_bytes", "flip_frames", "clock_jump", "clock_drift",
    "crash", "crash", "restart", "restart",
)  # fmt: skip
"""Kinds of faults, repeated by their weight."""

AMOUNTS: dict[str, tuple[int, ...]] = {
    "lossy": (30, 60, 90),
    "shuffle": (50 * MS, 500 * MS),
    "slow_link": (100 * MS, 300 * MS, 800 * MS),
    "slow_rack": (2, 4),
    "slow_worker": (20 * MS, 200 * MS),
    "flip_bytes": (5, 50),
    "flip_frames": (5, 50),
    "clock_jump": (100 * MS, SECOND, 4 * SECOND),
    "clock_drift": (100, 10_000),
}
"""Intensities of a kind."""

BETWEEN = ("cut", "slow_link", "lossy", "shuffle")
"""Kinds that take place between two targets; ANYWHERE: or everywhere."""

ANYWHERE = ("lossy", "shuffle")
AT_RACKS = ("slow_rack", "slow_worker", "flip_bytes")
"""The witness does not train, work or serve."""

LOCKSTEP_SURVIVES_NOT = ("crash", "restart")
"""In lockstep every rack waits for every other, so that a lost rack ends the job, as promised."""

LOSSY = tuple(name for name, make in CODECS.items() if not make().exact)
SELDOM = ("powersgd-1", *(name for name in CODECS if name not in ("float32", *LOSSY)))
"""Codecs of few seeds: one with a state, and the exact ones besides the default. A codec that is
added moves those of other seeds."""

SHARDED_SHARE = 0.5
"""Share of sharded jobs, among the seeds whose racks can merge a slice each."""

CUT_SHARE, RESUMED_SHARE, PAUSED_SHARE = 0.06, 0.03, 0.06
"""Shares of all seeds whose scripts make a checkpoint, resume one, or pause."""

CARRIES_SHARE, MOMENTS_SHARE, VALIDATES_SHARE = 0.06, 0.04, 0.03
"""Shares of all seeds whose optimizers have a state that joining racks copy, or moments that racks
average, and whose slow racks are validated."""

PAUSES = (300 * MS, 2_500 * MS, 6 * SECOND)
"""Shorter than a silence, longer than one, and longer than a silent rack keeps its vote: a rack
that only evaluates is not silent."""


def draw(seed: int, fixed: Mapping[str, Any] | None = None) -> Scenario:
    """The scenario of a seed. `fixed`: fields of Scenario that are not drawn, such as a user's own
    racks, H, P, tau and K."""
    scenario = _drawn(seed, fixed)
    if fixed:
        return scenario
    changes = _script(scenario) | {"sharded": _shards(scenario)}
    return together(dataclasses.replace(scenario, **changes))  # type: ignore[arg-type]


def _shards(scenario: Scenario) -> bool:
    """Draw whether racks merge a slice each, where they can, from a generator of its own."""
    may = scenario.racks >= SLICED_MIN and scenario.merge == "mean"
    rng = random.Random(f"how racks exchange {scenario.seed}")
    return may and cut_numel(codec_named(scenario.payload)) > 0 and rng.random() < SHARDED_SHARE


def _script(scenario: Scenario) -> dict[str, object]:
    """Draw what scripts do besides training, from a generator of its own, so that the other seeds
    stay as they are."""
    rng, changes = random.Random(f"what users do besides {scenario.seed}"), dict[str, object]()
    if rng.random() < CUT_SHARE:
        changes["cut_step"] = rng.randint(2, min(scenario.steps))
    if rng.random() < RESUMED_SHARE:
        changes["first"] = rng.choice((1, 7))
    if rng.random() < PAUSED_SHARE:
        racks = rng.sample(range(scenario.racks), rng.choice((1, 1, scenario.racks)))
        step = rng.randint(2, min(scenario.steps) - 1)
        changes["pauses"] = tuple((rack, step, rng.choice(PAUSES)) for rack in racks)
    changes["carries"] = rng.random() < CARRIES_SHARE or scenario.carries
    if rng.random() < MOMENTS_SHARE and not scenario.non_finite:  # which would stay in the moments
        period = scenario.period_steps
        changes["moments"] = rng.choice(((period,), (period, 2 * period), (0, period)))
    # Mitigation depends on the cause, which validation finds.
    changes["validates"] = rng.random() < VALIDATES_SHARE or scenario.acts
    return changes


def _drawn(seed: int, fixed: Mapping[str, Any] | None) -> Scenario:
    if not fixed and (story := scripted(seed)):
        return story
    rng = random.Random(seed)
    scenario = _workload(seed, rng)
    if fixed:
        scenario = _fit(scenario, dict(fixed), rng)
    if rng.random() < 0.12:
        return scenario
    faults = _plot(scenario, rng) if rng.random() < 0.35 else []
    for kind in rng.sample(SWARM, rng.choice((0, 1, 2, 3)) if faults else rng.choice((1, 1, 2, 3))):
        if not (scenario.lockstep and kind in LOCKSTEP_SURVIVES_NOT):
            faults.append(_fault(kind, scenario, rng))
    changes: dict[str, object] = {}
    if rng.random() < 0.6:
        quiet_ns = rng.randint(scenario.length_ns // 2, scenario.length_ns + 2 * SECOND)
        faults = [fault for fault in faults if fault.begin_ns < quiet_ns]
        changes["quiet_ns"] = quiet_ns
        if rng.random() < 0.7:
            slowest = max((f.amount for f in faults if f.kind == "slow_rack"), default=1)
            changes["shutdown_ns"] = slowest * scenario.length_ns + PATIENCE_NS
    changes["faults"] = tuple(faults)
    if not scenario.lockstep and rng.random() < 0.05:
        changes["non_finite"] = (
            (rng.randrange(scenario.racks), rng.randint(2, min(scenario.steps))),
        )
    elif not scenario.lockstep:
        changes["faults"] = (*faults, *_spoilt(scenario))
    changes["records_kept"] = _kept(seed)
    return dataclasses.replace(scenario, **changes)  # type: ignore[arg-type]


def _workload(seed: int, rng: random.Random) -> Scenario:
    racks = rng.choice((2, 2, 2, 2, 3, 3, 3, 4))
    ranks = rng.choice((1, 1, 1, 1, 2)) if racks < 4 else 1
    period = rng.choice((3, 4, 6))
    lockstep = rng.random() < 0.15
    base_ns = rng.choice((20, 50, 100)) * MS
    equal = lockstep or rng.random() < 0.5
    steps = rng.randint(2 * period, 5 * period // 2)
    uneven = not lockstep and rng.random() < 0.3
    calm_net = rng.random() < 0.4
    return Scenario(
        seed=seed,
        racks=racks,
        ranks=ranks,
        witness=rng.random() < 0.5,
        fragments=rng.choice((1, 1, 1, 2, 2, 3)),
        numel=rng.choice((3, 8, 17)),
        period_steps=period,
        overlap_steps=rng.choice((0, 1, period // 2, period - 1)),
        overlap_ramp=(0, 2)[seed // 3 % 2],
        steps=tuple(steps + (rng.randint(0, period) if uneven else 0) for _ in range(racks)),
        step_ns=tuple(
            base_ns if equal else base_ns * rng.choice((1, 1, 2, 3)) for _ in range(racks)
        ),
        k=rng.randint(1, racks),
        grace_ns=rng.choice((-1, -1, 0, 50 * MS, 400 * MS)),
        lockstep=lockstep,
        overlapped=rng.random() < 0.8,
        apply_mode=rng.choice(APPLY_MODES),
        payload=_payload(seed, rng.choice(("float32", "float32", LOSSY[seed // 2 % len(LOSSY)]))),
        momentum=rng.choice((0.0, 0.0, 0.5)),
        ramp=(0, 1, 3)[seed % 3],
        staleness_max_rounds=rng.choice((0, 1, 2, 2)),
        delay_ns=rng.choice((1, 5, 40)) * MS,
        jitter_ns=0 if calm_net else rng.choice((0, 2, 60)) * MS,
        loss=0.0 if calm_net else rng.choice((0.0, 0.0, 0.02, 0.2)),
        duplicate=0.0 if calm_net else rng.choice((0.0, 0.1)),
        byte_ns=rng.choice((0, 10_000, 300_000)),
        merge="rda" if rng.random() < 0.25 else "mean",
        shutdown_ns=SHUTDOWN_NS,
    )


def _payload(seed: int, drawn: str) -> str:
    return SELDOM[seed // 16 % len(SELDOM)] if seed % 16 == 7 else drawn


def _fit(scenario: Scenario, fixed: dict[str, Any], rng: random.Random) -> Scenario:
    """Set the fixed fields, and draw steps and speeds that fit the racks and the period."""
    racks = fixed.get("racks", scenario.racks)
    period = fixed.get("period_steps", scenario.period_steps)
    longest = max((period, *fixed.get("moments", ())))
    if racks != scenario.racks:
        fixed.setdefault("step_ns", tuple(rng.choices(scenario.step_ns, k=racks)))
    if racks != scenario.racks or period != scenario.period_steps:
        fixed.setdefault("steps", (rng.randint(2 * longest, 3 * longest),) * racks)
    fixed.setdefault("k", min(scenario.k, racks))
    fixed.setdefault("overlap_steps", min(scenario.overlap_steps, period - 1))
    return dataclasses.replace(scenario, **fixed)


def _fault(kind: str, scenario: Scenario, rng: random.Random) -> Fault:
    """Draw a fault of a kind. Some faults wait for a message instead of a time."""
    length_ns, targets = scenario.length_ns, scenario.targets
    begin_ns = rng.randint(0, length_ns)
    end_ns = begin_ns + rng.randint(50 * MS, max(3 * SECOND, length_ns // 2))
    amount = rng.choice(AMOUNTS.get(kind, (0,)))
    a, b = rng.sample(targets, 2)
    if kind == "partition":
        racks = tuple(sorted(rng.sample(targets, rng.randint(1, max(1, len(targets) // 2)))))
        return Fault(kind, begin_ns, end_ns, racks=racks)
    if kind in ANYWHERE and rng.random() < 0.5:
        return Fault(kind, begin_ns, end_ns, amount=amount)
    if kind not in BETWEEN:
        b = -1
    if kind in AT_RACKS and a == WITNESS_TARGET:
        a = rng.randrange(scenario.racks)
    if kind == "crash":
        end_ns = FOR_EVER
        if scenario.ranks > 1 and a != WITNESS_TARGET and rng.random() < 0.5:
            b, amount = rng.randrange(scenario.ranks), rng.choice((10, 500, 3_000)) * MS
    fault = Fault(kind, begin_ns, end_ns, a, b, amount=amount)
    return _behind_a_message(fault, rng) if rng.random() < 0.3 else fault


def _spoilt(scenario: Scenario) -> list[Fault]:
    """In one seed of twenty a rack offers NaN or huge values; from a generator of its own."""
    rng = random.Random(scenario.seed ^ 0xBAD)
    if rng.random() >= 0.05:
        return []
    begin_ns = rng.randint(0, scenario.length_ns // 2)
    end_ns = begin_ns + rng.choice((200 * MS, SECOND, 10 * SECOND))
    return [Fault(rng.choice(list(SPOILT)), begin_ns, end_ns, rng.randrange(scenario.racks))]


def _kept(seed: int) -> int:
    """In one seed of five logs are so short that a rack that lags gets snapshots."""
    rng = random.Random(seed ^ 0x5A)
    return 3 if rng.random() < 0.2 else RECORDS_KEPT


def _behind_a_message(fault: Fault, rng: random.Random) -> Fault:
    nth = rng.choice((1, 2, 3, rng.randint(4, 60)))
    return dataclasses.replace(fault, after=rng.choice(MESSAGES), nth=nth)


# ------------------------------------------------------------------ plots


def _plot(scenario: Scenario, rng: random.Random) -> list[Fault]:
    plot = rng.choice(CALM_PLOTS if scenario.lockstep else PLOTS)
    return plot(scenario, rng)


def _beheaded(scenario: Scenario, rng: random.Random) -> list[Fault]:
    """The coordinator fails right after one of its orders; its successor perhaps soon after."""
    head = scenario.founder
    kind = rng.choice(("crash", "crash", "restart", "restart", "freeze"))
    length_ns = rng.randint(500 * MS, 4 * SECOND)
    after = rng.choice(("Orders", "Orders", "Report" if head == 0 else "Orders"))
    end_ns = FOR_EVER if kind == "crash" else length_ns
    faults = [Fault(kind, 0, end_ns, head, after=after, nth=rng.randint(2, 80))]
    if rng.random() < 0.4:
        heir = 0 if head == WITNESS_TARGET else 1
        kind = rng.choice(("restart", "freeze"))
        nth, after = rng.choice((1, 2, 5)), rng.choice(("Prepare", "Orders", "Vote"))
        faults.append(Fault(kind, 200 * MS, 200 * MS + length_ns, heir, after=after, nth=nth))
    return faults


def _quarrel(scenario: Scenario, rng: random.Random) -> list[Fault]:
    """Several different partitions, with hardly any time between them."""
    targets, faults, now_ns = scenario.targets, [], rng.randint(0, scenario.length_ns // 2)
    for _ in range(rng.randint(2, 4)):
        racks = tuple(sorted(rng.sample(targets, rng.randint(1, max(1, len(targets) - 1)))))
        length_ns = rng.randint(300 * MS, 3_500 * MS)
        faults.append(Fault("partition", now_ns, now_ns + length_ns, racks=racks))
        now_ns += length_ns + rng.choice((0, 20 * MS, 600 * MS))
    return faults


def _deaf(scenario: Scenario, rng: random.Random) -> list[Fault]:
    """Right after one message its sender becomes mute, or is cut off."""
    targets = scenario.targets
    a = rng.choice(targets)
    after, nth = rng.choice(MESSAGES), rng.randint(1, 40)
    length_ns = rng.randint(200 * MS, 4 * SECOND)
    if rng.random() < 0.5:
        return [Fault("cut", 0, length_ns, a, b, after=after, nth=nth) for b in targets if b != a]
    return [Fault("partition", 0, length_ns, a, racks=(a,), after=after, nth=nth)]


def _comings_and_goings(scenario: Scenario, rng: random.Random) -> list[Fault]:
    """Racks are started again one after the other, some twice."""
    targets, faults, now_ns = scenario.targets, [], rng.randint(0, scenario.length_ns)
    for _ in range(rng.randint(2, 3)):
        length_ns = rng.randint(50 * MS, 3 * SECOND)
        faults.append(Fault("restart", now_ns, now_ns + length_ns, rng.choice(targets)))
        now_ns += rng.choice((10 * MS, 400 * MS, 3 * SECOND))
    return faults


def _laggard(scenario: Scenario, rng: random.Random) -> list[Fault]:
    """One rack sleeps through several rounds, comes back to a slow link with wrong bits in it."""
    a = rng.randrange(scenario.racks)
    begin_ns = rng.randint(0, scenario.length_ns // 2)
    end_ns = begin_ns + rng.randint(SECOND, 4 * SECOND)
    b = rng.choice([each for each in range(scenario.racks) if each != a])
    return [
        Fault("freeze", begin_ns, end_ns, a),
        Fault("slow_link", begin_ns, end_ns + 2 * SECOND, a, b, amount=200 * MS),
        Fault("flip_bytes", begin_ns, end_ns + 2 * SECOND, b, amount=50),
    ]


Plot = Callable[[Scenario, random.Random], list[Fault]]
PLOTS: tuple[Plot, ...] = (_beheaded, _beheaded, _quarrel, _deaf, _comings_and_goings, _laggard)
CALM_PLOTS: tuple[Plot, ...] = (_quarrel, _deaf, _laggard)
"""Plots without the permanent loss of a rack or the witness."""
