"""Finds free loopback ports: a lane listens on each and is closed. Sends nothing."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, closing

from mend.config.sources import LAUNCH_PORTS
from mend.errors import AddressInUse, ConfigError, ensure
from mend.transport.bulk_client import BulkLane

LOOPBACK = "127.0.0.1"

QUIET = "20000-29999"
"""Ports to pick from: below the range from which systems take the local ends of connections. A port
from that range can be gone between being found free here and being listened on by a rack."""


def quiet() -> range:
    """QUIET, or what MEND_LAUNCH_PORTS says: launchers that start at the same moment on one machine
    find the same ports free, unless each has a range of its own. Raises ConfigError."""
    text = os.environ.get(LAUNCH_PORTS) or QUIET
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 65_535):
        rule = "needs lowest-highest within 1-65535"
        raise ConfigError(LAUNCH_PORTS, text, rule, f"Set it to {QUIET}, or leave it out.")
    return range(int(low), int(high) + 1)


def free_ports(count: int, base: int = 0) -> list[int]:
    """`count` distinct ports nobody listens on right now: base, base + 1, ... or, with base 0, any.

    Another process may take one before it is used; the rack that finds it taken then says so.
    Raises AddressInUse, and ConfigError for too small a range.
    """
    with ExitStack() as held:
        ports, free = [], quiet()
        if not base and len(free) < count:
            rule, text = f"needs {count} ports or more", f"{free[0]}-{free[-1]}"
            raise ConfigError(
                LAUNCH_PORTS, text, rule, "Widen it: racks + 1 ports, and spare ones."
            )
        first = base or free.start + secrets.randbelow(min(len(free) // 2, len(free) - count) + 1)
        for wanted in range(first, first + count):
            allowed = (wanted, wanted if base else free[-1])
            try:
                lane = held.enter_context(closing(BulkLane(LOOPBACK, allowed, token=bytes(16))))
            except AddressInUse as error:
                raise AddressInUse(
                    f"--base-port {base}: port {wanted} of {LOOPBACK} is taken ({error}). Choose "
                    f"another ({count} in a row are needed), or 0 to have free ones picked."
                ) from error
            ports.append(lane.address.port)
    ensure(len(set(ports)) == count, "a port was given twice", ports=ports)
    return ports
