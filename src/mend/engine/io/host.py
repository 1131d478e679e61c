"""The host interface: everything that a rank needs from the outside world.

`io_loop` implements it with threads, sockets and the monotonic clock, `mend_lab.sim` with a virtual
clock. The code that uses it is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mend.coordination.admission import VISITOR
from mend.coordination.messages import Message, Refusal
from mend.errors import MendError, OtherJob, OtherVersion
from mend.events.base import LoggedEvent
from mend.events.kinds import OtherJobHeard
from mend.transport.growth import Growth
from mend.types import MS, SECOND, Address, Extent, Meter, Peer

T = TypeVar("T")

FOREIGN = 0xFFFE
"""Rack number under which all processes of another version or job are answered, one after the
other."""

FOREIGN_FRAMES = 3
FOREIGN_NS = 2 * SECOND
"""A rack that waits for the start gives up once it has heard this many frames of another version,
and this long after the first of them: until then it answers, so that both sides learn of it."""

FOREIGN_GAP_NS = 200 * MS
"""Minimum time between two answers: to the other side, each answer is itself a frame of another
version, which it answers."""

OTHER_JOBS_MAX = 8
"""Maximum number of processes of other jobs that are noted. Bounded, as anyone can invent names."""


class HostInterface(Protocol):
    """All calls return at once; `done` is called later, on the loop."""

    def now_ns(self) -> int: ...

    def connect(self, peer: Peer, address: str) -> None: ...

    def send(self, to: Peer, body: Message) -> None:
        """Best effort."""

    def work(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run `job` on a worker."""

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
        """As `BulkLane.fetch`."""

    def pull_ahead(
        self,
        holder: Address,
        key: bytes,
        into: memoryview,
        done: Callable[[Exception | None], None],
        meter: Meter,
    ) -> None:
        """Pull what this holder may be about to serve. A failure is expected, and not counted as
        trouble. `meter` gets the checksum of what came."""

    def serve(self, key: bytes, view: memoryview, growth: Growth | None = None) -> None:
        """As `BulkLane.serve`."""

    def drop(self, key: bytes) -> None: ...

    def note(self, event: LoggedEvent) -> None:
        """Give an event to the recorder and the log."""

    def finished(self) -> None:
        """A machine of this process has nothing more to do."""


class Host(Protocol):
    """The machines of one process, as the I/O loop calls them."""

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None: ...
    def tick(self) -> None: ...
    def deadline_ns(self) -> int | None: ...
    def crashed(self, error: MendError) -> None: ...

    def foreign(self, found: OtherVersion | OtherJob) -> None:
        """Handle a process that speaks another version of the wire format, or is of another job."""


class VersionMismatches:
    """The processes of this job that this process heard speak another version of the wire
    format."""

    def __init__(self, host: HostInterface) -> None:
        self._host = host
        self._frames = 0
        self._first_ns = self._answered_ns = 0
        self.reason = ""
        """The newest mismatch, as a sentence."""

    def met(self, found: OtherVersion, others: Sequence[Peer] = ()) -> None:
        """Answer in this version: the other side can read that it is another one, and no more. Also
        tell `others`, who may not have heard such a process."""
        now_ns = self._host.now_ns()
        if not self._frames:
            self._first_ns, self._answered_ns = now_ns, now_ns - FOREIGN_GAP_NS
        self._frames, self.reason = self._frames + 1, str(found)
        if now_ns - self._answered_ns < FOREIGN_GAP_NS:
            return
        self._answered_ns = now_ns
        ways = [Peer(found.rack, 0), *others]
        if found.address:
            ways.append(Peer(FOREIGN, VISITOR))
            self._host.connect(ways[-1], found.address)
        for way in dict.fromkeys(ways):
            self._host.send(way, Refusal(0, "version", self.reason))

    def settled(self) -> bool:
        """Whether it was more than a single late frame, and the others had time to hear of it."""
        waited_ns = self._host.now_ns() - self._first_ns
        return self._frames >= FOREIGN_FRAMES and waited_ns >= FOREIGN_NS


class OtherJobs:
    """The processes of other jobs that speak to this one: left over from an earlier job, or started
    with another job_id by mistake. Both sides are notified; neither is stopped."""

    def __init__(self, host: HostInterface) -> None:
        self._host = host
        self._noted: dict[tuple[int, str], str] = {}
        self._answered: dict[tuple[int, str], int] = {}
        self._answered_ns = 0

    def met(self, found: OtherJob) -> None:
        """Note each process once. Answer a rack that asks to join; the answer names this job."""
        who = found.rack, found.job
        if who not in self._noted and len(self._noted) < OTHER_JOBS_MAX:
            self._noted[who] = str(found)
            self._host.note(OtherJobHeard(found.rack, found.job, str(found)))
        now_ns = self._host.now_ns()
        if found.address and who in self._noted and self._has_turn(who, now_ns):
            self._answered[who] = self._answered_ns = now_ns
            way = Peer(FOREIGN, VISITOR)
            self._host.connect(way, found.address)
            self._host.send(way, Refusal(0, "job", str(found)))

    def _has_turn(self, who: tuple[int, str], now_ns: int) -> bool:
        """Whether an answer is due. A process that was answered waits until all others had a turn.
        They would never get one otherwise: racks say hello at the same time, in the same order."""
        last_ns = self._answered.get(who)
        waits = last_ns is not None and now_ns - last_ns < FOREIGN_GAP_NS * len(self._noted)
        return not waits and now_ns - self._answered_ns >= FOREIGN_GAP_NS

    @property
    def in_words(self) -> str:
        """All of them in words, as a reason why the start waits; empty: there are none."""
        return "; ".join(self._noted.values())
