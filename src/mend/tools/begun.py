"""Asks the processes of a job whether it has begun, and never waits for an answer.

A job begins with all its racks, so a rack that ends earlier stops it permanently.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mend.errors import WireError
from mend.status.messages import VIEW_BYTES_MAX, JobStatus, Look, decode_view, encode_look
from mend.transport.status_client import StatusClient

ASK_S = 0.25


class Begun:
    """Answers of the processes of one job. Close it."""

    def __init__(self, secrets: tuple[bytes, ...] = ()) -> None:
        self._look = encode_look(Look(""))  # the ports are the launcher's own
        self._onlooker = StatusClient(VIEW_BYTES_MAX, secrets)
        self._views: dict[str, JobStatus] = {}
        self._asked_s = 0.0
        self._has = False

    def never(self, addresses: Sequence[str]) -> bool:
        """Return whether all addresses answer that the job has not begun. Once one answers that it
        has, none is asked any more. No answer (yet, or with `observe=False`) gives False."""
        if self._has:
            return False
        now_s = time.monotonic()
        if now_s - self._asked_s >= ASK_S:
            self._asked_s = now_s
            for address in addresses:
                self._onlooker.watch(address)
                self._onlooker.ask(address, self._look)
        for address, frame in self._onlooker.collect(0):
            try:
                self._views[address] = decode_view(frame)
            except WireError:  # whatever answers there, it is nothing of this job
                continue
        self._has = any(view.state != "starting" for view in self._views.values())
        return not self._has and set(addresses) <= self._views.keys()

    def refused(self, rack: int) -> str:
        """Return why the rack was refused; empty if it was not."""
        found = [each for view in self._views.values() for each in view.refused]
        return next((each.why for each in found if each.rack == rack), "")

    def close(self) -> None:
        self._onlooker.close()
