"""cli.ports: free loopback ports, found by binding and closing. Sends and receives no byte."""

from __future__ import annotations

import contextlib
import socket

from mend.errors import AddressInUse

LOOPBACK = "127.0.0.1"


def free_ports(count: int, base: int = 0) -> list[int]:
    """`count` distinct ports nobody listens on right now: base, base + 1, ... or, with base 0, any.

    Another process may take one before it is used; the rack that finds it taken then says so.
    Raises AddressInUse.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for offset in range(count):
            wanted = base + offset if base else 0
            listener = held.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((LOOPBACK, wanted))
            except OSError as error:
                raise AddressInUse(
                    f"--base-port {base}: port {wanted} of {LOOPBACK} is taken ({error}). Choose "
                    f"another ({count} in a row are needed), or 0 to have free ones picked."
                ) from error
            ports.append(int(listener.getsockname()[1]))
    assert len(set(ports)) == count, f"ports were given twice: {ports}"
    return ports
