"""Runs the background jobs of one rank, and brings their results back to its machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mend.coordination.events import Event
from mend.engine.io.host import HostInterface
from mend.engine.state.published_state import PublishedState
from mend.errors import InvariantError, MendError, WorkerFailed

T = TypeVar("T")


class Jobs:
    """Loop thread. `tell` gives an event to the rank's machine."""

    def __init__(
        self,
        host: HostInterface,
        published: PublishedState,
        rack: int,
        tell: Callable[[Event], None],
    ) -> None:
        self._host, self.published, self._rack, self.tell = host, published, rack, tell

    def run(
        self,
        job: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None] | None = None,
        expected: type[Exception] = MendError,
    ) -> None:
        """Run `job` on a worker. `done` gets its result, `failed` an error of the kind `expected`;
        any other error fails this rank. A broken invariant goes to neither and stops this rank.
        Taken for a failed merge or copy, it would be tried again endlessly."""

        def ended(result: T | Exception) -> None:
            if isinstance(result, InvariantError):
                raise result
            if not isinstance(result, Exception):
                done(result)
            elif failed is not None and isinstance(result, expected):
                failed(result)
            else:
                self._broken(result)

        self._host.work(job, ended)

    def _broken(self, error: Exception) -> None:
        """Fail this rank: a background job met a bug, or the machine is out of memory."""
        failure = WorkerFailed(f"a background job of rack {self._rack} failed: {error!r}")
        failure.__cause__ = error
        self.published.fail(failure)
