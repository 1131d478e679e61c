"""Everything that a simulated run depends on, as one value: topology, workload, faults.

`draw` makes a scenario from a seed; `World` has calls to write one by hand.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mend.consensus.log import RECORDS_KEPT
from mend.consensus.weights import WHOLE
from mend.errors import ConfigError
from mend.fragment.apply import ApplyMode
from mend.types import MS, SECOND

WITNESS_TARGET = 99
"""The number of the witness in faults, which otherwise name racks."""

FOR_EVER = 1 << 62

SHUTDOWN_NS = 4 * SECOND


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault from begin_ns until end_ns. `mend_lab.sim.faults.KINDS` describes the kinds and what
    they do with the other fields.

    With `after` the fault waits for the n-th message of that name that rack `a` sends from begin_ns
    on, begins right after it, and lasts for end_ns - begin_ns.
    """

    kind: str
    begin_ns: int
    end_ns: int
    a: int = -1
    b: int = -1
    racks: tuple[int, ...] = ()
    amount: int = 0
    after: str = ""
    nth: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Times in ns; `loss`, `duplicate`: probabilities per frame. The default is a calm job."""

    seed: int = 1
    racks: int = 2
    ranks: int = 1
    witness: bool = True
    fragments: int = 2
    numel: int = 8
    period_steps: int = 6
    overlap_steps: int = 3
    overlap_ramp: int = 0
    """Versions over which the overlap rises; 0: it does not."""
    steps: tuple[int, ...] = (24, 24)
    step_ns: tuple[int, ...] = (50 * MS, 50 * MS)
    k: int = 1
    grace_ns: int = -1
    """-1: adaptive."""
    expected: tuple[int, ...] = ()
    """Racks that a round waits for; empty: all that are live."""
    lockstep: bool = False
    overlapped: bool = True
    apply_mode: ApplyMode = "carry"
    payload: str = "float32"
    momentum: float = 0.0
    ramp: int = 0
    """Rounds of the momentum's ramp; 0: none."""
    staleness_max_rounds: int = 2
    delay_ns: int = 5 * MS
    jitter_ns: int = 0
    loss: float = 0.0
    duplicate: float = 0.0
    byte_ns: int = 0
    non_finite: tuple[tuple[int, int], ...] = ()
    """(rack, step) whose update is NaN for one step and repaired at the next."""
    faults: tuple[Fault, ...] = ()
    merge: str = "mean"
    quiet_ns: int = 0
    """Time at which all faults end, except crashes; 0: no such time."""
    records_kept: int = RECORDS_KEPT
    """Decided records that a replica keeps; a rack that is further behind gets a snapshot."""
    first: int = 0
    """Version of every fragment in the checkpoint that the job resumes; 0: no checkpoint."""
    cut_step: int = 0
    """Step after which every rack makes a checkpoint; 0: no checkpoint."""
    cut_writes_ns: int = 0
    """Time that its files take while the rack trains on; 0: no time, and the rack waits."""
    pauses: tuple[tuple[int, int, int], ...] = ()
    """(rack, step, ns): after that step the script pauses, as for an evaluation."""
    carries: bool = False
    """Ranks have an optimizer with a state, which a joining rack copies."""
    moments: tuple[int, ...] = ()
    """Periods of averaging the optimizer's first and second moments; 0 or empty: never."""
    validates: bool = False
    """Slow racks are validated by a micro-benchmark."""
    acts: bool = False
    """Slow racks are mitigated."""
    evicts: bool = False
    """Slow racks may be evicted, and are then started again."""
    restart_ns: int = 500 * MS
    """Time to start a rack again."""
    gone: bool = False
    """Evicted racks are not started again."""
    batch: int = 0
    """Micro-batches of a step, for scripts that ask how many to take; 0: they do not ask."""
    units: int = 0
    """Units of data that the log gives out; scripts end with them, or with their steps. 0: none."""
    unit_batch: int = 1
    """Units that a step takes."""
    sharded: bool = False
    """Racks merge a slice each in rounds with enough members."""
    unseeded: bool = False
    """Each life of a rack begins with weights of its own, as scripts without a fixed seed do."""
    rotates: bool = False
    """The job's key is replaced: each life of a rack or of the witness has the next file of the
    three in SECURITY.md, the first life the old key."""
    shutdown_ns: int = SHUTDOWN_NS
    """Limit for the wait after training until the work is merged and the others are done."""

    def __post_init__(self) -> None:
        for name in ("steps", "step_ns"):
            count = len(getattr(self, name))
            if count != self.racks:
                text = f"{count} values for {self.racks} racks"
                raise ConfigError(name, getattr(self, name), text, "Give one per rack.")
        for fault in self.faults:
            named = {fault.a, *fault.racks, *([fault.b] if fault.kind != "crash" else [])}
            if absent := sorted(named - {-1, *self.targets}):
                text = f"{self.racks} racks, {'a' if self.witness else 'no'} witness, no {absent}"
                remedy = "Name racks that there are; the witness is mend_lab.sim.WITNESS."
                raise ConfigError("faults", fault, text, remedy)

    @property
    def targets(self) -> list[int]:
        """What a fault may name: the racks, then the witness."""
        return [*range(self.racks), *([WITNESS_TARGET] if self.witness else [])]

    @property
    def founder(self) -> int:
        """The target that coordinates at first."""
        return WITNESS_TARGET if self.witness else 0

    @property
    def moment_periods(self) -> dict[int, int]:
        """Order of a moment -> its period."""
        return {order: period for order, period in enumerate(self.moments, 1) if period}

    @property
    def length_ns(self) -> int:
        """Training time of the slowest rack with its pauses, if nothing delays it."""
        works = zip(self.steps, self.step_ns, self.paused_ns, strict=True)
        return max(n * ns + more for n, ns, more in works)

    @property
    def paused_ns(self) -> tuple[int, ...]:
        """The pauses of every rack, added up."""
        racks = range(self.racks)
        return tuple(sum(ns for of, _, ns in self.pauses if of == rack) for rack in racks)

    def shape(self, fragment: int) -> tuple[int, ...]:
        """Shape of the fragment's one tensor: a matrix for a codec of low rank."""
        rows = self.numel + fragment
        return (rows, 4) if self.payload.startswith("powersgd") else (rows,)

    def end_of(self, fault: Fault) -> int:
        """The end of a fault, which is at the latest the quiet time."""
        return min(fault.end_ns, self.quiet_ns) if self.quiet_ns else fault.end_ns

    def without(self, *, faults: tuple[Fault, ...]) -> Scenario:
        return dataclasses.replace(self, faults=faults)


OFFERS_BEFORE = 5
"""Offers of every rack and fragment before the checkpoint that a job resumes."""


def rounds_before(first: int) -> int:
    """Rounds, some incomplete, that are merged in a checkpoint of this version."""
    return first * WHOLE - WHOLE // 2 if first else 0


def calm(**changes: Any) -> Scenario:
    """A job without faults; one number for `steps` or `step_ns` is for all racks."""
    racks = changes.get("racks", 2)
    for name, usual in (("steps", 24), ("step_ns", 50 * MS)):
        given = changes.get(name, usual)
        changes[name] = (given,) * racks if isinstance(given, int) else tuple(given)
    return Scenario(**changes)


def python_of(value: Scenario | Fault) -> str:
    """The expression that makes this value, without the fields that have their defaults."""
    arguments = []
    for field in dataclasses.fields(value):
        argument = getattr(value, field.name)
        if argument == field.default:
            continue
        text = repr(argument)
        if field.name == "faults":
            comma = "," if len(argument) == 1 else ""
            text = f"({', '.join(map(python_of, argument))}{comma})"
        arguments.append(f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(arguments)})"
