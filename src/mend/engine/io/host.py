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
"""Rack number under which all processes of another version are answered, one after the other."""

FOREIGN_FRAMES = 3
FOREIGN_NS = 2 * SECOND
"""A rack that waits for the start gives up when it has heard so many frames of another version, so
long after the first: until then it answers, so that both sides learn of it."""

FOREIGN_GAP_NS = 200 * MS
"""Between two answers; each answer is a frame of another version to the other side."""


OTHER_JOBS_MAX = 8
"""Processes of other jobs that are noted; their names are not verified."""


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
        """Pull what this holder may be about to serve; it is no trouble if it does not. `meter`
        gets the checksum."""

    def serve(self, key: bytes, view: memoryview, growth: Growth | None = None) -> None:
        """As `BulkLane.serve`."""

    def drop(self, key: bytes) -> None: ...

    def note(self, event: LoggedEvent) -> None:
        """An event for the recorder and the log."""

    def finished(self) -> None:
        """A machine of this process has nothing more to do."""


class Host(Protocol):
    """The machines of one process, as the I/O loop calls them."""

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None: ...
    def tick(self) -> None: ...
    def deadline_ns(self) -> int | None: ...
    def crashed(self, error: MendError) -> None: ...

    def foreign(self, found: OtherVersion | OtherJob) -> None:
        """A process speaks another version of the wire format, or is of another job."""


class VersionMismatches:
    """Processes of this job that speak another version of the wire format, as one process meets
    them."""

    def __init__(self, host: HostInterface) -> None:
        self._edge = host
        self._frames = 0
        self._first_ns = self._answered_ns = 0
        self.reason = ""
        """The last one, in a sentence."""

    def met(self, found: OtherVersion, others: Sequence[Peer] = ()) -> None:
        """Answer in our own version, which is all that the other side can read of it; and tell
        `others`, who may not have met any."""
        now_ns = self._edge.now_ns()
        if not self._frames:
            self._first_ns, self._answered_ns = now_ns, now_ns - FOREIGN_GAP_NS
        self._frames, self.reason = self._frames + 1, str(found)
        if now_ns - self._answered_ns < FOREIGN_GAP_NS:
            return
        self._answered_ns = now_ns
        ways = [Peer(found.rack, 0), *others]
        if found.address:
            ways.append(Peer(FOREIGN, VISITOR))
            self._edge.connect(ways[-1], found.address)
        for way in dict.fromkeys(ways):
            self._edge.send(way, Refusal(0, "version", self.reason))

    def settled(self) -> bool:
        """Whether it is no single late frame, and the others had time to hear it."""
        waited_ns = self._edge.now_ns() - self._first_ns
        return self._frames >= FOREIGN_FRAMES and waited_ns >= FOREIGN_NS


class OtherJobs:
    """Processes of other jobs that speak to this one: left over from an earlier job, or started
    with another job_id by mistake. Both sides are to know; neither is stopped."""

    def __init__(self, host: HostInterface) -> None:
        self._edge = host
        self._noted: dict[tuple[int, str], str] = {}
        self._answered: dict[tuple[int, str], int] = {}
        self._answered_ns = 0

    def met(self, found: OtherJob) -> None:
        """Note each once, and answer a rack that asks to join: any frame of ours names our job."""
        who = found.rack, found.job
        if who not in self._noted and len(self._noted) < OTHER_JOBS_MAX:
            self._noted[who] = str(found)
            self._edge.note(OtherJobHeard(found.rack, found.job, str(found)))
        now_ns = self._edge.now_ns()
        if found.address and who in self._noted and self._has_turn(who, now_ns):
            self._answered[who] = self._answered_ns = now_ns
            way = Peer(FOREIGN, VISITOR)
            self._edge.connect(way, found.address)
            self._edge.send(way, Refusal(0, "job", str(found)))

    def _has_turn(self, who: tuple[int, str], now_ns: int) -> bool:
        """Whether an answer is due. One that was answered waits for all others, which
        otherwise would never have a turn: racks say hello at the same time, in the same order."""
        last_ns = self._answered.get(who)
        waits = last_ns is not None and now_ns - last_ns < FOREIGN_GAP_NS * len(self._noted)
        return not waits and now_ns - self._answered_ns >= FOREIGN_GAP_NS

    @property
    def in_words(self) -> str:
        """All of them, for the reason of a start that waits; empty: none."""
        return "; ".join(self._noted.values())
