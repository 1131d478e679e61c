"""The live host: the asyncio loop with its sockets and timers, and a worker for tensors.

Each runs in a thread of its own. Frames become events, effects become frames; jobs and pulls come
back as calls on the loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from mend.coordination import wire
from mend.coordination.messages import Envelope, Message
from mend.coordination.streams import Streams, Unread
from mend.engine.compute.threads import DaemonExecutor
from mend.engine.io.frame_gate import FrameGate
from mend.engine.io.host import Host
from mend.engine.io.port_holders import DEATH_S_MAX, open_when_free
from mend.engine.io.pull_troubles import PullTroubles
from mend.errors import (
    ConfigError,
    GaveUp,
    InvariantError,
    MendError,
    OtherJob,
    OtherVersion,
    TransportError,
    WireError,
)
from mend.events.base import LoggedEvent
from mend.events.kinds import CloseGaveUp, HostUnknown, InvariantBroken, PayloadPulled
from mend.status import messages as status_messages
from mend.status.event_log import EventLog
from mend.status.follow_messages import Follow, Followed
from mend.status.server import StatusServer
from mend.transport.bulk_client import BulkLane
from mend.transport.bulk_wire import lane_token
from mend.transport.delayed import Delay, DelayedLane, Distribution
from mend.transport.growth import Growth
from mend.transport.probe import host_and_port, numbers_of
from mend.transport.security import Secrets
from mend.transport.whereabouts import Whereabouts, inside
from mend.transport.zmq import Received, ZmqSideband
from mend.types import MS, SECOND, Address, Extent, Member, Meter, Peer

T = TypeVar("T")

START_S = 30.0
CLOSE_S = 10.0
"""How long `close` waits for the loop, with its sockets and the lane."""

WORK_CLOSE_S = 10.0
"""How long `close` waits for the worker's current job."""

STRANGERS_S = 5.0
"""How often handshakes with other keys are noted, if there were any."""


def _begin(cores: frozenset[int] | None) -> None:
    from mend.engine.compute.worker_pool import (
        begin_worker,  # late: a witness has no jobs and needs no torch
    )

    begin_worker(cores)


@dataclass(frozen=True, slots=True)
class IoLoopOptions:
    """Where a process listens, and how its sockets work. `ports`: of the lane; None: any.
    `stall_ns`: a transfer without a byte for this long fails. `delay_ns`: mean of the simulated
    delay; 0: none."""

    bind: str
    lane_host: str
    advertise_host: str
    ports: tuple[int, int] | None
    stall_ns: int
    delay_ns: int = 0
    delay_distribution: Distribution = "constant"
    delay_seed: int = 0
    cores: frozenset[int] | None = None
    """Where the worker stays; None: anywhere."""
    observe: bool = True
    """Whether status queries are answered, see `IoLoop.observe`."""
    secrets: tuple[bytes, ...] = field(default=(), repr=False)
    """The job's secrets; empty: messages are not encrypted, and every process that reaches this one
    is heard."""
    protection: str = "loopback"
    """keys, loopback or insecure; for reports."""
    conceal: bool = True
    """Whether the lane encrypts with the secrets, or authenticates only."""
    ranks: int = 1
    """Number of ranks of this rack."""
    peers: tuple[str, ...] = ()
    """The addresses of other processes in the settings. A process without a key may name only
    these."""
    socks_proxy: str = ""
    """The proxy through which processes outside this rack are reached; empty: none."""

    @property
    def shares_port(self) -> bool:
        """Whether the lanes of all ranks of a rack share one port."""
        return self.ports is not None and self.ports[0] == self.ports[1]

    @property
    def has_one_port(self) -> bool:
        """Whether lane and sideband share one port; the sideband is then reached through the
        lane."""
        return self.shares_port and self.ports == (host_and_port(self.bind)[1],) * 2


class IoLoop:
    """Implements HostInterface. `attach` plugs in the machines: a rank's or the witness's."""

    def __init__(
        self, me: Peer, member: Member, job: str, options: IoLoopOptions, recorder: EventLog
    ) -> None:
        self.me, self.member, self.job = me, member, job
        self.options, self.recorder = options, recorder
        self.done = threading.Event()
        self._host: Host | None = None
        self._streams = Streams(member)
        self.pull_troubles = PullTroubles(self.note)
        self._observed: StatusServer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0
        """The time that the timer is set to."""
        self._calls = deque[Callable[[], None]]()
        """Calls from other threads, oldest first."""
        self._woken = False
        """Whether the loop will run the calls without another wake-up."""
        self._closing = self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: Future[None] = Future()
        self._worker = DaemonExecutor(1, "mend-worker", partial(_begin, options.cores))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mend-loop", daemon=True)
        self._thread.start()
        try:
            self._ready.result(START_S + DEATH_S_MAX)
        except BaseException:
            self._closing = True
            self._worker.close(0.0)
            raise

    # -------------------------------------------------------------- other threads

    @property
    def address(self) -> str:
        return self.options.bind if self.options.has_one_port else self._sideband.address

    @property
    def lane_address(self) -> Address:
        return self._lane.address

    @property
    def inside(self) -> Address:
        """Where the other ranks of this rack reach the lane."""
        host = inside(self.options.lane_host, self.options.advertise_host)
        return Address(host, self.lane_address.port)

    def relay(self, lanes: Sequence[Address]) -> None:
        """Relay connections to the ranks on other hosts. `lanes`: the lanes of all ranks of this
        rack, as reached from inside it."""
        here = Whereabouts()
        found = {
            lane_token(self.job, rank): lane
            for rank, lane in enumerate(lanes)
            if rank != self.me.rank and not here.is_here(lane.host)
        }
        self._lane.relay(found)

    @property
    def frames_refused(self) -> int:
        return self._gate.refused

    @property
    def bytes_relayed(self) -> int:
        return self._lane.bytes_relayed

    @property
    def bytes_sent(self) -> int:
        return self._sideband.bytes_sent + self._lane.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._sideband.bytes_received + self._lane.bytes_received

    def call(self, job: Callable[[], None], *, soon: bool = True) -> None:
        """Run `job` on the loop, after all earlier calls. `soon=False`: only when something else
        wakes the loop, as heartbeats do: a wake-up takes the interpreter's lock from the training
        thread. Calls after close are dropped."""
        if self._closing:
            return
        self._calls.append(job)
        if not soon or self._woken:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._run_calls)
        except RuntimeError:
            if not self._closing:
                raise

    def break_off(self, error: InvariantError) -> None:
        """Stop as if the loop itself had raised `error`: nothing more is sent to other racks.
        Returns when it has stopped. Any thread but the loop's."""

        def job() -> None:
            raise error

        self.call(job)
        self._thread.join(CLOSE_S)

    def every(self, period_s: float, job: Callable[[], None]) -> None:
        """Run `job` on the loop every `period_s` seconds, until close. Jobs of one period share
        their wake-ups."""

        def rest() -> None:
            periods = self._loop.time() // period_s
            self._loop.call_at((periods + 1) * period_s, self._guarded, again)

        def again() -> None:
            job()
            rest()

        self.call(rest)

    def observe(
        self,
        view: Callable[[bool], status_messages.JobStatus],
        followed: Callable[[Follow], Followed],
    ) -> None:
        """Answer status queries with `view(ended)`, which is also sent once at the end, and
        followers of the merged model with `followed`. Both are called on the loop, at most a few
        times a second."""

        def job() -> None:
            answers = self._sideband.reply, self.now_ns, self._gate.refuse, self.note
            self._observed = StatusServer(self.job, view, followed, *answers)

        if self.options.observe:
            self.call(job)

    def find_by(self, find: Callable[[bytes], bytes | None]) -> None:
        """Find the bytes for followers by `find(key)` where nothing is served under the key. `find`
        is called on any thread."""
        if self.options.observe:
            self._lane.find_by(find)

    def attach(self, host: Host) -> None:
        """Start to receive for `host`. Messages that arrived before are delivered now."""

        def job() -> None:
            self._host = host
            self._sideband.hear(self._received)

        self.call(job)
        threading.Thread(target=self._look_up, name="mend-lookup", daemon=True).start()
        if self.options.secrets:
            self.every(STRANGERS_S, lambda: self._gate.note_strangers(self._sideband.strangers))

    def _look_up(self) -> None:
        """Note the hosts of the settings that cannot be resolved here: ZeroMQ tries again endlessly
        and reports nothing. On a thread of its own, as a resolver may hang."""
        options = self.options
        asked = (options.socks_proxy,) if options.socks_proxy else options.peers
        hosts = {host_and_port(address)[0] for address in asked if address}
        for host in sorted(hosts):
            if not numbers_of(host) and not self._closing:
                self.note(HostUnknown(host))

    def close(self, farewell: Callable[[], None] | None = None) -> None:
        """Stop the loop, the worker and the sockets; idempotent. Waits CLOSE_S for the loop and
        WORK_CLOSE_S for the worker's job; notes the threads that still run then."""
        if self._closed:
            return
        crashed, self._closing = self._closing, True
        if not crashed and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._stop, farewell)
        self._thread.join(CLOSE_S)
        left = [self._thread.name] if self._thread.is_alive() else []
        left += self._worker.close(WORK_CLOSE_S)
        if left:
            self.note(CloseGaveUp(tuple(left)))
        self._closed = True

    # -------------------------------------------------------------- HostInterface (loop thread)

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def connect(self, peer: Peer, address: str) -> None:
        """Connect. The address may come from a message, so a bad one is only noted."""
        try:
            self._sideband.connect(peer, address)
        except (ConfigError, TransportError) as error:
            self._gate.refuse(error)

    def send(self, to: Peer, body: Message) -> None:
        self._sideband.send(to, wire.encode(self._streams.envelope(self.job, self.me, to, body)))

    def work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        def finish(future: Future[T]) -> None:
            if future.cancelled() or self._closing:
                return
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                # A SystemExit or KeyboardInterrupt of a job is a fault like any other.
                fault = RuntimeError(f"a background job was ended by {error!r}")
                fault.__cause__ = error
                error = fault
            self.call(lambda: done(error if error is not None else future.result()))

        self._worker.submit(job).add_done_callback(finish)

    def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        done: Callable[[Exception | None], None],
        extent: Extent | None = None,
        meter: Meter | None = None,
    ) -> None:
        async def pull() -> None:
            error: Exception | None = None
            begun_ns = self.now_ns()
            try:
                await self._lane.fetch(holders, key, checksum, into, extent, meter)
            except TransportError as failure:
                error = failure
            if error is None and meter is not None:
                took_ms = (self.now_ns() - begun_ns) / MS
                self.note(PayloadPulled(meter.rack, meter.size, took_ms))
            self.pull_troubles.ended(holders, error, self._loop.time())
            self._guarded(lambda: done(error))

        self._spawn(pull())

    def pull_ahead(
        self,
        holder: Address,
        key: bytes,
        into: memoryview,
        done: Callable[[Exception | None], None],
        meter: Meter,
    ) -> None:
        async def pull() -> None:
            error: Exception | None = None
            try:
                await self._lane.fetch((holder,), key, None, into, meter=meter)
                took_ms = (self.now_ns() - meter.first_ns) / MS
                self.note(PayloadPulled(meter.rack, meter.size, took_ms))
            except TransportError as failure:
                error = failure
            self._guarded(lambda: done(error))

        self._spawn(pull())

    def serve(self, key: bytes, view: memoryview, growth: Growth | None = None) -> None:
        self._lane.serve(key, view, growth)

    def drop(self, key: bytes) -> None:
        self._lane.drop(key)

    def note(self, event: LoggedEvent) -> None:
        self.recorder.note(event)

    def finished(self) -> None:
        self.done.set()

    # -------------------------------------------------------------- the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            open_when_free(self._open, self.note, lambda: self._closing)
        except BaseException as error:
            self._loop.close()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            self._loop.run_forever()
        except BaseException as error:  # asyncio lets SystemExit and KeyboardInterrupt pass
            self._crash(error)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._lane.close()
            if self._observed is not None:
                self._observed.farewell()
            self._sideband.close()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _open(self) -> None:
        options = self.options
        secrets = None
        if options.secrets:
            secrets = Secrets(options.secrets, self.me, conceal=options.conceal)
        late = Delay(options.delay_ns, options.delay_distribution, options.delay_seed)
        lane = (partial(DelayedLane, late) if late.mean_ns else BulkLane)(
            options.lane_host,
            options.ports,
            token=lane_token(self.job, self.me.rank),
            job=lane_token(self.job, 0),
            advertise=options.advertise_host,
            stall_ns=options.stall_ns,
            secrets=secrets,
            socks_proxy=options.socks_proxy,
        )

        async def bind() -> ZmqSideband:
            sideband = ZmqSideband(
                "tcp://127.0.0.1:0" if options.has_one_port else options.bind,
                frame_bytes_max=wire.FRAME_BYTES_MAX,
                secrets=secrets,
                ranks=options.ranks,
                socks_proxy=options.socks_proxy,
                direct=self.me.rack,
            )
            if options.observe:
                sideband.divert(status_messages.HEAD[:3], self._looked)
            return sideband

        try:
            self._sideband = self._loop.run_until_complete(bind())
            self._gate = FrameGate(
                self.job, options.peers,
                stands=self._sideband.is_connected, now_ns=self.now_ns, note=self.note,
            )  # fmt: skip
        except BaseException:
            lane.close()
            raise
        self._lane = lane
        if options.has_one_port:
            lane.relay_sideband(host_and_port(self._sideband.address)[1], options.ranks)

    def _received(self, received: Received) -> None:
        """Handle a frame from any sender."""
        if self._closing:
            return
        try:
            envelope = self._gate.opened(received)
            body = self._streams.read(envelope)
        except Unread:
            pass
        except WireError as error:
            self._gate.refuse(error)
            self._foreign(error)
        except Exception as error:
            self._crash(error)
        else:
            self._guarded(partial(self._hear, envelope, body))

    def _foreign(self, error: WireError) -> None:
        """Tell the host of a process of another version or job: it may be meant to take part."""
        if self._host is None or not isinstance(error, OtherJob | OtherVersion):
            return
        if isinstance(error, OtherJob) or error.job == self.job:
            self._guarded(partial(self._host.foreign, error))

    def _hear(self, envelope: Envelope, body: Message) -> None:
        if self._host is not None:
            self._host.heard(Peer(envelope.rack, envelope.rank), envelope.incarnation, body)

    def _looked(self, route: bytes, frame: bytes) -> None:
        """Handle a status query. The host does not see it, so no tape has it."""
        if self._observed is not None:
            self._observed.take(route, frame)

    def _run_calls(self) -> None:
        self._woken = False  # first: what is added from here on may need another wake-up
        self._guarded(None)

    def _guarded(self, job: Callable[[], None] | None) -> None:
        """Run the calls of other threads, then `job`. An error in one of them stops this rack."""
        try:
            while self._calls and not self._closing:
                self._calls.popleft()()
            if self._closing:
                return
            if job is not None:
                job()
            self._arm()
        except BaseException as error:
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        self._closing = True
        self.done.set()
        if isinstance(error, InvariantError):
            self.note(InvariantBroken(str(error)))
        if self._host is not None:
            failure = error
            if not isinstance(failure, MendError):
                failure = GaveUp(f"the mend loop stopped: {error!r}")
                failure.__cause__ = error
            self._host.crashed(failure)
        self._loop.stop()

    def _arm(self) -> None:
        """Set the one timer to the earliest deadline of the machines."""
        due = self._host.deadline_ns() if self._host is not None else None
        if self._timer is not None:
            if due == self._armed_ns:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay_s = max(0, due - self.now_ns()) / SECOND
            self._timer = self._loop.call_later(delay_s, self._guarded, self._tick)
            self._armed_ns = due

    def _tick(self) -> None:
        self._timer = None
        if self._host is not None:
            self._host.tick()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    def _stop(self, farewell: Callable[[], None] | None) -> None:
        if farewell is not None:
            farewell()
        self._loop.stop()
