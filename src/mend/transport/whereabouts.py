"""The names and addresses of this machine, and the address that a peer would see.

Asks the resolver and the routing table; sends nothing to a peer.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable

from mend.transport.probe import numbers_of, source_to

LOOKUP_S = 5.0
"""Limit for looking up all names of one call."""


def inside(listens_at: str, advertised: str) -> str:
    """The number at which the other machines of its rack reach this one: where it listens, or the
    source of its packets to `advertised`, which may be the host of another machine of the rack, or
    one that only other racks reach. `advertised` itself where it has no route."""
    host = advertised if listens_at in ("", "*", "0.0.0.0", "::") else listens_at
    sources = map(source_to, numbers_of(host))
    return next((source for source in sources if source is not None), host)


class Whereabouts:
    """Looks up names and addresses, and remembers the results."""

    def __init__(self, limit_s: float = LOOKUP_S) -> None:
        self._limit_s = limit_s
        self._known: dict[str, tuple[str, ...]] = {}

    def name(self) -> str:
        """The host name of this machine."""
        return socket.gethostname()

    def look_up(self, hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The addresses of each host, all looked up at once; () for one that has none, or none
        within the limit."""
        wanted = dict.fromkeys(hosts)
        numbers: dict[str, tuple[str, ...]] = {}
        threads = [
            threading.Thread(
                target=lambda host=host: numbers.__setitem__(host, numbers_of(host)),
                name="mend-lookup",
                daemon=True,  # a resolver that hangs cannot be stopped, and is not waited for
            )
            for host in wanted
            if not self._known.get(host)
        ]
        for thread in threads:
            thread.start()
        deadline_s = time.monotonic() + self._limit_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._known.update(dict(numbers))
        return {host: self._known.get(host, ()) for host in wanted}

    def is_here(self, number: str) -> bool:
        """Whether the address is one of this machine: then, and only then, it can be bound."""
        try:
            if ipaddress.ip_address(number).is_unspecified:
                return False
            family = socket.AF_INET6 if ":" in number else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.bind((number, 0))
        except (OSError, ValueError):
            return False
        return True

    def source_to(self, number: str) -> str | None:
        """The address of this machine that a peer at `number` would see; None: no route."""
        return source_to(number)
