"""Checks the addresses that peers name for themselves, in a job without keys.

A hello names the address of its sender, and the receiver connects to it in order to answer. Without
keys that may be any address, through a wrong setting or on purpose. So an address is accepted only
if it belongs to the machine that the connection comes from, or if it is in the receiver's own
settings.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Iterable

from mend.errors import ConfigError
from mend.transport.probe import host_and_port, numbers_of
from mend.transport.whereabouts import Whereabouts

NAMES_MAX = 256
"""Limit of the names that are remembered; beyond it the oldest is forgotten."""

LOOK_AGAIN_S = 10.0
"""Time between two look-ups of the same name."""


class Origins:
    """`configured`: addresses, `tcp://host:port`, from the settings of this process. Names are
    resolved in a separate thread, one at a time, so no call here waits for the resolver."""

    def __init__(self, configured: Iterable[str]) -> None:
        self._hosts = {_host(address) for address in configured}
        self._names: dict[str, tuple[tuple[str, ...], float]] = {}
        self._here = Whereabouts()
        self._looking: threading.Thread | None = None

    def fits(self, address: str, number: str) -> bool:
        """Whether `address` may be that of the peer connected from `number`. Also False while its
        name is being looked up; the peer repeats it soon."""
        host = _host(address)
        if host is None:
            return False
        if host in self._hosts:
            return True
        own = _plain(number)
        return any(self._same(_plain(each), own) for each in self._numbers(host))

    def _same(self, named: str, own: str) -> bool:
        """Whether both are addresses of one machine: equal, or both of this machine."""
        return named == own or (self._here.is_here(named) and self._here.is_here(own))

    def _numbers(self, host: str) -> tuple[str, ...]:
        try:
            return (str(ipaddress.ip_address(host)),)
        except ValueError:
            pass
        numbers, since_s = self._names.get(host, ((), -LOOK_AGAIN_S))
        busy = self._looking is not None and self._looking.is_alive()
        if not busy and time.monotonic() - since_s >= LOOK_AGAIN_S:
            look = threading.Thread(
                target=self._look_up,
                args=(host,),
                name="mend-lookup",
                daemon=True,  # a resolver that hangs cannot be stopped, and is not waited for
            )
            self._looking = look
            with contextlib.suppress(RuntimeError):  # no more threads now; the name comes again
                look.start()
        return numbers

    def _look_up(self, host: str) -> None:
        numbers = numbers_of(host)
        self._names.pop(host, None)
        self._names[host] = numbers, time.monotonic()
        if len(self._names) > NAMES_MAX:
            del self._names[next(iter(self._names))]


def _host(address: str) -> str | None:
    try:
        return host_and_port(address)[0]
    except ConfigError:
        return None


def _plain(number: str) -> str:
    """The address without the interface of a link-local one, and as IPv4 if it is mapped."""
    address = ipaddress.ip_address(number.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
