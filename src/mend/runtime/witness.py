"""runtime.witness: the coordinator as its own process: a vote, the order of things, no tensor."""

from __future__ import annotations

import logging
import secrets
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from mend.errors import MendError
from mend.protocol.coordinator import Coordinator, CoordinatorOptions
from mend.protocol.events import Connect, Effect, Event, Finished, Heard, Note, Send, Tick
from mend.protocol.messages import Message
from mend.runtime.driver import Driver, DriverOptions
from mend.runtime.edge import Edge
from mend.runtime.recorder import Recorder
from mend.terms import MS, SECOND, WITNESS, Member, Peer

logger = logging.getLogger("mend")

DETECT_HEARTBEATS = 20
DETECT_NS_MIN = 2 * SECOND


def detect_ns(heartbeat_ms: int) -> int:
    """Silence after which a rack is not waited for: 20 heartbeats, at least 2 s."""
    return max(DETECT_HEARTBEATS * heartbeat_ms * MS, DETECT_NS_MIN)


class Witness:
    """Host of a coordinator without a rack."""

    def __init__(
        self, coordinator: Coordinator, edge: Edge, progress: Callable[[str], None]
    ) -> None:
        self.coordinator, self.edge, self._progress = coordinator, edge, progress
        self.failure: MendError | None = None

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        self._give(Heard(peer, incarnation, body))

    def tick(self) -> None:
        self._give(Tick())

    def deadline_ns(self) -> int | None:
        return self.coordinator.deadline_ns()

    def crashed(self, error: MendError) -> None:
        self.failure = error

    def _give(self, event: Event) -> None:
        for effect in self.coordinator.handle(event, self.edge.now_ns()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(to, body):
                self.edge.send(to, body)
            case Connect(peer, address):
                self.edge.connect(peer, address)
            case Note(kind, fields):
                self.edge.note(kind, fields)
                if kind in ("hello", "genesis", "refused", "roster", "fault"):
                    self._progress(
                        f"{kind} " + " ".join(f"{key}={value}" for key, value in fields.items())
                    )
            case Finished():
                self.edge.finished()
            case _:
                raise AssertionError(f"a coordinator has no tensors: {effect}")


def run(
    bind: str,
    racks: int,
    job_id: str,
    heartbeat_ms: int = 100,
    on_progress: Callable[[str], None] | None = None,
    diagnostics_dir: Path | None = None,
) -> None:
    """Serve one job until every rack has left, or SIGINT / SIGTERM.

    Raises AddressInUse, MendError.
    """
    me, member = Peer(WITNESS, 0), Member(WITNESS, secrets.randbits(62))
    recorder = Recorder({"rack": WITNESS, "rank": 0}, diagnostics_dir)
    host = bind.removeprefix("tcp://").rsplit(":", 1)[0]
    driver = Driver(me, member, job_id, DriverOptions(bind, host, "", None, 10 * SECOND), recorder)
    options = CoordinatorOptions(racks, heartbeat_ms * MS, detect_ns(heartbeat_ms))
    witness = Witness(Coordinator(me, job_id, options), driver, on_progress or (lambda line: None))
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    try:
        driver.attach(witness)
        if on_progress:
            on_progress(f"listening address={driver.address} job={job_id} racks={racks}")
        while not stop.is_set() and not driver.done.wait(0.2):
            pass
    finally:
        driver.close()
        recorder.close()
    if witness.failure is not None:
        raise witness.failure
