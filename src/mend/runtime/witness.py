"""runtime.witness: the coordinator as its own process: a vote, the order of things, no tensor."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from mend.errors import MendError, OtherVersion
from mend.protocol.booth import WitnessBooth
from mend.protocol.coordinator import Coordinator, CoordinatorOptions
from mend.protocol.events import (
    Connect,
    Effect,
    Finished,
    Heard,
    Machine,
    Note,
    Send,
    Tick,
)
from mend.protocol.machines import BOOTH, COORDINATOR, CoordinatorParts, Parts, machines_of
from mend.protocol.messages import Message, Orders, Prepare
from mend.protocol.observing import View
from mend.runtime.driver import Driver, DriverOptions
from mend.runtime.edge import Edge, Foreigners
from mend.runtime.inbox import Inbox
from mend.runtime.recorder import Recorder
from mend.runtime.showing import view_of_witness
from mend.runtime.tape import Tape, begin, header_of
from mend.terms import MS, SECOND, WITNESS, Member, Peer

DETECT_HEARTBEATS = 20
DETECT_NS_MIN = 2 * SECOND

NO_LANE = "127.0.0.1"
"""A witness has nothing to serve: its lane is no door to other machines."""


def detect_ns(heartbeat_ms: int) -> int:
    """Silence after which a rack is not waited for: 20 heartbeats, at least 2 s."""
    return max(DETECT_HEARTBEATS * heartbeat_ms * MS, DETECT_NS_MIN)


class Witness:
    """Host of a coordinator without a rack, and of its vote."""

    def __init__(
        self,
        coordinator: Coordinator,
        booth: WitnessBooth,
        edge: Edge,
        progress: Callable[[str], None],
        tape: Tape | None = None,
    ) -> None:
        self.coordinator, self.booth, self.edge = coordinator, booth, edge
        self._progress = progress
        self.failure: MendError | None = None
        self._foreigners = Foreigners(edge)
        self._told: set[str] = set()
        """At most one sentence per rack and version."""
        self._give = Inbox(self._name, edge.now_ns, self._perform, tape).give

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        self._give(self.coordinator, Heard(peer, incarnation, body))
        if isinstance(body, Orders | Prepare):
            self._give(self.booth, Heard(peer, incarnation, body))

    def tick(self) -> None:
        self._give(self.coordinator, Tick())

    def deadline_ns(self) -> int | None:
        return self.coordinator.deadline_ns()

    def crashed(self, error: MendError) -> None:
        self.failure = error

    def foreign(self, found: OtherVersion) -> None:
        """It waits on for those who speak as it does; the other hears why it is not one."""
        self._foreigners.met(found)
        if str(found) not in self._told:
            self._told.add(str(found))
            fields = {"rack": found.rack, "cause": "version", "detail": str(found)}
            self.edge.note("refused", fields)
            self._progress(" ".join(f"{key}={value}" for key, value in fields.items()))

    def view(self, ended: bool) -> View:
        """What there is to see here."""
        job, now_ns = self.coordinator.job, self.edge.now_ns()
        return view_of_witness(job, self.coordinator, self.booth, now_ns, ended=ended)

    def _name(self, machine: Machine) -> str:
        return BOOTH if machine is self.booth else COORDINATOR

    def _perform(self, effect: Effect, _: Machine) -> None:
        match effect:
            case Send(to, body):
                if to == self.coordinator.me:
                    self.heard(to, self.coordinator.member.incarnation, body)
                else:
                    self.edge.send(to, body)
            case Connect(peer, address):
                self.edge.connect(peer, address)
            case Note(kind, fields):
                self.edge.note(kind, fields)
                if kind in (
                    "hello",
                    "genesis",
                    "refused",
                    "roster",
                    "takes-over",
                    "deposed",
                    "no-quorum",
                    "lineage",
                    "gives-up",
                    "retired",
                    "fault",
                ):
                    self._progress(
                        f"{kind} " + " ".join(f"{key}={value}" for key, value in fields.items())
                    )
            case Finished():
                self.edge.finished()
            case _:
                raise AssertionError(f"a coordinator has no tensors: {effect}")


def build_witness(
    parts: Parts, edge: Edge, progress: Callable[[str], None], tape: Tape | None = None
) -> Witness:
    """Coordinator and booth of one process, around its one vote."""
    made = machines_of(parts)
    assert made.coordinator is not None
    assert made.booth is not None
    return Witness(made.coordinator, made.booth, edge, progress, tape)


def run(
    bind: str,
    racks: int,
    job_id: str,
    heartbeat_ms: int = 100,
    on_progress: Callable[[str], None] | None = None,
    diagnostics_dir: Path | None = None,
    tape_mb_max: int = 0,
    observe: bool = True,
    keys: tuple[bytes, ...] = (),
    protection: str = "loopback",
) -> None:
    """Serve one job until every rack has left, or SIGINT / SIGTERM.

    Raises AddressInUse, MendError.
    """
    me, member = Peer(WITNESS, 0), Member(WITNESS, secrets.randbits(62))
    recorder = Recorder({"rack": WITNESS, "rank": 0}, diagnostics_dir)
    listen = DriverOptions(
        bind, NO_LANE, "", None, 10 * SECOND, observe=observe, secrets=keys, protection=protection
    )
    driver = Driver(me, member, job_id, listen, recorder)
    options = CoordinatorOptions(racks, heartbeat_ms * MS, detect_ns(heartbeat_ms))
    parts = Parts(me, member, coordinator=CoordinatorParts(job_id, options))
    tape = begin(diagnostics_dir, tape_mb_max, header_of(job_id, parts), recorder.note)
    witness = build_witness(parts, driver, on_progress or (lambda line: None), tape)
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    try:
        driver.observe(witness.view)
        driver.attach(witness)
        if on_progress:
            on_progress(
                f"listening address={driver.address} job={job_id} racks={racks} "
                f"protection={protection}"
            )
        while not stop.is_set() and not driver.done.wait(0.2):
            pass
    finally:
        driver.close()
        if tape is not None:
            tape.close()
        recorder.close()
    if witness.failure is not None:
        raise witness.failure
