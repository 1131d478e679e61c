"""Finds the names and addresses of this machine, and the address that a peer would see.

Consults the resolver and the routing table; sends nothing to a peer.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable

from mend.transport.probe import numbers_of, source_to

LOOKUP_S = 5.0
"""Limit of one call that looks up names, for all of them together."""


def inside(listens_at: str, advertised: str) -> str:
    """The numeric address at which the other machines of the rack reach this one: the address where
    it listens, or the source of its packets to `advertised`. `advertised` may be another machine of
    the rack, or a host that only other racks reach; if there is no route to it, it is returned
    itself."""
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
        """The addresses of each host, all looked up concurrently; () for a host without any, or
        whose look-up exceeds the limit."""
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
        """Whether this machine has the address: then, and only then, it can be bound."""
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
