"""runtime.edge: everything a rank needs of the outside world, as one small contract.

`driver` implements it with threads, sockets and the monotonic clock, `mend.sim` with a virtual
clock. The code in between (`rank`, `steps`, and the machines) is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from mend.errors import MendError
from mend.protocol.messages import Message
from mend.terms import Address, Peer

T = TypeVar("T")


class Edge(Protocol):
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
    ) -> None: ...

    def serve(self, key: bytes, view: memoryview) -> None: ...

    def drop(self, key: bytes) -> None: ...

    def note(self, kind: str, fields: dict[str, object]) -> None:
        """An event for the recorder and the log."""

    def finished(self) -> None:
        """A machine of this process has nothing more to do."""


class Host(Protocol):
    """What an edge feeds: the machines of one process."""

    def heard(self, peer: Peer, incarnation: int, body: Message) -> None: ...
    def tick(self) -> None: ...
    def deadline_ns(self) -> int | None: ...
    def crashed(self, error: MendError) -> None: ...
