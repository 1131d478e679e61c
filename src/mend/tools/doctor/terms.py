"""Findings, and the plain data of a meeting of racks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. problem: a job could not start like this, or the racks cannot meet.
    `change` is empty where there is nothing to do."""

    severity: Severity
    topic: str
    found: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.found} {self.change}".strip()


def ok(topic: str, found: str) -> Finding:
    return Finding("ok", topic, found)


def remark(topic: str, found: str, change: str = "") -> Finding:
    return Finding("note", topic, found, change)


def problem(topic: str, found: str, change: str = "") -> Finding:
    return Finding("problem", topic, found, change)


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes one way, as they arrived. error: why nothing did."""

    mbit: float | None = None
    megabytes: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """One other rack, as it was seen from here."""

    rack: int
    address: str
    heard: bool = False
    hears_us: bool = False
    heard_by: tuple[int, ...] = ()
    """Other racks that hear it."""
    answer: str = ""
    """Answer of its port: open, refused, silent, no route, no such name; empty: not tried."""
    detail: str = ""
    speaks: bool = False
    """Something that speaks as mend does answered there."""
    host: str = ""
    same_machine: bool = False
    lane: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    wishes: dict[str, str] = field(default_factory=dict)
    trips: int = 0
    asked: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    clock_ms: float | None = None
    here: Flow | None = None
    """The flow from it to this rack, alone; None: not measured."""
    there: Flow | None = None
    """The flow from this rack to it, as it reports."""
    together: Flow | None = None
    """The flow from it to this rack, while all racks pulled from all."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """All that one rack found out in a meeting."""

    rack: int
    racks: int
    job: str
    address: str
    lane: str
    """Address of its payloads."""
    heartbeat_ms: int
    detect_ms: float
    seconds: float
    turns_done: bool
    versions: dict[str, str]
    facts: dict[str, str]
    wishes: dict[str, str]
    peers: tuple[Seen, ...]
    witness: tuple[str, str, bool] | None = None
    """(address, answer to a knock, whether it speaks as mend does)."""
    strangers: tuple[tuple[int, str], ...] = ()
    jobs: tuple[tuple[int, str], ...] = ()
    doubles: tuple[int, ...] = ()
    garbage: int = 0
    buffers: tuple[int, int] | None = None
    """(receive, send): most that the kernel gives a TCP socket, bytes."""

    @property
    def slowest_trip_ms(self) -> float | None:
        return max((seen.p50_ms for seen in self.peers if seen.p50_ms is not None), default=None)

    @property
    def inbound_mbit(self) -> float | None:
        """Rate from all others at once. None: not all of them were measured."""
        flows = [seen.together for seen in self.peers]
        rates = [flow.mbit for flow in flows if flow is not None and flow.mbit is not None]
        return sum(rates) if rates and len(rates) == len(flows) else None


def rate(mbit: float) -> str:
    return f"{mbit / 1000:.2f} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"
