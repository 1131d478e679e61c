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
class Seen:
    """One other rack, or the witness, as it was seen from here."""

    rack: int
    address: str
    answer: str = ""
    """Answer of its port: open, refused, silent, no route, no such name; empty: not tried."""
    detail: str = ""
    speaks: bool = False
    """Something that speaks as mend does answered there."""
    locked: bool = False
    """It has another key, or one of the two sides has none."""
    job: str = ""
    """Job of the process that answers looks there; empty: none does."""
    waits: str = ""
    """Why that process waits, as it says."""
    hello: bool = False
    """Its hello arrived here; only the rack that founds the job gets hellos."""
    refused: str = ""
    """Why this rack refused it."""
    settings: dict[str, float] = field(default_factory=dict)
    """Settings that need not be equal, and should be."""
    tried: int = 0
    trips: int = 0
    """Connections that were tried, and those that came about."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    clock_ms: float | None = None
    mbit: float | None = None
    """Rate of the payload that this rack pulled from it; None: nothing was measured."""
    megabytes: float = 0.0
    error: str = ""
    """Why this rack could not pull from it."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """All that one rack found out in a meeting."""

    rack: int
    racks: int
    job: str
    """Of the meeting, not of the real job."""
    address: str
    heartbeat_ms: int
    detect_ms: float
    seconds: float
    megabytes: float
    """What this rack was to pull from the others; 0: nothing is measured."""
    peers: tuple[Seen, ...]
    failure: str = ""
    """The error with which the start failed; empty: the racks began together."""
    timed_out: bool = False
    """The start failed because nothing happened, and not by a refusal."""
    answered: bool = True
    """Whether the rack that founds the job answered this one."""
    outcome: str = ""
    """How the exchange failed; empty: everything was merged, or the racks did not begin."""
    settings: dict[str, float] = field(default_factory=dict)
    witness: Seen | None = None
    buffers: tuple[int, int] | None = None
    """(receive, send): most that the kernel gives a TCP socket, bytes."""
    inbound_mbit: float | None = None
    """Rate from all others at once. None: not all of them were measured."""

    @property
    def slowest_trip_ms(self) -> float | None:
        return max((seen.p50_ms for seen in self.peers if seen.p50_ms is not None), default=None)


def rate(mbit: float) -> str:
    return f"{mbit / 1000:.2f} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"
