"""A small job of real processes, and faults drawn from a seed that are done to it.

A seed repeats the scenario, not its timing: racks are processes, and the machine has other work.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mend.tools.keys_command import create
from mend.tools.ports import free_ports
from tests.process.racks import Forked, Job, Nursery, Siblings, Torchrun
from tests.storm.judge import Life, judge, read_lines

CONFIG: dict[str, Any] = {
    "fragments": 2,
    "sync_period_steps": 8,
    "overlap_steps": 2,
    "stall_max_s": 0.2,
    "evict_s": 6,
    "shutdown_timeout_s": 30,
}
PACE_MS = 10.0
PAUSE_MS_MAX = 3000
"""Longer than the silence after which a rack is not waited for (2 s), and shorter than `evict_s`:
a rack that lost its seat while it was frozen could only be started again."""
FAULTS_MAX = 3
GAP_STEPS = (5, 60)
"""Of the rack that is hit, between two faults."""
SETTLE_STEPS = 30
"""What every living rack still trains behind the last fault."""
WAIT_S = 60.0
"""For a start, for steps, and for each end; reaching it is a finding."""
POLL_S = 0.01

Process = Forked | Siblings | Torchrun


@dataclass(frozen=True)
class Fault:
    """`kind` is done to `rack` once that has made `steps` steps more; `ms`: how long, if at all."""

    kind: str
    rack: int
    steps: int
    ms: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.rack}{f', {self.ms} ms' if self.ms else ''})+{self.steps}"


@dataclass
class Shape:
    """A job, and what the faults drawn so far leave of it."""

    racks: int
    ranks: int
    witness: bool
    alive: set[int]
    voters_lost: int = 0
    """Deaths that nothing has made good: a second one may take the quorum."""

    def __str__(self) -> str:
        witness = " + witness" if self.witness else ""
        return f"{self.racks} racks{witness}{f' of {self.ranks} ranks' if self.ranks > 1 else ''}"


@dataclass(frozen=True)
class Kind:
    """What may be done to whom. `on`: whether seeds draw it unless a caller says which ones."""

    whom: Callable[[Shape], list[int]]
    """Racks that it may hit now; [-1]: no rack in particular; empty: not now."""
    after: Callable[[Shape, int], None]
    """Keeps the shape up to date."""
    do: Callable[[Storm, Fault], None]
    on: bool = True


class Stuck(Exception):
    """Something that a storm waited for did not come."""


class Storm:
    """One seed, from the start of its processes to the last one's end."""

    def __init__(
        self, seed: int, folder: Path, nursery: Nursery, kinds: dict[str, Kind] | None = None
    ) -> None:
        self._rng = random.Random(f"storm {seed}")
        self.kinds = kinds if kinds is not None else usual()
        self.shape = drawn_shape(self._rng)
        keyed = seed % 2 == 1
        self.shown = f"{self.shape}{' with a key' if keyed else ''}"
        self.folder, self.stop = folder, folder / "stop"
        folder.mkdir(parents=True)
        shape = self.shape
        if keyed:
            create(folder / "key", (seed.to_bytes(32),))
        self.job = Job(
            nursery, folder, free_ports(2 * shape.racks + 1), racks=shape.racks,
            ranks=shape.ranks, witness=shape.witness, name=f"storm-{seed}", torchrun=False,
            key_file=folder / "key" if keyed else None,
        )  # fmt: skip
        self.lives: dict[tuple[int, int], Process] = {}
        self.dead: dict[tuple[int, int], bool] = {}
        """Lives that were killed -> whether their last commits may be undone."""
        self.done: list[Fault] = []
        self.witness_killed = False

    # -------------------------------------------------------------- a seed

    def run(self) -> list[str]:
        """Returns the findings."""
        found: list[str] = []
        try:
            for rack in range(self.shape.racks):
                self.start(rack)
            self._train(1)
            for _ in range(self._rng.randint(1, FAULTS_MAX)):
                self._hit()
            self._train(SETTLE_STEPS)
        except Stuck as stuck:
            found.append(str(stuck))
        finally:
            self.stop.touch()
            codes = {key: self._ended(process) for key, process in self.lives.items()}
            found += self._witness_ended()
            self.job.close()
        return found + judge([life for key in self.lives for life in self._told(key, codes[key])])

    def _hit(self) -> None:
        """Draw a fault that this job must survive, and do it."""
        shape = self.shape
        may = [(name, rack) for name, kind in self.kinds.items() for rack in kind.whom(shape)]
        if not may:
            return
        name = self._rng.choice(sorted({name for name, _ in may}))
        rack = self._rng.choice([rack for each, rack in may if each == name])
        steps, ms = self._rng.randint(*GAP_STEPS), self._rng.randint(50, PAUSE_MS_MAX)
        fault = Fault(name, rack, steps, ms if name == "pause" else 0)
        self._train(steps, [rack] if rack >= 0 else None)
        self.kinds[name].do(self, fault)
        self.kinds[name].after(shape, rack)
        self.done.append(fault)

    def _told(self, key: tuple[int, int], code: int | None) -> list[Life]:
        rack, life = key
        return [
            Life(
                rack=rack, life=life, rank=rank, lines=read_lines(self.diary(rack, life, rank)),
                code=code, killed=key in self.dead, undoable=self.dead.get(key, False),
            )
            for rank in range(self.job.ranks)
        ]  # fmt: skip

    # -------------------------------------------------------------- what faults are made of

    def start(self, rack: int) -> None:
        """One more life of a rack; returns at once."""
        life = self._newest(rack) + 1
        name = f"rack{rack}-life{life}"
        self.lives[rack, life] = self.job.start(
            rack, script="tests.storm.script", name=name, stop=str(self.stop), pace_ms=PACE_MS,
            config=CONFIG,
        )  # fmt: skip

    def kill(self, rack: int) -> None:
        """The hard way, all its ranks."""
        key = rack, self._newest(rack)
        process = self.lives[key]
        process.signal(signal.SIGKILL)
        self._until(lambda: process.code is not None, f"rack {rack} dies")
        # Two racks without a witness: what rack 0 decided alone dies with it.
        self.dead[key] = self.shape.racks == 2 and not self.job.witness_address and rack == 0

    def pause(self, rack: int, ms: int) -> None:
        process = self.lives[rack, self._newest(rack)]
        process.signal(signal.SIGSTOP)
        time.sleep(ms / 1000)  # this long is the fault; nothing is awaited
        process.signal(signal.SIGCONT)

    def joined(self, rack: int) -> None:
        """Wait until the newest life of a rack trains."""
        self._train(1, [rack])

    def kill_witness(self) -> None:
        assert self.job.witness is not None
        self.witness_killed = True
        self.job.witness.kill()

    # -------------------------------------------------------------- waiting

    def _train(self, steps: int, racks: list[int] | None = None) -> None:
        """Until these racks (None: all that live) have made so many steps more."""
        who = sorted(self.shape.alive) if racks is None else racks
        goals = {rack: self._steps(rack) + steps for rack in who}
        for rack, goal in goals.items():
            key = rack, self._newest(rack)
            self._until(
                lambda rack=rack, goal=goal, key=key: (  # type: ignore[misc]
                    self._steps(rack) >= goal or self.lives[key].code is not None
                ),
                f"rack {rack} life {key[1]} comes to step {goal}",
            )
            if self.lives[key].code is not None:
                raise Stuck(f"rack {rack} life {key[1]} ended before step {goal}")

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + WAIT_S
        while not ready():
            if time.monotonic() > limit:
                raise Stuck(f"not within {WAIT_S:g} s: {what}")
            time.sleep(POLL_S)

    def _ended(self, process: Process) -> int | None:
        try:
            self._until(lambda: process.code is not None, "the end")
        except Stuck:
            process.kill()
            return None
        return process.code

    def _witness_ended(self) -> list[str]:
        """It leaves by itself where every rack that founded, or took a seat, has left in order."""
        witness = self.job.witness
        if witness is None or self.witness_killed:
            return []
        code = self._ended(witness)
        return [] if code == 0 else [f"the witness ended with {code}"]

    def _newest(self, rack: int) -> int:
        return max((life for r, life in self.lives if r == rack), default=-1)

    def _steps(self, rack: int) -> int:
        """Of its newest life."""
        lines = read_lines(self.diary(rack, self._newest(rack), 0))
        return max((line.get("step", 0) for line in lines), default=0)

    def diary(self, rack: int, life: int, rank: int) -> Path:
        return self.folder / f"rack{rack}-life{life}-rank{rank}.json"


def drawn_shape(rng: random.Random) -> Shape:
    racks = rng.choice((2, 2, 3))
    ranks = 2 if racks == 2 and rng.random() < 0.15 else 1
    return Shape(racks, ranks, rng.random() < 0.5, set(range(racks)))


# ------------------------------------------------------------------ the kinds


def _survivable(shape: Shape) -> list[int]:
    """Racks without which the others decide on: see the table of docs/protocol.md. Not the death
    of rack 0 beside two racks and a witness, which stops commits until it is back."""
    if shape.voters_lost or len(shape.alive) < 2:
        return []
    if shape.racks == 2:
        return sorted(shape.alive) if shape.witness else [1]
    return [1, 2] if shape.witness else sorted(shape.alive)


def _not_the_founder(shape: Shape) -> list[int]:
    """A founder that is started again could found a second job."""
    return [rack for rack in _survivable(shape) if shape.witness or rack != 0]


def _lost(shape: Shape, rack: int) -> None:
    shape.alive.discard(rack)
    shape.voters_lost += 1


def _nothing(shape: Shape, rack: int) -> None:
    """As before."""


def _witness_lost(shape: Shape, _: int) -> None:
    shape.witness = False
    shape.voters_lost += 1


def _kill(storm: Storm, fault: Fault) -> None:
    storm.kill(fault.rack)


def _restart(storm: Storm, fault: Fault) -> None:
    storm.kill(fault.rack)
    storm.start(fault.rack)
    storm.joined(fault.rack)


def _pause(storm: Storm, fault: Fault) -> None:
    storm.pause(fault.rack, fault.ms)


def _kill_witness(storm: Storm, _: Fault) -> None:
    storm.kill_witness()


def _restart_witness(storm: Storm, _: Fault) -> None:
    storm.kill_witness()
    storm.job.start_witness()
    storm.witness_killed = False


def _deaths(storm: Storm, fault: Fault) -> None:
    two = sorted(storm.shape.alive, key=lambda rack: (rack - fault.rack) % storm.shape.racks)[:2]
    for rack in two:
        storm.kill(rack)
    for rack in two:
        storm.start(rack)
    for rack in two:
        storm.joined(rack)


def _with_witness(shape: Shape) -> list[int]:
    whole = shape.witness and not shape.voters_lost and len(shape.alive) == shape.racks
    return [-1] if whole else []


def _three(shape: Shape) -> list[int]:
    return sorted(shape.alive) if len(shape.alive) > 2 and not shape.voters_lost else []


def _founder(shape: Shape) -> list[int]:
    return [0] if not shape.voters_lost and 0 in shape.alive else []


KINDS: dict[str, Kind] = {
    "kill": Kind(_survivable, _lost, _kill),
    "restart": Kind(_not_the_founder, _nothing, _restart),
    "pause": Kind(lambda shape: sorted(shape.alive), _nothing, _pause),
    "kill-witness": Kind(_with_witness, _witness_lost, _kill_witness),
    # Known to fail; to be switched on with what mends it.
    "restart-founder": Kind(_founder, _nothing, _restart, on=False),
    "two-deaths": Kind(_three, _nothing, _deaths, on=False),
    "restart-witness": Kind(_with_witness, _nothing, _restart_witness, on=False),
}


def usual() -> dict[str, Kind]:
    return {name: kind for name, kind in KINDS.items() if kind.on}
