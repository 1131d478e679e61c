"""Runs the trainer's generators on the training thread, and answers what they yield."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mend.engine.hooks import signals
from mend.engine.io.rack import RackGroup
from mend.engine.state.fragment_state import (
    AgreeMin,
    BroadcastBytes,
    GatherSlices,
    Request,
    Requests,
    Resumable,
    Wait,
    drive,
)
from mend.engine.state.published_state import PublishedState
from mend.errors import InvariantError, LeftJob
from mend.types import MS, SECOND

SLICE_NS = 100 * MS
"""Maximum time for which a signal that comes in a wait is not noticed."""

T = TypeVar("T")


class Driver:
    """The driver of one rank. `left`: called when the trainer has left the job. `broken`: called
    when the trainer, or another thread, has broken an invariant."""

    def __init__(
        self,
        group: RackGroup,
        published: PublishedState,
        now_ns: Callable[[], int],
        *,
        left: Callable[[], None],
        broken: Callable[[InvariantError], None],
    ) -> None:
        self._group, self._published, self._now_ns = group, published, now_ns
        self._left, self._broken = left, broken
        self.unfinished: Resumable[None] | None = None
        """The work after a step, until it is done; `go_on` finishes it."""
        self._waited: tuple[Wait | None, int] = (None, 0)
        """The newest wait, and its end in ns."""

    def drive(self, requests: Generator[Request, Any, T]) -> T:
        """Run a generator to its end and return its value."""
        with self._ending():
            return drive(requests, self._answer)

    def work(self, requests: Requests) -> None:
        """As `drive`, for the work after a step. If a signal's handler raises in a wait, the work
        stops there, and `go_on` finishes it."""
        self.unfinished = Resumable(requests)
        self.go_on()

    def go_on(self) -> None:
        """Finish the work of the last step, if an exception has interrupted it in a wait: a capture
        that is due in it would never be made otherwise."""
        if (work := self.unfinished) is None:
            return
        try:
            with self._ending():
                work.run(self._answer)
                self.unfinished = None
        finally:
            if not work.waits:
                self.unfinished = None

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            with signals.held():
                yield
        except LeftJob:
            self._left()
            raise
        except InvariantError as error:
            self._broken(error)
            raise

    def _answer(self, request: Request) -> object:
        match request:
            case Wait():
                return self._wait(request)
            case AgreeMin(values):
                return self._group.minimum(values)
            case GatherSlices(_, slice_N, mine):
                return self._group.share(slice_N, mine)
            case BroadcastBytes(data_B):
                self._group.spread(data_B)
                return None

    def _wait(self, request: Wait) -> bool:
        """Wait in slices; signal handlers run between them. A wait that a handler has interrupted
        by raising goes on within its original limit."""
        known, deadline_ns = self._waited
        if request is not known:
            deadline_ns = self._now_ns() + request.limit_ns
            self._waited = request, deadline_ns
        while True:
            signals.run_late()
            left_ns = deadline_ns - self._now_ns()
            ready = self._published.wait(request.ready, min(left_ns, SLICE_NS) / SECOND)
            if ready or left_ns <= SLICE_NS or self._published.failure is not None:
                return ready
