"""sim.scenario: one seed -> a topology, a workload and a list of faults.

Scenarios are drawn, not single events.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from mend.fragment.apply import Alignment
from mend.terms import MS, SECOND


@dataclass(frozen=True, slots=True)
class Fault:
    """From begin_ns until end_ns.

    kind: cut (a -> b silent), freeze, crash (rack or witness), slow_link.
    """

    kind: str
    begin_ns: int
    end_ns: int
    a: int
    b: int = -1


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a run depends on. Times in ns; `loss`, `duplicate`: probabilities per frame."""

    seed: int
    racks: int
    ranks: int
    witness: bool
    fragments: int
    numel: int
    period_steps: int
    overlap_steps: int
    steps: tuple[int, ...]
    step_ns: tuple[int, ...]
    k: int
    grace_ns: int
    lockstep: bool
    overlapped: bool
    alignment: Alignment
    payload: str
    momentum: float
    max_age: int
    delay_ns: int
    jitter_ns: int
    loss: float
    duplicate: float
    byte_ns: int
    non_finite: tuple[tuple[int, int], ...] = ()
    """(rack, step) whose update is NaN for one step and repaired at the next."""
    faults: tuple[Fault, ...] = field(default=())
    merge: str = "mean"

    def story(self) -> str:
        """The scenario in a few lines, for a person who has to find out what happened."""
        witness = " + witness" if self.witness else ""
        closing = "lockstep" if self.lockstep else f"grace {self.grace_ns}"
        lines = [
            f"seed {self.seed}: {self.racks} racks x {self.ranks} ranks{witness}, "
            f"P={self.fragments} H={self.period_steps} tau={self.overlap_steps} K={self.k} "
            f"max_age={self.max_age} {closing} {self.alignment} {self.payload} "
            f"{self.merge}",
            f"  steps {self.steps}, ms per step {[ns // MS for ns in self.step_ns]}, "
            f"frames: {self.delay_ns // MS} ms +- {self.jitter_ns // MS}, "
            f"loss {self.loss:.2f}, duplicates {self.duplicate:.2f}",
        ]
        for fault in self.faults:
            to = f" -> {fault.b}" if fault.b >= 0 else ""
            span = f"{fault.begin_ns / SECOND:.2f}..{fault.end_ns / SECOND:.2f} s"
            lines.append(f"  {span} {fault.kind} {fault.a}{to}")
        return "\n".join(lines)


WITNESS_TARGET = 99

RDA_SHARE = 0.3

ALIGNMENTS: tuple[Alignment, ...] = ("carry", "carry", "carry", "overwrite", "blend")


def draw(seed: int) -> Scenario:
    """The scenario of a seed.

    Small rosters and short runs: what goes wrong goes wrong with two racks.
    """
    rng = random.Random(seed)
    racks = rng.choice((2, 2, 2, 3, 3, 4))
    ranks = rng.choice((1, 1, 1, 2))
    witness = rng.random() < 0.6
    period = rng.choice((4, 6, 8))
    lockstep = rng.random() < 0.25
    base_ns = rng.choice((20, 50, 100)) * MS
    equal = lockstep or rng.random() < 0.5
    steps = rng.randint(2 * period, 3 * period)
    uneven = not lockstep and rng.random() < 0.3
    scenario = Scenario(
        seed=seed,
        racks=racks,
        ranks=ranks,
        witness=witness,
        fragments=rng.choice((1, 2, 3)),
        numel=rng.choice((3, 8, 17)),
        period_steps=period,
        overlap_steps=rng.choice((0, 1, period // 2, period - 1)),
        steps=tuple(steps + (rng.randint(0, period) if uneven else 0) for _ in range(racks)),
        step_ns=tuple(
            base_ns if equal else base_ns * rng.choice((1, 1, 2, 3)) for _ in range(racks)
        ),
        k=rng.randint(1, racks),
        grace_ns=rng.choice((-1, -1, 0, 50 * MS, 400 * MS)),
        lockstep=lockstep,
        overlapped=rng.random() < 0.8,
        alignment=rng.choice(ALIGNMENTS),
        payload=rng.choice(("float32", "float32", "bfloat16")),
        momentum=rng.choice((0.0, 0.0, 0.5)),
        max_age=rng.choice((0, 1, 2, 2)),
        delay_ns=rng.choice((1, 5, 40)) * MS,
        jitter_ns=rng.choice((0, 2, 60)) * MS,
        loss=rng.choice((0.0, 0.0, 0.02, 0.2)),
        duplicate=rng.choice((0.0, 0.0, 0.1)),
        byte_ns=rng.choice((0, 10_000, 300_000)),
        # A draw of its own: the other fields of a seed stay what they were.
        merge="rda" if random.Random(f"merge {seed}").random() < RDA_SHARE else "mean",
    )
    return _with_faults(scenario, rng)


def _with_faults(scenario: Scenario, rng: random.Random) -> Scenario:
    length_ns = max(n * ns for n, ns in zip(scenario.steps, scenario.step_ns, strict=True))
    faults: list[Fault] = []
    kinds = rng.sample(("cut", "freeze", "crash", "slow_link"), rng.choice((0, 1, 1, 2)))
    for kind in kinds:
        begin_ns = rng.randint(0, length_ns)
        end_ns = begin_ns + rng.randint(50 * MS, max(3 * SECOND, length_ns // 2))
        targets = [*range(scenario.racks), *([WITNESS_TARGET] if scenario.witness else [])]
        a = rng.choice(targets)
        if kind == "crash":
            if scenario.lockstep:
                continue
            end_ns = 1 << 62
        elif kind == "freeze" and a == WITNESS_TARGET:
            a = 0
        b = rng.choice([t for t in targets if t != a]) if kind in ("cut", "slow_link") else -1
        faults.append(Fault(kind, begin_ns, end_ns, a, b))
    non_finite: tuple[tuple[int, int], ...] = ()
    if not scenario.lockstep and rng.random() < 0.1:
        non_finite = ((rng.randrange(scenario.racks), rng.randint(2, min(scenario.steps))),)
    return dataclasses.replace(scenario, faults=tuple(faults), non_finite=non_finite)
