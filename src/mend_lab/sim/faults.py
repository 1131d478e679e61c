"""The kinds of faults, and the faults that are active now.

KINDS has one row per kind. To add a kind, add a row, and where it applies (network or process) a
query to `Broken` that counts in `felt`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mend.types import MS, SECOND, WITNESS
from mend_lab.sim.loop import Loop
from mend_lab.sim.scenario import FOR_EVER, WITNESS_TARGET, Fault, Scenario


def target(rack: int) -> int:
    return WITNESS_TARGET if rack == WITNESS else rack


def name_of(number: int) -> str:
    return "the witness" if number == WITNESS_TARGET else f"rack {number}"


class Kind(NamedTuple):
    """`says`: a sentence with the fields of the fault in braces. `lasts`: it has an end."""

    says: str
    lasts: bool = True


KINDS: dict[str, Kind] = {
    "cut": Kind("nothing reaches {b} from {a}"),
    "partition": Kind("{racks} cannot reach the others, nor they them"),
    "lossy": Kind("{amount} % of all frames between {where} are lost"),
    "shuffle": Kind("frames between {where} come up to {ms} ms late, out of order"),
    "slow_link": Kind("the link between {a} and {b} takes {ms} ms longer"),
    "freeze": Kind("{a} is frozen"),
    "slow_rack": Kind("{a} trains {amount} times as slowly"),
    "slow_worker": Kind("background jobs of {a} take up to {ms} ms longer"),
    "flip_bytes": Kind("{amount} % of the transfers from {a} have one wrong bit"),
    "flip_frames": Kind("{amount} % of the frames from {a} have one wrong bit"),
    "nan": Kind("{a} sends NaN, with right checksums"),
    "huge": Kind("{a} sends 1e30, with right checksums"),
    "clock_jump": Kind("the clock of {a} jumps {ms} ms ahead", lasts=False),
    "clock_drift": Kind("the clock of {a} runs {amount} ppm fast"),
    "crash": Kind("{who} crashes", lasts=False),
    "restart": Kind("{a} crashes, to be started again as a new process"),
    "retire": Kind("a person retires {a}, if it is dead", lasts=False),
    "stale": Kind("frames that find {a} dead wait for its next life"),
}


SPOILT = {"nan": math.nan, "huge": 1e30}


def what(fault: Fault) -> str:
    """The effect of a fault, without its times."""
    who = name_of(fault.a)
    if fault.kind == "crash" and fault.b >= 0:
        who = f"rank {fault.b} of {name_of(fault.a)}"
    return KINDS[fault.kind].says.format(
        a=name_of(fault.a),
        b=name_of(fault.b),
        who=who,
        racks=" and ".join(name_of(rack) for rack in fault.racks),
        where="all" if fault.a < 0 else f"{name_of(fault.a)} and {name_of(fault.b)}",
        amount=fault.amount,
        ms=fault.amount // MS,
    )


def sentence(fault: Fault, scenario: Scenario) -> str:
    """A sentence about one fault: its beginning, effect and end."""
    when = f"at {fault.begin_ns / SECOND:.2f} s"
    if fault.after:
        since = f" from {fault.begin_ns / SECOND:.2f} s on" if fault.begin_ns else ""
        when = f"right after {name_of(fault.a)} sent its {fault.after} number {fault.nth}{since}"
    if not KINDS[fault.kind].lasts:
        return f"{when} {what(fault)}"
    if fault.after and fault.end_ns < FOR_EVER:
        return f"{when} {what(fault)}, for {(fault.end_ns - fault.begin_ns) / SECOND:.2f} s"
    end_ns = scenario.end_of(fault)
    until = "for ever" if end_ns >= FOR_EVER else f"until {end_ns / SECOND:.2f} s"
    return f"{when} {what(fault)}, {until}"


@dataclass(frozen=True, slots=True)
class FaultActions:
    """The effects of faults on processes, which the world carries out."""

    crash: Callable[[Fault], None]
    restart: Callable[[Fault], None]
    freeze: Callable[[Fault, int], None]
    clock: Callable[[Fault, bool], None]
    retire: Callable[[Fault], None]


class Broken:
    """The active faults. `felt` counts how often each kind made a difference."""

    def __init__(self, loop: Loop, rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self.felt: Counter[str] = Counter()
        self.struck: list[tuple[int, str]] = []
        self.tell: Callable[[int, str], None] | None = None
        self.active: dict[str, list[Fault]] = {}
        self.quiet = False
        self._armed: list[tuple[Fault, int]] = []
        self._sent: Counter[tuple[int, str]] = Counter()

    def plan(self, scenario: Scenario, actions: FaultActions) -> None:
        """Put all faults on the clock."""
        self.scenario, self.actions = scenario, actions
        for fault in scenario.faults:
            assert fault.kind in KINDS, f"{fault.kind=} is not in KINDS"
            job = self._arm if fault.after else self._begin
            self.loop.at(fault.begin_ns, lambda job=job, fault=fault: job(fault))  # type: ignore[misc]
        if scenario.quiet_ns:
            self.loop.at(scenario.quiet_ns, self._calm_down)

    def _calm_down(self) -> None:
        self.quiet = True
        self._armed.clear()
        self._tell("from here on nothing is broken any more")

    def _tell(self, text: str) -> None:
        self.struck.append((self.loop.now_ns, text))
        if self.tell is not None:
            self.tell(self.loop.now_ns, text)

    # -------------------------------------------------------------- beginning and ending

    def _arm(self, fault: Fault) -> None:
        if not self.quiet:
            self._armed.append((fault, self._sent[(fault.a, fault.after)] + fault.nth))

    def sent(self, sender: int, message: str) -> None:
        """A process of `sender` has sent a message of this name, which a fault may wait for."""
        if not self._armed:
            return
        self._sent[(sender, message)] += 1
        for fault, count in list(self._armed):
            if (fault.a, fault.after) == (sender, message) and (
                self._sent[(sender, message)] >= count
            ):
                self._armed.remove((fault, count))
                self._begin(fault)

    def _begin(self, fault: Fault) -> None:
        if self.quiet:
            return
        now_ns, scenario = self.loop.now_ns, self.scenario
        end_ns = now_ns + (fault.end_ns - fault.begin_ns) if fault.end_ns < FOR_EVER else FOR_EVER
        if scenario.quiet_ns:
            end_ns = min(end_ns, scenario.quiet_ns)
        behind = f", after its {fault.after}" if fault.after else ""
        self._tell(what(fault) + behind)
        match fault.kind:
            case "crash":
                self.actions.crash(fault)
            case "restart":
                self.actions.crash(fault)
                self.loop.at(end_ns, lambda: self._start_again(fault))
            case "freeze":
                self.actions.freeze(fault, end_ns)
            case "clock_jump" | "clock_drift":
                self.actions.clock(fault, True)
            case "retire":
                self.actions.retire(fault)
        if KINDS[fault.kind].lasts and fault.kind not in ("freeze", "restart"):
            self.active.setdefault(fault.kind, []).append(fault)
            if end_ns < FOR_EVER:
                self.loop.at(end_ns, lambda: self._end(fault))

    def _start_again(self, fault: Fault) -> None:
        self._tell(f"{name_of(fault.a)} is started again")
        self.actions.restart(fault)

    def _end(self, fault: Fault) -> None:
        self.active[fault.kind].remove(fault)
        if not self.active[fault.kind]:
            del self.active[fault.kind]
        if fault.kind == "clock_drift":
            self.actions.clock(fault, False)

    # -------------------------------------------------------------- questions

    def silent(self, a: int, b: int) -> bool:
        """Whether no frame gets from a to b now."""
        for fault in self.active.get("cut", ()):
            if (fault.a, fault.b) == (a, b):
                self.felt["cut"] += 1
                return True
        for fault in self.active.get("partition", ()):
            if (a in fault.racks) != (b in fault.racks):
                self.felt["partition"] += 1
                return True
        return False

    def waits(self, rack: int) -> bool:
        """Whether frames for a process of `rack` that is dead wait for its next life."""
        return any(fault.a == rack for fault in self.active.get("stale", ()))

    def loses(self, a: int, b: int) -> bool:
        """Whether this one frame is lost."""
        scenario = self.scenario
        if scenario.loss and not self.quiet and self.rng.random() < scenario.loss:
            self.felt["loss"] += 1
            return True
        for fault in self._between("lossy", a, b):
            if self.rng.randrange(100) < fault.amount:
                self.felt["lossy"] += 1
                return True
        return False

    def doubles(self) -> bool:
        duplicate = self.scenario.duplicate
        doubled = bool(duplicate) and not self.quiet and self.rng.random() < duplicate
        self.felt["duplicate"] += doubled
        return doubled

    def delay_ns(self, a: int, b: int) -> int:
        """How long one frame or request takes from rack to rack."""
        scenario = self.scenario
        delay_ns = scenario.delay_ns
        if scenario.jitter_ns:
            delay_ns += self.rng.randint(0, scenario.jitter_ns)
        for fault in self._between("slow_link", a, b):
            self.felt["slow_link"] += 1
            delay_ns += fault.amount
        for fault in self._between("shuffle", a, b):
            self.felt["shuffle"] += 1
            delay_ns += self.rng.randint(0, fault.amount)
        return delay_ns

    def slower(self, rack: int) -> int:
        """Factor on the time of a step."""
        fault = self._of("slow_rack", rack)
        return fault.amount if fault else 1

    def work_ns(self, rack: int) -> int:
        """Extra time of a background job."""
        fault = self._of("slow_worker", rack)
        return self.rng.randint(0, fault.amount) if fault else 0

    def flips(self, kind: str, rack: int) -> bool:
        """Whether one bit of this transfer or frame is wrong."""
        fault = next((f for f in self.active.get(kind, ()) if f.a == rack), None)
        if fault is None or self.rng.randrange(100) >= fault.amount:
            return False
        self.felt[kind] += 1
        return True

    def spoils(self, rack: int) -> float | None:
        """The value that its payloads have in place of every element; None: they are intact."""
        for kind, value in SPOILT.items():
            if self._of(kind, rack):
                return value
        return None

    def _of(self, kind: str, rack: int) -> Fault | None:
        first = next((fault for fault in self.active.get(kind, ()) if fault.a == rack), None)
        if first is not None:
            self.felt[kind] += 1
        return first

    def _between(self, kind: str, a: int, b: int) -> list[Fault]:
        return [f for f in self.active.get(kind, ()) if f.a < 0 or {f.a, f.b} == {a, b}]
