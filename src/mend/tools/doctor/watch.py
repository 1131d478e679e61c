"""Looks at the ports of the other racks and of the witness while the racks meet, and measures round
trips: what a job that cannot start does not know of the network."""

from __future__ import annotations

import asyncio
import math
import statistics
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mend.tools.doctor.jobs import Looks, jobs_at
from mend.transport.probe import Knock, host_and_port, knock, knock_through, trip_ns
from mend.types import MS, Address

KNOCK_S = 2.0
"""Longest wait of a knock for an answer."""

APART_S = 0.5
STOP_S = 10.0
TRIPS = 50
"""Connections that a median is made of."""

PEERS_AT_ONCE = 16


class Watch:
    """Knocks at `doors` (rack -> address), and looks at the jobs behind them, in a thread until
    `stop`. A port that was open once counts as open. `proxy`: of SOCKS5, on the way to all others
    than rack `mine`; empty: none."""

    def __init__(self, doors: Mapping[int, str], proxy: str = "", mine: int = -1) -> None:
        self._doors, self._proxy, self._mine = dict(doors), proxy, mine
        self.knocks: dict[int, Knock] = {}
        self.looks = Looks()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mend-doctor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            asyncio.run(self._knock_all())
            self.look()
            self._stopping.wait(APART_S)

    def look(self) -> None:
        """Ask all again; the newest answer of each counts."""
        self.looks = self.looks.then(jobs_at(list(self._doors.values()), proxy=self._proxy))

    async def _knock_all(self) -> None:
        known = self.knocks
        waiting = [who for who in self._doors if who not in known or not known[who].speaks]
        answers = await asyncio.gather(*(self._knock(who) for who in waiting))
        for who, answer in zip(waiting, answers, strict=True):
            if who not in known or known[who].answer != "open" or answer.speaks:
                known[who] = answer

    async def _knock(self, who: int) -> Knock:
        to = Address(*host_and_port(self._doors[who]))
        if not self._proxy or who == self._mine:
            return await knock(*to, KNOCK_S)
        through = Address(*host_and_port(self._proxy))
        return await asyncio.to_thread(knock_through, through, to, KNOCK_S)


class Trips(NamedTuple):
    """Round trips to one rack. The times are None if no connection came about."""

    tried: int
    came: int
    p50_ms: float | None
    p99_ms: float | None


def round_trips(doors: Mapping[int, str], proxy: str = "") -> dict[int, Trips]:
    """rack -> TRIPS connections to it one after the other, with all racks at the same time.
    `proxy`: of SOCKS5, through which all of them go; empty: none."""
    through = Address(*host_and_port(proxy)) if proxy else None

    def measure(address: str) -> Trips:
        to = Address(*host_and_port(address))
        found = [trip_ns(to, KNOCK_S, through) for _ in range(TRIPS)]
        took = sorted(each / MS for each in found if each is not None)
        if not took:
            return Trips(TRIPS, 0, None, None)
        p99 = took[math.ceil(0.99 * len(took)) - 1]
        return Trips(TRIPS, len(took), statistics.median(took), p99)

    with ThreadPoolExecutor(PEERS_AT_ONCE) as pool:
        return dict(zip(doors, pool.map(measure, doors.values()), strict=True))
