"""cli.ports: free loopback ports, found by letting a lane listen and closing it. No byte moves."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, closing

from mend.errors import AddressInUse
from mend.transport.pull import PullLane

LOOPBACK = "127.0.0.1"

QUIET = range(20_000, 30_000)
"""Where ports are picked: below the range from which systems take the local ends of connections. A
port from that range can be gone between being found free here and being listened on by a rack."""


def free_ports(count: int, base: int = 0) -> list[int]:
    """`count` distinct ports nobody listens on right now: base, base + 1, ... or, with base 0, any.

    Another process may take one before it is used; the rack that finds it taken then says so.
    Raises AddressInUse.
    """
    with ExitStack() as held:
        ports = []
        first = base or QUIET.start + secrets.randbelow(len(QUIET) // 2)
        for wanted in range(first, first + count):
            allowed = (wanted, wanted if base else QUIET.stop)
            try:
                lane = held.enter_context(closing(PullLane(LOOPBACK, allowed, token=bytes(16))))
            except AddressInUse as error:
                raise AddressInUse(
                    f"--base-port {base}: port {wanted} of {LOOPBACK} is taken ({error}). Choose "
                    f"another ({count} in a row are needed), or 0 to have free ones picked."
                ) from error
            ports.append(lane.address.port)
    assert len(set(ports)) == count, f"ports were given twice: {ports}"
    return ports
