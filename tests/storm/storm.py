"""A small job of real processes, and faults drawn from a seed that are done to it.

A seed repeats the scenario, not its timing: racks are processes, and the machine has other work.
What can be done to a job is in `kinds`.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mend import newest_checkpoint
from mend.coordination.ending import END_REPEATED_NS
from mend.tools.keys_command import create
from mend.tools.ports import free_ports
from mend.types import SECOND
from tests.process.racks import Forked, Job, Nursery, Siblings, Torchrun
from tests.storm import network
from tests.storm.judge import DETECT_S, Death, Life, judge, last_versions, read_lines

if TYPE_CHECKING:
    from tests.storm.kinds import Kind

CONFIG: dict[str, Any] = {
    "fragments": 2, "sync_period_steps": 8, "overlap_steps": 2, "stall_max_s": 0.1,
    "seat_timeout_s": 20, "outer_ramp_rounds": 200, "start_timeout_s": 60, "shutdown_timeout_s": 30,
}  # fmt: skip
"""`seat_timeout_s` is longer than TCP waits before it sends again behind a cut of HOLD_MS_MAX: a
rack that lost its seat meanwhile could only be started again. Momentum rises slowly, as the racks
merge every few steps and would diverge."""
PACE_MS = 10.0
HOLD_MS = (50, 3000)
"""Of a pause, and of a link that is cut, slow or lossy; 2 s is the silence after which a rack is
not waited for."""
MOMENT_MS = (0, 400)
"""From the begin of something to the death in it."""
END_MS = (0, 80)
"""From the end of training to a pause: most jobs have ended a moment later."""
FAULTS_MAX = 3
GAP_STEPS = (5, 60)
"""Of the rack that is hit, between two faults."""
SETTLE_STEPS = 30
"""What every living rack still trains behind the last fault."""
WAIT_S = 60.0
"""For a start, for steps, and for each end; reaching it is a finding."""
POLL_S = 0.01
SLEEP_MS = (100, 14_000)
"""Of a pause while the others end, who wait 6 s for a rack that is silent."""
INIT_DEATHS, SHUTDOWN_DEATHS, SLEEPERS, LINKED, RANKED = 0.15, 0.2, 0.3, 0.4, 0.3
"""Shares of the seeds: with a death in mend_init, in the shutdown, with a rack that sleeps in the
shutdown where none dies in it, over links, with two ranks."""
PORT = 21_900
"""In a network namespace every port is free."""

Process = Forked | Siblings | Torchrun


@dataclass(frozen=True)
class Fault:
    """`kind` is done to `rack` once that has made `steps` steps more; `ms`: how long, or when."""

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
    linked: bool = False
    """Over links that can be cut; else on the loopback interface."""
    parallel: str = "ddp"
    voters_lost: int = 0
    """Deaths that nothing has made good: a second one may take the quorum."""

    def __str__(self) -> str:
        witness = " + witness" if self.witness else ""
        ranks = f" of {self.ranks} ranks ({self.parallel})" if self.ranks > 1 else ""
        return f"{self.racks} racks{witness}{ranks}{' over links' if self.linked else ''}"


class Stuck(Exception):
    """Something that a storm waited for did not come."""


class Storm:
    """One seed, from the start of its processes to the last one's end."""

    def __init__(
        self, seed: int, folder: Path, nursery: Nursery, kinds: dict[str, Kind], *,
        links: bool = False,
    ) -> None:  # fmt: skip
        """`links`: whether this machine lets us make some."""
        self._rng, self.kinds = random.Random(f"storm {seed}"), kinds
        self.shape = drawn_shape(self._rng, links)
        self._ends = self._rng.random() < INIT_DEATHS, self._rng.random() < SHUTDOWN_DEATHS
        self._end_rng = random.Random(f"end of storm {seed}")
        keyed = seed % 2 == 1 or self.shape.linked
        self.shown = f"{self.shape}{' with a key' if keyed else ''}"
        self.folder, self.stop = folder, folder / "stop"
        folder.mkdir(parents=True)
        if keyed:
            create(folder / "key", (seed.to_bytes(32),))
        self.network: network.Network | None = None
        self.job = self._made(seed, folder / "key" if keyed else None, nursery)
        self.lives: dict[tuple[int, int], Process] = {}
        self.dead: dict[tuple[int, int], bool] = {}
        """Lives that were killed -> whether their last commits may be undone."""
        self.eras: dict[tuple[int, int], int] = {}
        self.era = 0
        """How often all racks were dead: behind that another job begins."""
        self.deaths: list[Death] = []
        self.paused: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.done: list[Fault] = []
        self.judged: list[Life] = []
        self.witness_killed = False
        self.led = self.founder
        """Who coordinates; None: not known any more."""

    def _made(self, seed: int, key_file: Path | None, nursery: Nursery) -> Job:
        shape, sites = self.shape, list[tuple[str, str]]()
        ports = free_ports(2 * shape.racks + 1)
        if shape.linked:
            self.network = network.Network(shape.racks + 1, seed)
            sites = list(zip(self.network.namespaces, self.network.hosts, strict=True))
            ports = [PORT + place for place in range(len(ports))]
        return Job(
            nursery, self.folder, ports, racks=shape.racks, ranks=shape.ranks,
            witness=shape.witness, name=f"storm-{seed}", torchrun=False, key_file=key_file,
            sites=sites,
        )  # fmt: skip

    @property
    def founder(self) -> int | None:
        return -1 if self.shape.witness else 0

    # -------------------------------------------------------------- a seed

    def run(self) -> list[str]:
        """Returns the findings."""
        found: list[str] = []
        try:
            self._begin()
            for _ in range(self._rng.randint(1, FAULTS_MAX)):
                self._hit()
            self.train(SETTLE_STEPS)
            self.stop.touch()
            if self._ends[1]:
                self._die_at_the_end()
            elif self._end_rng.random() < SLEEPERS:
                self._sleep_at_the_end()
        except Stuck as stuck:
            found.append(str(stuck))
        finally:
            self.stop.touch()
            codes = {key: self._ended(process) for key, process in self.lives.items()}
            found += self._witness_ended()
            self.job.close()
            if self.network is not None:
                self.network.close()
        self.judged = [life for key in self.lives for life in self._told(key, codes[key])]
        return found + judge(self.judged, self.deaths)

    def _begin(self) -> None:
        for rack in range(self.shape.racks):
            self.start(rack)
        if self._ends[0]:
            rack, ms = self._rng.randrange(self.shape.racks), self._rng.randint(*MOMENT_MS)
            time.sleep(ms / 1000)  # this is the moment; nothing is awaited
            self.kill(rack)
            self.done.append(Fault("init-death", rack, 0, ms))
            self.start(rack)
        self.train(1)

    def _hit(self) -> None:
        """Draw a fault that this job must survive, and do it."""
        shape = self.shape
        may = [(name, rack) for name, kind in self.kinds.items() for rack in kind.whom(shape)]
        if not may:
            return
        name = self._rng.choice(sorted({name for name, _ in may}))
        rack = self._rng.choice([rack for each, rack in may if each == name])
        steps, kind = self._rng.randint(*GAP_STEPS), self.kinds[name]
        fault = Fault(name, rack, steps, self._rng.randint(*kind.ms) if kind.ms else 0)
        self.train(steps, [rack] if rack >= 0 else None)
        self.done.append(fault)
        kind.do(self, fault)

    def _die_at_the_end(self) -> None:
        """A rack that the others can do without, while all end."""
        from tests.storm.kinds import survivable

        racks = survivable(self.shape)
        if not racks:
            return
        rack, ms = self._rng.choice(racks), self._rng.randint(*MOMENT_MS)
        time.sleep(ms / 1000)  # this is the moment; nothing is awaited
        if self.lives[rack, self._newest(rack)].code is None:
            self.kill(rack)
            self.done.append(Fault("shutdown-death", rack, 0, ms))

    def _sleep_at_the_end(self) -> None:
        """A rack stands still while the others end, and goes on before or after they have."""
        from tests.storm.kinds import survivable

        racks = survivable(self.shape)
        if not racks:
            return
        rack, ms = self._end_rng.choice(racks), self._end_rng.randint(*SLEEP_MS)
        time.sleep(self._end_rng.randint(*END_MS) / 1000)  # this is the moment; nothing is awaited
        if self.lives[rack, self._newest(rack)].code is None:
            self.pause(rack, ms)
            self.done.append(Fault("shutdown-pause", rack, 0, ms))

    def _told(self, key: tuple[int, int], code: int | None) -> list[Life]:
        rack, life = key
        return [
            Life(
                rack=rack, life=life, rank=rank, lines=read_lines(self.diary(rack, life, rank)),
                code=code, killed=key in self.dead, undoable=self.dead.get(key, False),
                era=self.eras[key], paused=tuple(self.paused.get(key, ())),
            )
            for rank in range(self.job.ranks)
        ]  # fmt: skip

    # -------------------------------------------------------------- what faults are made of

    def start(self, rack: int, resume: Path | None = None) -> None:
        """One more life of a rack; returns at once."""
        life = self._newest(rack) + 1
        name = f"rack{rack}-life{life}"
        self.eras[rack, life] = self.era
        self.lives[rack, life] = self.job.start(
            rack, script="tests.storm.script", name=name, stop=str(self.stop), pace_ms=PACE_MS,
            config=CONFIG, parallel=self.shape.parallel, resume=str(resume or ""),
            env={"GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip

    def kill(self, rack: int, *, undoable: bool = False) -> None:
        """The hard way, all its ranks."""
        key = rack, self._newest(rack)
        process = self.lives[key]
        process.signal(signal.SIGKILL)
        self.until(lambda: process.code is not None, f"rack {rack} dies")
        if isinstance(process, Siblings):
            process.kill()
        # Two racks without a witness: what rack 0 decided alone dies with it.
        alone = self.shape.racks == 2 and not self.job.witness_address and rack == 0
        self.dead[key] = undoable or alone

    def kill_rank(self, rack: int) -> None:
        """One rank; the others of its rack fail at their next collective, or are ended."""
        process = self.lives[rack, self._newest(rack)]
        assert isinstance(process, Siblings)
        self._rng.choice(process.ranks).signal(signal.SIGKILL)
        with contextlib.suppress(Stuck):
            self.until(lambda: all(r.code is not None for r in process.ranks), "", limit_s=10)
        self.kill(rack)

    def all_die(self) -> None:
        """And all are started again, from the newest checkpoint if there is one."""
        for rack in sorted(self.shape.alive):
            self.kill(rack, undoable=True)
        self.era += 1
        self.led = self.founder
        cuts = self.folder / "cuts"
        resume = newest_checkpoint(cuts) if cuts.exists() else None
        for rack in sorted(self.shape.alive):
            self.start(rack, resume)
        self.train(1)

    def commits_again(self, kind: str, gone: Iterable[int], at_ns: int) -> None:
        """Wait for the first commit behind the time-out, which the judge will hold to its bound."""
        racks = sorted(self.shape.alive - set(gone))
        lives = [(rack, self._newest(rack)) for rack in racks]
        led = self.led in gone
        self.led = None if led else self.led
        self.deaths.append(Death(kind, at_ns, tuple(lives), led or self.led is None))
        noticed_s = at_ns / 1e9 + DETECT_S
        self.until(lambda: time.monotonic() > noticed_s, "time passes")
        before = {life: self._versions(life) for life in lives}
        self.until(
            lambda: any(self._versions(life) > before[life] for life in lives),
            f"a commit behind {kind}({sorted(gone)})",
        )

    def pause(self, rack: int, ms: int) -> None:
        key = rack, self._newest(rack)
        began_ns = time.monotonic_ns()
        self.lives[key].signal(signal.SIGSTOP)
        time.sleep(ms / 1000)  # this long is the fault; nothing is awaited
        self.lives[key].signal(signal.SIGCONT)
        self.paused.setdefault(key, []).append((began_ns, time.monotonic_ns()))
        self.forget_leader(rack)

    def link(self, rack: int, ms: int, how: dict[str, Any], *, out: bool, back: bool) -> None:
        """The link of a rack is so for a while, in one direction or both."""
        assert self.network is not None
        pairs = self.network.from_(rack) * out + self.network.to(rack) * back
        self.network.put(pairs, how)
        time.sleep(ms / 1000)  # this long is the fault; nothing is awaited
        self.network.put(pairs, network.CALM)
        self.forget_leader(rack)

    def forget_leader(self, rack: int) -> None:
        """It was silent, perhaps for long enough that another one took over."""
        self.led = None if self.led == rack else self.led

    def ask_for_cut(self) -> str:
        number = len(list(self.folder.glob("ask-*"))) + 1
        (self.folder / f"ask-{number}").touch()
        return f"cut-{number}"

    def has_cut(self, name: str, racks: Iterable[int]) -> None:
        """Wait until these have ended that checkpoint, well or not."""
        for rack in racks:
            path = self.diary(rack, self._newest(rack), 0)
            self.until(
                lambda path=path: any(line.get("name") == name for line in read_lines(path)),
                f"rack {rack} ends checkpoint {name}",
            )

    def joined(self, rack: int) -> None:
        """Wait until the newest life of a rack trains."""
        self.train(1, [rack])

    def kill_witness(self) -> None:
        assert self.job.witness is not None
        self.witness_killed = True
        self.job.witness.kill()

    def start_witness(self) -> None:
        self.job.start_witness()
        self.witness_killed = False

    # -------------------------------------------------------------- waiting

    def train(self, steps: int, racks: list[int] | None = None) -> None:
        """Until these racks (None: all that live) have made so many steps more."""
        who = sorted(self.shape.alive) if racks is None else racks
        goals = {rack: self._steps(rack) + steps for rack in who}
        for rack, goal in goals.items():
            key = rack, self._newest(rack)
            self.until(
                lambda rack=rack, goal=goal, key=key: (
                    self._steps(rack) >= goal or self.lives[key].code is not None
                ),
                f"rack {rack} life {key[1]} makes {steps} steps more",
            )
            if self.lives[key].code is not None:
                raise Stuck(f"rack {rack} life {key[1]} ended before it had made {steps} steps")

    def until(self, ready: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
        limit = time.monotonic() + limit_s
        while not ready():
            if time.monotonic() > limit:
                raise Stuck(f"not within {limit_s:g} s: {what}")
            time.sleep(POLL_S)

    def _ended(self, process: Process, limit_s: float = WAIT_S) -> int | None:
        try:
            self.until(lambda: process.code is not None, "the end", limit_s)
        except Stuck:
            process.kill()
            return None
        return process.code

    def _witness_ended(self) -> list[str]:
        """It leaves by itself: at once where every rack that founded, or took a seat, has left in
        order; else later, to tell those that were missing."""
        witness = self.job.witness
        if witness is None or self.witness_killed:
            return []
        code = self._ended(witness, WAIT_S + END_REPEATED_NS / SECOND)
        return [] if code == 0 else [f"the witness ended with {code}"]

    def _newest(self, rack: int) -> int:
        return max((life for r, life in self.lives if r == rack), default=-1)

    def _steps(self, rack: int) -> int:
        """Lines of its newest life that tell of a step."""
        lines = read_lines(self.diary(rack, self._newest(rack), 0))
        return sum(line["kind"] == "step" for line in lines)

    def versions(self, rack: int) -> int:
        """Merges that its newest life has seen."""
        return self._versions((rack, self._newest(rack)))

    def _versions(self, key: tuple[int, int]) -> int:
        return last_versions(read_lines(self.diary(*key, 0)))

    def diary(self, rack: int, life: int, rank: int) -> Path:
        return self.folder / f"rack{rack}-life{life}-rank{rank}.json"


def drawn_shape(rng: random.Random, links: bool) -> Shape:
    racks, witness = rng.choice((2, 2, 3, 4)), rng.random() < 0.5
    ranks = 2 if rng.random() < RANKED and racks == 2 else 1
    parallel = rng.choice(("ddp", "fsdp2"))
    linked = rng.random() < LINKED and links
    return Shape(racks, ranks, witness, set(range(racks)), linked, parallel)
