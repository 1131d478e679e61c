"""Answers status clients, and keeps recent notes for them.

Loop thread only. Reads the machines and never changes them. The cost of clients is bounded: a
status is made at most every VIEW_KEPT_NS, all clients together get at most ANSWERS_PER_SECOND_MAX
answers a second, and answers to a connection that does not read are dropped.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from mend.errors import MendError, WireError
from mend.events.base import Emit
from mend.events.kinds import StatusUnanswered
from mend.status.follow_messages import Follow, Followed, decode_asked, encode_followed
from mend.status.messages import JobStatus, encode_view
from mend.types import MS, SECOND

VIEW_KEPT_NS = 100 * MS
ANSWERS_PER_SECOND_MAX = 50
LOOKERS_MAX = 16
LOOKER_NS = 15 * SECOND
"""Clients that have asked within this time, at most LOOKERS_MAX, are notified when the process
ends."""

NOTES_S = 1.0
WINDOW = 6
"""Notes that are kept: recent means the last five seconds."""


class StatusServer:
    """`view(ended)` makes the status, `followed(follow)` the answer to a follower of the merged
    model. `reply(route, frame)` sends them. `refuse` counts frames that are not a valid request for
    this job. `note` records events."""

    def __init__(
        self,
        job: str,
        view: Callable[[bool], JobStatus],
        followed: Callable[[Follow], Followed],
        reply: Callable[[bytes, bytes], bool],
        now_ns: Callable[[], int],
        refuse: Callable[[MendError], None],
        note: Emit,
    ) -> None:
        self._note = note
        self._job, self._view, self._followed, self._reply = job, view, followed, reply
        self._now_ns, self._refuse = now_ns, refuse
        self._frame, self._made_ns = b"", 0
        self._second_ns, self._answers = 0, 0
        self._lookers: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()
        """Connection -> time of its last request, and whether it follows; least recent first."""
        self._failed = False

    def take(self, route: bytes, frame: bytes) -> None:
        """Take one frame of a client. Never raises."""
        now_ns = self._now_ns()
        if now_ns - self._second_ns >= SECOND:
            self._second_ns, self._answers = now_ns, 0
        if self._answers >= ANSWERS_PER_SECOND_MAX:
            return
        self._answers += 1  # malformed frames count as well: they cost as much
        try:
            look = decode_asked(frame)
            if look.job not in ("", self._job):
                raise WireError(f"a look at job {look.job!r}, this is job {self._job!r}")
        except WireError as error:
            self._refuse(error)
            return
        if isinstance(look, Follow):
            if (answer := self._answer(look)) and self._reply(route, answer):
                self._remember(route, now_ns, follows=True)
            return
        if not self._frame or now_ns - self._made_ns >= VIEW_KEPT_NS:
            self._frame, self._made_ns = self._made(ended=False), now_ns
        if self._frame and self._reply(route, self._frame):
            self._remember(route, now_ns, follows=False)

    def _remember(self, route: bytes, now_ns: int, *, follows: bool) -> None:
        self._lookers[route] = now_ns, follows
        self._lookers.move_to_end(route)
        if len(self._lookers) > LOOKERS_MAX:
            self._lookers.popitem(last=False)

    def farewell(self) -> None:
        """Notify recent clients that the process ends, so that they do not take it for lost."""
        fresh_ns = self._now_ns() - LOOKER_NS
        recent = {route: f for route, (at_ns, f) in self._lookers.items() if at_ns >= fresh_ns}
        frames = {False: self._made(ended=True), True: self._answer(Follow(""))} if recent else {}
        for route, follows in recent.items():
            if frames[follows]:
                self._reply(route, frames[follows])

    def _answer(self, follow: Follow) -> bytes:
        return self._guarded(lambda: encode_followed(self._followed(follow)))

    def _made(self, *, ended: bool) -> bytes:
        """The frame of a status; empty if it cannot be made."""
        return self._guarded(lambda: encode_view(self._view(ended)))

    def _guarded(self, make: Callable[[], bytes]) -> bytes:
        """What `make` returns; empty if it fails. A status client must never stop training, so any
        exception here is logged, once, and nothing is sent."""
        try:
            return make()
        except Exception as error:
            if not self._failed:
                self._failed = True
                self._note(StatusUnanswered(repr(error)))
            return b""


@dataclass(frozen=True, slots=True)
class CounterSample:
    """The counters at a moment. `at_ns`: monotonic; `step_end_ns`: end of the step, wall clock."""

    at_ns: int
    step: int
    tokens: int
    step_end_ns: int
    stall_ns: int
    sent: int
    received: int


class Recent:
    """The last seconds of one rank's training, noted once a second."""

    def __init__(self, look: Callable[[], CounterSample]) -> None:
        self._look = look
        self._notes: deque[CounterSample] = deque([look()], WINDOW)

    def note(self) -> None:
        self._notes.append(self._look())

    def span(self) -> tuple[CounterSample, CounterSample]:
        """(then, now): up to WINDOW seconds apart. The time before the first step does not
        count."""
        now = self._look()
        then = next((note for note in self._notes if note.step > 0), now)
        return then, now
