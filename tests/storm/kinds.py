"""What a storm may do to a job, and to whom. A job must survive all of it:
docs/internals/protocol.md says who may die."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.storm import network
from tests.storm.storm import HOLD_MS, MOMENT_MS, Fault, Shape, Storm

NOBODY = -1


@dataclass(frozen=True)
class Kind:
    """`whom`: racks that it may hit now; [NOBODY]: no rack in particular; empty: not now."""

    whom: Callable[[Shape], list[int]]
    do: Callable[[Storm, Fault], None]
    ms: tuple[int, int] | None = None
    """Between these is drawn how long it lasts, or when it strikes."""


# ------------------------------------------------------------------ to whom


def survivable(shape: Shape) -> list[int]:
    """Racks without which the others decide on: see the table of docs/internals/protocol.md."""
    if shape.voters_lost or len(shape.alive) < 2:
        return []
    if shape.racks == 2 and not shape.witness:
        return [1]
    return sorted(shape.alive)


def _whole(shape: Shape) -> list[int]:
    """Any, while nobody is missing for good."""
    return sorted(shape.alive) if not shape.voters_lost else []


def _of_ranks(shape: Shape) -> list[int]:
    return _whole(shape) if shape.ranks > 1 else []


def _of_three(shape: Shape) -> list[int]:
    return _whole(shape) if len(shape.alive) > 2 else []


def _all(shape: Shape) -> list[int]:
    return [NOBODY] if _whole(shape) else []


def _alive(shape: Shape) -> list[int]:
    return sorted(shape.alive)


def _linked(shape: Shape) -> list[int]:
    return sorted(shape.alive) if shape.linked else []


def _witness(shape: Shape) -> list[int]:
    return [NOBODY] if shape.witness and _whole(shape) else []


# ------------------------------------------------------------------ what


def _kill(storm: Storm, fault: Fault) -> None:
    at_ns = _killed(storm, [fault.rack])
    storm.commits_again(fault.kind, [fault.rack], at_ns)
    storm.shape.alive.discard(fault.rack)
    storm.shape.voters_lost += 1


def _killed(storm: Storm, racks: Sequence[int]) -> int:
    """The moment of the first death."""
    at_ns = time.monotonic_ns()
    for rack in racks:
        storm.kill(rack, undoable=len(racks) > 1)
    return at_ns


def _restart(storm: Storm, fault: Fault) -> None:
    at_ns = _killed(storm, [fault.rack])
    _back(storm, fault, at_ns)


def _kill_rank(storm: Storm, fault: Fault) -> None:
    storm.kill_rank(fault.rack)
    _back(storm, fault, time.monotonic_ns())


def _back(storm: Storm, fault: Fault, at_ns: int) -> None:
    """The rack is started again; where the others can do without it, they do not wait for that."""
    if fault.rack in survivable(storm.shape):
        storm.commits_again(fault.kind, [fault.rack], at_ns)
    storm.forget_leader(fault.rack)
    storm.start(fault.rack)
    storm.joined(fault.rack)


def _die_joining(storm: Storm, fault: Fault) -> None:
    """In its start, its hello or its copy."""
    _killed(storm, [fault.rack])
    storm.forget_leader(fault.rack)
    storm.start(fault.rack)
    time.sleep(fault.ms / 1000)  # this is the moment; nothing is awaited
    _restart(storm, replace(fault, kind="restart"))


def _deaths(storm: Storm, fault: Fault, count: int) -> None:
    """Of so many at once, the drawn one first; all are started again."""
    racks = storm.shape.racks
    gone = sorted(storm.shape.alive, key=lambda rack: (rack - fault.rack) % racks)[:count]
    _killed(storm, gone)
    for rack in gone:
        storm.forget_leader(rack)
        storm.start(rack)
    for rack in gone:
        storm.joined(rack)


def _cut(storm: Storm, _: Fault) -> None:
    storm.has_cut(storm.ask_for_cut(), sorted(storm.shape.alive))


def _die_cutting(storm: Storm, fault: Fault) -> None:
    name = storm.ask_for_cut()
    time.sleep(fault.ms / 1000)  # this is the moment; nothing is awaited
    _killed(storm, [fault.rack])
    storm.forget_leader(fault.rack)
    storm.start(fault.rack)
    storm.joined(fault.rack)
    storm.has_cut(name, sorted(storm.shape.alive - {fault.rack}))


def _kill_witness(storm: Storm, fault: Fault) -> None:
    at_ns = time.monotonic_ns()
    storm.kill_witness()
    storm.commits_again(fault.kind, [NOBODY], at_ns)
    storm.shape.witness = False
    storm.shape.voters_lost += 1


def _restart_witness(storm: Storm, fault: Fault) -> None:
    at_ns = time.monotonic_ns()
    storm.kill_witness()
    storm.commits_again(fault.kind, [NOBODY], at_ns)
    storm.start_witness()


def _link(how: dict[str, object], *, out: bool = True, back: bool = True) -> Kind:
    return Kind(
        _linked, lambda storm, f: storm.link(f.rack, f.ms, how, out=out, back=back), HOLD_MS
    )


KINDS: dict[str, Kind] = {
    "kill": Kind(survivable, _kill),
    "restart": Kind(_whole, _restart),
    "rank-death": Kind(_of_ranks, _kill_rank),
    "join-death": Kind(_whole, _die_joining, MOMENT_MS),
    "two-deaths": Kind(_of_three, lambda storm, fault: _deaths(storm, fault, 2)),
    "all-but-one": Kind(
        _of_three, lambda storm, fault: _deaths(storm, fault, len(storm.shape.alive) - 1)
    ),
    "all": Kind(_all, lambda storm, fault: storm.all_die()),
    "kill-witness": Kind(_witness, _kill_witness),
    "restart-witness": Kind(_witness, _restart_witness),
    "pause": Kind(_alive, lambda storm, fault: storm.pause(fault.rack, fault.ms), HOLD_MS),
    "checkpoint": Kind(_all, _cut),
    "checkpoint-death": Kind(_whole, _die_cutting, MOMENT_MS),
    "cut": _link(network.CUT),
    "mute": _link(network.CUT, back=False),
    "deaf": _link(network.CUT, out=False),
    "slow": _link(network.SLOW),
    "loss": _link(network.LOSSY),
}
LINK_KINDS = ("cut", "mute", "deaf", "slow", "loss")
