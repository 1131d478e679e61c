"""Reports when no pull from another rank's lane succeeds, and when pulls succeed again.

A rack can be heard over the sideband although its lane cannot be reached: a closed port, a path
that drops large packets. Each failed pull is an event of its own and is tried again; the event here
is the one line for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mend.errors import PeerUnreachable, TransferStalled
from mend.events.base import Emit
from mend.events.kinds import PULLS_PAGE, PullsFail, PullsWork
from mend.types import Address

FAILURES = 3
SECONDS = 5.0
"""This many pulls in a row must fail, over SECONDS, before it is reported. A rack that has died is
known to be silent by then."""


@dataclass(slots=True)
class _Row:
    """Consecutive failed pulls."""

    began_s: float
    failures: int = 0
    error: str = ""
    reported: bool = False


class PullTroubles:
    """`note` takes the events `pulls-fail` and `pulls-work`. Loop thread."""

    def __init__(self, note: Emit) -> None:
        self._note = note
        self._rows: dict[Address, _Row] = {}

    def ended(self, holders: Sequence[Address], error: Exception | None, now_s: float) -> None:
        """A pull is over. Only errors of the connection count: `holders` may have dropped the
        bytes."""
        for holder in holders:
            if error is None:
                self._works(holder)
            elif isinstance(error, PeerUnreachable | TransferStalled):
                self._fails(holder, str(error), now_s)

    def describe(self) -> list[str]:
        """The reported lanes, in words. Any thread."""
        return [
            f"no pull from {holder.host}:{holder.port} succeeds ({row.error}): see {PULLS_PAGE}"
            for holder, row in list(self._rows.items())
            if row.reported
        ]

    def _works(self, holder: Address) -> None:
        row = self._rows.pop(holder, None)
        if row is not None and row.reported:
            self._note(PullsWork(f"{holder.host}:{holder.port}"))

    def _fails(self, holder: Address, error: str, now_s: float) -> None:
        row = self._rows.setdefault(holder, _Row(now_s))
        row.failures, row.error = row.failures + 1, error
        if row.failures >= FAILURES and now_s - row.began_s >= SECONDS and not row.reported:
            row.reported = True
            self._note(PullsFail(f"{holder.host}:{holder.port}", row.failures, error))
