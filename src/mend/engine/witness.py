"""The witness process: it votes and may coordinate, and has no tensors."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from mend.coordination.acceptor_host import WitnessFollower
from mend.coordination.coordinator import Coordinator, CoordinatorOptions
from mend.coordination.events import Connect, Finished, Heard, Machine, Note, Send, Tick
from mend.coordination.machines import (
    COORDINATOR,
    FOLLOWER,
    CoordinatorSpec,
    ProcessSpec,
    machines_of,
)
from mend.coordination.messages import Message, Orders, Prepare
from mend.engine.features.followed_log import followed_of
from mend.engine.features.served_metrics import NOWHERE, MetricsAddress, ServedMetrics
from mend.engine.io.host import HostInterface, OtherJobs, VersionMismatches
from mend.engine.io.io_loop import IoLoop, IoLoopOptions
from mend.engine.loop.effects import EventQueue, Handlers
from mend.engine.snapshot import view_of_witness
from mend.errors import MendError, OtherJob, OtherVersion, require
from mend.events.base import LoggedEvent, Severity, log_text
from mend.events.kinds import RackRefused
from mend.status.event_log import EventLog
from mend.status.follow_messages import Follow, Followed
from mend.status.loudness import Loudness
from mend.status.messages import JobStatus
from mend.trace.writer import Tape, begin, header_of
from mend.types import MS, SECOND, WITNESS, Member, Peer

DETECT_HEARTBEATS = 20
DETECT_NS_MIN = 2 * SECOND

NO_LANE = "127.0.0.1"
"""A witness serves nothing on its lane, so that is not reachable from other machines."""


def detect_ns(heartbeat_ms: int) -> int:
    """Silence in ns after which nobody waits for a rack: 20 heartbeats, at least 2 s."""
    return max(DETECT_HEARTBEATS * heartbeat_ms * MS, DETECT_NS_MIN)


class Witness:
    """Hosts a coordinator that has no rack, and its vote."""

    def __init__(
        self,
        coordinator: Coordinator,
        follower: WitnessFollower,
        host: HostInterface,
        progress: Callable[[str], None],
        tape: Tape | None = None,
    ) -> None:
        self.coordinator, self.follower, self.host = coordinator, follower, host
        self._progress = progress
        self.failure: MendError | None = None
        self._mismatches, self._other_jobs = VersionMismatches(host), OtherJobs(host)
        self._loudness = Loudness()
        self._noted: set[str] = set()
        """The sentences that were printed: each only once."""
        self.machines: dict[str, Machine] = {COORDINATOR: coordinator, FOLLOWER: follower}
        self._give = EventQueue(self.machines, host.now_ns, self._handlers, tape).give

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None:
        self._give(self.coordinator, Heard(peer, incarnation, body))
        if isinstance(body, Orders | Prepare):
            self._give(self.follower, Heard(peer, incarnation, body))
            if self.follower.follower.acceptor.log.committed.over:
                self.tick()  # the leader may be gone: nothing else would make this process leave

    def tick(self) -> None:
        self._give(self.coordinator, Tick())

    def deadline_ns(self) -> int | None:
        return self.coordinator.deadline_ns()

    def crashed(self, error: MendError) -> None:
        self.failure = error

    def foreign(self, found: OtherVersion | OtherJob) -> None:
        """Tell a process of another version or job why it is refused, and wait on for the right
        ones."""
        if isinstance(found, OtherJob):
            self._other_jobs.met(found)
            self._print_once(found, "job")
            return
        self._mismatches.met(found)
        self._print_once(found, "version")

    def _print_once(self, found: OtherVersion | OtherJob, cause: str) -> None:
        if str(found) not in self._noted:
            self._noted.add(str(found))
            refused = RackRefused(found.rack, cause, str(found))
            self.host.note(refused)
            self._progress(log_text(refused))

    def view(self, ended: bool) -> JobStatus:
        """The status of the job, as this process knows it."""
        job, now_ns = self.coordinator.job, self.host.now_ns()
        return view_of_witness(job, self.coordinator, self.follower, now_ns, ended=ended)

    def followed(self, asked: Follow) -> Followed:
        """The decided log, as this process knows it, for a follower of the merged model."""
        hosts = self.coordinator.proposer.leading
        log = self.coordinator.log if hosts else self.coordinator.acceptor.log
        return followed_of(self.coordinator.job, WITNESS, log, asked)

    def _handlers(self, _: Machine) -> Handlers:
        return {
            Send: self._send,
            Connect: lambda it: self.host.connect(it.peer, it.address),
            Note: lambda it: self._note(it.event),
            Finished: lambda _: self.host.finished(),
        }

    def _send(self, effect: Send) -> None:
        if effect.to == self.coordinator.me:
            self.heard(effect.to, self.coordinator.member.incarnation, effect.body)
        else:
            self.host.send(effect.to, effect.body)

    def _note(self, event: LoggedEvent) -> None:
        self.host.note(event)
        shown = self._loudness.shown(event, self.host.now_ns()) if event.loud else event
        if shown is not None and shown.severity > Severity.DEBUG:
            self._progress(log_text(shown))


def build_witness(
    parts: ProcessSpec,
    host: HostInterface,
    progress: Callable[[str], None],
    tape: Tape | None = None,
) -> Witness:
    """A witness with the coordinator and the follower that `parts` describe."""
    made = machines_of(parts)
    coordinator = require(made.coordinator, "a witness coordinates")
    follower = require(made.follower, "a witness votes")
    return Witness(coordinator, follower, host, progress, tape)


def run(
    bind: str,
    racks: int,
    job_id: str,
    heartbeat_ms: int = 100,
    on_progress: Callable[[str], None] | None = None,
    diagnostics_dir: Path | None = None,
    tape_max_mb: int = 0,
    observe: bool = True,
    keys: tuple[bytes, ...] = (),
    protection: str = "loopback",
    socks_proxy: str = "",
    metrics: MetricsAddress = NOWHERE,
) -> None:
    """Serve one job until every rack has left, or SIGINT / SIGTERM. `socks_proxy`: through which
    all racks are reached; empty: none.

    Raises AddressInUse, ConfigError, MendError; KeyboardInterrupt after SIGINT.
    """
    me, member = Peer(WITNESS, 0), Member(WITNESS, secrets.randbits(62))
    listen = IoLoopOptions(
        bind, NO_LANE, "", None, 10 * SECOND, observe=observe, secrets=keys, protection=protection,
        socks_proxy=socks_proxy,
    )  # fmt: skip
    options = CoordinatorOptions(racks, heartbeat_ms * MS, detect_ns(heartbeat_ms))
    parts = ProcessSpec(me, member, coordinator=CoordinatorSpec(job_id, options))
    with ExitStack() as undo:
        recorder = EventLog({"rack": WITNESS, "rank": 0}, diagnostics_dir)
        undo.callback(recorder.close)
        io_loop = IoLoop(me, member, job_id, listen, recorder)
        undo.callback(io_loop.close)  # where the rest cannot be made
        tape = begin(diagnostics_dir, tape_max_mb, header_of(job_id, parts), recorder.note)
        if tape is not None:
            undo.callback(tape.close)
        witness = build_witness(parts, io_loop, on_progress or (lambda line: None), tape)
        if tape is not None:
            tape.watch(witness.machines)
        served = ServedMetrics(recorder.note)
        undo.callback(served.close)
        undo.callback(io_loop.close)  # first, as it writes to the tape
        caught = _signals()
        io_loop.observe(witness.view, witness.followed)
        if metrics.port:
            served.open(metrics, {"job_id": job_id, "rack": "witness"})
            served.publish(witness.view, io_loop)
        io_loop.attach(witness)
        if on_progress:
            on_progress(
                f"listening address={io_loop.address} job={job_id} racks={racks} "
                f"protection={protection}"
            )
        while not caught and not io_loop.done.wait(0.2):
            pass
        interrupted = signal.SIGINT in caught and not io_loop.done.is_set()
    if witness.failure is not None:
        raise witness.failure
    if interrupted:
        raise KeyboardInterrupt  # the job is not over


def _signals() -> list[int]:
    """The list that holds SIGINT and SIGTERM once they came; empty outside the main thread."""
    caught = list[int]()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: caught.append(number))
    return caught
